"""The exam: every planted bug and every clean variant before the doctor, and what it said of them.

recall = found / planted;   a bug is named when its probe comes first, placed when the broken module is named
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from brickformer.doctor.mutants.bug import Clean, Planted


@dataclass(frozen=True)
class Mark:
    """What became of one bug. placed: None where there is no one module to name."""

    name: str
    family: str
    found: bool
    named: bool
    placed: bool | None
    said: str


def sit(bug: Planted, diagnose: Callable[[Any], Any]) -> Mark:
    """One planted bug before the doctor."""
    subject = bug.subject()
    report = diagnose(subject)
    first = report.wrong[0] if report.wrong else None
    right = next((f for f in report.wrong if f.probe == bug.probe), None)
    places = bug.places(subject.model)
    placed = None if not places else right is not None and _near(right.where, places)
    said = f"{first.probe} at {first.where or '-'}" if first else "nothing"
    return Mark(bug.name, bug.probe, first is not None, first is not None and first.probe == bug.probe, placed, said)


def _near(where: str, places: Iterable[str]) -> bool:
    """The module itself, the layer around it or a part of it; an instance of another layer is as good."""
    if not where:
        return False
    return any(where == p or where.startswith(p + ".") or p.startswith(where + ".") for p in places)


@dataclass(frozen=True)
class Score:
    """All marks, and the alarms on clean variants: (name, what was said)."""

    marks: tuple[Mark, ...]
    clean: int
    alarms: tuple[tuple[str, str], ...]

    @property
    def recall(self) -> float:
        """The part of the bugs that was found; of none all."""
        return sum(m.found for m in self.marks) / len(self.marks) if self.marks else 1.0

    @property
    def named(self) -> float:
        """The part of the bugs whose cause came first; of none all."""
        return sum(m.named for m in self.marks) / len(self.marks) if self.marks else 1.0

    def families(self) -> Iterator[tuple[str, int, int, int, int, int]]:
        """(family, planted, found, named, with one module to name, that module named)."""
        for family in dict.fromkeys(m.family for m in self.marks):
            own = [m for m in self.marks if m.family == family]
            placed = [m.placed for m in own if m.placed is not None]
            yield family, len(own), sum(m.found for m in own), sum(m.named for m in own), len(placed), sum(placed)

    def table(self) -> list[str]:
        """In Markdown."""
        lines = ["| family | planted | found | named first | module named |", "| -- | -- | -- | -- | -- |"]
        total = [0] * 5
        for family, *counts in self.families():
            total = [a + b for a, b in zip(total, counts, strict=True)]
            lines.append(_row(family, counts))
        lines.append(_row("**all**", total))
        lines.append("")
        lines.append(f"False alarms on {self.clean} clean variants: {len(self.alarms)}.")
        return lines


def _row(family: str, counts: list[int]) -> str:
    planted, found, named, places, placed = counts
    return f"| {family} | {planted} | {found} | {named} | {f'{placed} of {places}' if places else '-'} |"


def score(
    bugs: Iterable[Planted], clean: Iterable[Clean], diagnose: Callable[[Any], Any], progress: Callable[[str], None]
) -> Score:
    """Everybody sits the exam; progress is told each name and what was said."""
    marks, alarms, count = [], [], 0
    for bug in bugs:
        mark = sit(bug, diagnose)
        marks.append(mark)
        progress(f"{'found' if mark.named else 'MISSED' if not mark.found else 'other cause'}: {bug.name}: {mark.said}")
    for variant in clean:
        count += 1
        report = diagnose(variant.subject())
        if not report.ok:
            alarms.append((variant.name, f"{report.wrong[0].probe}: {report.wrong[0].measured}"))
        progress(
            f"{'silent' if report.ok else 'FALSE ALARM'}: {variant.name}" + ("" if report.ok else f": {alarms[-1][1]}")
        )
    return Score(tuple(marks), count, tuple(alarms))
