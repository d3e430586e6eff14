"""Every planted bug is found, and the finding that comes first names the right cause."""

from __future__ import annotations

import pytest
from doctor.planted import PLANTED, Planted

from brickformer.doctor import PROBES, diagnose


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Planted) -> None:
    report = diagnose(bug.subject())
    assert report.probes[:1] == (bug.probe,), str(report)
    assert not report.ok
    first = report.wrong[0]
    assert first.measured and first.expected and first.cause and first.fix


def test_every_probe_that_accuses_has_a_planted_bug() -> None:
    only_notes = {"masked rows", "precision"}
    told = {"length", "overfit"}  # where no other probe speaks: tests of their own
    assert {p.name for p in PROBES} - only_notes - told <= {b.probe for b in PLANTED} | {"loss"}
