"""Planted bugs are found, and the finding that comes first names the right cause: a sample that covers each family.

The whole exam is a command: brick doctor --exam.
"""

from __future__ import annotations

import pytest

from brickformer.doctor import PROBES, diagnose
from brickformer.doctor.mutants import BUGS, CLEAN, Planted
from brickformer.doctor.mutants.score import Mark, Score, sit

FIRST = {bug.probe: bug for bug in reversed(BUGS)}
SAMPLE = [bug for i, bug in enumerate(BUGS) if i % 3 == 0 or FIRST[bug.probe] is bug]


@pytest.mark.parametrize("bug", SAMPLE, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Planted) -> None:
    mark = sit(bug, diagnose)
    assert mark.named, mark
    assert mark.placed is not False or bug.probe in ("input", "positions", "length", "norm axis"), mark


def test_there_are_enough_of_them_and_no_name_stands_twice() -> None:
    names = [x.name for x in (*BUGS, *CLEAN)]
    assert len(BUGS) >= 80 and len(CLEAN) >= 40 and len(set(names)) == len(names)


def test_every_probe_that_accuses_has_a_planted_bug() -> None:
    only_notes = {"precision"}
    told = {"overfit"}  # where no other probe speaks: a test of its own
    assert {p.name for p in PROBES} - only_notes - told <= {b.probe for b in BUGS} | {"loss"}


def test_a_score_counts() -> None:
    marks = (
        Mark("a", "scale", True, True, True, ""),
        Mark("b", "scale", True, False, False, ""),
        Mark("c", "eval", False, False, None, ""),
    )
    result = Score(marks, 7, (("x", "y"),))
    assert (result.recall, result.named) == (2 / 3, 1 / 3)
    assert list(result.families()) == [("scale", 2, 2, 1, 2, 1), ("eval", 1, 0, 0, 0, 0)]
    assert (Score((), 3, ()).recall, Score((), 3, ()).named) == (1.0, 1.0)
    assert result.table()[-3:] == ["| **all** | 3 | 2 | 1 | 1 of 2 |", "", "False alarms on 7 clean variants: 1."]
