"""Every two bricks that can meet do meet in at least one model; every two that cannot are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
from contract.bricks import SLOTS, Cell, Pair, all_pairs, can_meet, pairs, refusal
from contract.checks import all_kernels_agree, failures

from brickformer.errors import SpecError

CELLS = pairs()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_contract(cell: Cell) -> None:
    found = failures(cell.build())
    assert not found, "\n".join([f"{cell} breaks its contract:", *found])


@pytest.mark.unchecked
@pytest.mark.parametrize("cell", CELLS[::6], ids=str)
def test_flex_says_the_same(cell: Cell) -> None:
    all_kernels_agree(cell.build())


def test_every_two_entries_meet() -> None:
    met = {frozenset(two) for cell in CELLS for two in combinations(cell.items(), 2)}
    impossible = {pair for pair in all_pairs() if refusal(dict(pair)) is not None}
    assert met == set(all_pairs()) - impossible, f"never met: {sorted(map(sorted, set(all_pairs()) - impossible - met))}"
    assert len(CELLS) <= 2 * max(len(a) * len(b) for a, b in combinations(SLOTS.values(), 2)), "the table is not short"


def _impossible() -> Iterator[object]:
    for pair in all_pairs():
        why = refusal(dict(pair))
        if why is not None:
            yield pytest.param(pair, *why, id="-".join(sorted(entry for _, entry in pair)))


@pytest.mark.parametrize(("pair", "sort", "reason"), _impossible())
def test_what_cannot_meet_is_refused(pair: Pair, sort: str, reason: str) -> None:
    chosen = dict(pair)
    assert not can_meet(pair)
    if sort == "no place":
        return
    if chosen.get("family") == "encoder_decoder" and "cross" not in chosen:
        chosen["cross"] = "mha"
    if "cross" in chosen and chosen["cross"] != "none" and "family" not in chosen:
        chosen["family"] = "encoder_decoder"
    with pytest.raises(SpecError) as refused:
        Cell(**chosen).spec().build()
    assert reason in str(refused.value)
