"""Every brick of every slot, under every placement, in every family, owes the whole contract."""

from __future__ import annotations

import pytest
from contract.bricks import PLACES, SLOTS, Cell, refusal, star, stars
from contract.checks import CHECKS, failures, owed

pytestmark = pytest.mark.unchecked  # shapes are checked in test_pairs.py, on fewer models: the checker costs time


@pytest.mark.parametrize("cell", stars(), ids=str)
def test_contract(cell: Cell) -> None:
    found = failures(cell.build())
    assert not found, "\n".join([f"{cell} breaks its contract:", *found])


def test_no_entry_and_no_placement_is_left_out() -> None:
    for slot, entries in SLOTS.items():
        cells = list(star(slot))
        for entry in entries:
            places = {cell.place for cell in cells if getattr(cell, slot) == entry}
            possible = {place for place in PLACES if refusal({slot: entry, "place": place}) is None}
            assert places == possible, f"{slot}={entry} is tried under {sorted(places)} only"


def test_every_check_is_owed_by_some_family() -> None:
    families = [Cell(family=f, cross="mha" if f == "encoder_decoder" else "none").build() for f in SLOTS["family"]]
    assert {check.name for model in families for check in owed(model)} == set(CHECKS)
