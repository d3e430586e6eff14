"""Every entry meets every brick that it can meet in at least one model; what cannot meet is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract.bricks import KIND, SLOTS, Cell, Meeting, all_meetings, meetings, pairs, refusal, why_not
from contract.checks import failures, flex_agrees

from brickformer.errors import SpecError

CELLS = pairs()
CHECKED = CELLS[::12]  # with the shapes of every call checked, which takes its time


def broken(cell: Cell) -> str:
    """What the model of this cell owes and does not keep."""
    found = failures(cell.build())
    return "\n".join([f"{cell} breaks its contract:", *found]) if found else ""


@pytest.mark.unchecked
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in CHECKED], ids=str)
def test_contract(cell: Cell) -> None:
    assert not broken(cell), broken(cell)


@pytest.mark.parametrize("cell", CHECKED, ids=str)
def test_contract_and_shapes(cell: Cell) -> None:
    assert not broken(cell), broken(cell)


@pytest.mark.unchecked
@pytest.mark.parametrize("cell", CELLS[::28], ids=str)
def test_flex_says_the_same(cell: Cell) -> None:
    flex_agrees(cell.build())


def test_every_entry_meets_every_brick() -> None:
    met = set().union(*(meetings(dict(cell.items())) for cell in CELLS))
    possible = {meeting for meeting in all_meetings() if why_not(meeting) is None}
    assert met == possible, f"never met: {sorted(possible - met)}, met against the rules: {sorted(met - possible)}"
    assert len(CELLS) <= 2 * max(
        len(a) * len({KIND[k, e] for e in b}) for a in SLOTS.values() for k, b in SLOTS.items()
    )


def _impossible() -> Iterator[object]:
    for meeting in all_meetings():
        why = why_not(meeting)
        if why is not None and why[0] == "refused":
            yield pytest.param(meeting, why[1], id=f"{meeting[1]} and {meeting[3]}")


@pytest.mark.parametrize(("meeting", "reason"), list(_impossible()))
def test_what_cannot_meet_is_refused(meeting: Meeting, reason: str) -> None:
    slot, entry, other, brick = meeting
    for option in (e for e in SLOTS[other] if KIND[other, e] == brick):
        chosen = {slot: entry, other: option}
        if chosen.get("family") == "encoder_decoder" and "cross" not in chosen:
            chosen["cross"] = "mha"
        if chosen.get("cross", "none") != "none" and "family" not in chosen:
            chosen["family"] = "encoder_decoder"
        with pytest.raises(SpecError) as refused:
            Cell(**chosen).spec().build()
        assert reason in str(refused.value)


def test_only_missing_fields_are_a_reason_without_a_refusal() -> None:
    """Whatever else cannot meet has to be refused by the package itself."""
    reasons = {why_not(meeting) for meeting in all_meetings()} - {None}
    assert {sort for sort, _ in reasons} == {"refused", "no place"}  # type: ignore[misc]
    for meeting in all_meetings():
        why = why_not(meeting)
        if why is not None and why[0] == "no place":
            assert {meeting[0], meeting[2]} == {"mixer", "position"}
    assert refusal({}) is None
