"""Every brick of every slot, under every placement, in every family, owes the whole contract."""

from __future__ import annotations

import pytest
from contract.bricks import BRICKS, FAMILIES, KIND, PLACES, SLOTS, Cell, refusal, star, stars
from contract.checks import CHECKS, failures, owed

pytestmark = pytest.mark.unchecked  # shapes are checked in test_pairs.py, on fewer models: the checker costs time


@pytest.mark.parametrize("cell", stars(), ids=str)
def test_contract(cell: Cell) -> None:
    found = failures(cell.build())
    assert not found, "\n".join([f"{cell} breaks its contract:", *found])


@pytest.mark.parametrize("slot", BRICKS)
def test_no_brick_no_placement_and_no_family_is_left_out(slot: str) -> None:
    tried = {(KIND[slot, dict(cell.items())[slot]], cell.place, cell.family) for cell in star(slot)}
    for entry in SLOTS[slot]:
        for place in PLACES if slot != "place" else [entry]:
            assert refusal({slot: entry, "place": place}) is None
            for family in FAMILIES:
                assert (KIND[slot, entry], place, family) in tried


def test_every_check_is_owed_by_some_family() -> None:
    families = [Cell(family=f, cross="mha" if f == "encoder_decoder" else "none").build() for f in FAMILIES]
    assert {check.name for model in families for check in owed(model)} == set(CHECKS)
    assert all(check.__doc__ for check in (c.run for c in CHECKS.values()))


def test_names_of_cells_are_unique() -> None:
    names = [str(cell) for cell in stars()]
    assert len(set(names)) == len(names) >= 200
    assert str(Cell()) == "decoder" and set(dict(Cell().items())) == set(SLOTS)
