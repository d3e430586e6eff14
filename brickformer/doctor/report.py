"""The doctor's report: findings, what could not be tested, what the adapter worked out.

A finding names a probe, a place, what was measured against what is expected, the likely cause and what to do. `error`
and `warning` count as findings; a `note` is worth knowing and changes no exit code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
Confidence = Literal["certain", "likely", "possible"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. where: a module path. explains: probes whose findings are only symptoms of this one."""

    probe: str
    severity: Severity
    where: str
    measured: str
    expected: str
    cause: str
    fix: str
    confirm: str = ""
    confidence: Confidence = "certain"
    explains: frozenset[str] = frozenset()
    also: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        names = "probe severity confidence where measured expected cause fix confirm".split()
        return {name: getattr(self, name) for name in names} | {"also": list(self.also)}


@dataclass(frozen=True)
class Verdict:
    """What became of one probe. detail: why it does not apply or could not be tested."""

    probe: str
    outcome: Literal["healthy", "found", "not owed", "untested"]
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """All that was found. facts: what the adapter worked out about the model, in words."""

    name: str
    facts: tuple[str, ...]
    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """The findings that count: errors and warnings."""
        return tuple(f for f in self.findings if f.severity != "note")

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong as far as it could be tested."""
        return not self.wrong

    @property
    def probes(self) -> tuple[str, ...]:
        """The probes with a finding that counts, the most likely cause first."""
        return tuple(f.probe for f in self.wrong)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "model": self.name,
            "ok": self.ok,
            "facts": list(self.facts),
            "findings": [f.to_dict() for f in self.findings],
            "probes": [{"probe": v.probe, "outcome": v.outcome, "detail": v.detail} for v in self.verdicts],
        }

    def __str__(self) -> str:
        """For a terminal: the facts, every finding in a block, then one line of what was tried."""
        lines = [f"{self.name}: {', '.join(self.facts)}"]
        for f in self.findings:
            lines += ["", f"{f.severity.upper()}  {f.probe}" + (f"  at {f.where}" if f.where else "")]
            rows = [("measured", f.measured), ("expected", f.expected), ("cause", _sure(f)), ("fix", f.fix)]
            rows += [("confirm", f.confirm)] if f.confirm else []
            rows += [("also", "; ".join(f.also))] if f.also else []
            for name, text in rows:
                first, *rest = text.splitlines() or [""]
                lines += [f"  {name:<9} {first}", *(f"  {'':<9} {line}" for line in rest)]
        lines += ["", self.summary()]
        untested = [v for v in self.verdicts if v.outcome == "untested"]
        lines += [f"{v.probe} could not be tested, because {v.detail}" for v in untested]
        return "\n".join(lines)

    def summary(self) -> str:
        """``2 findings of 18 probes.``"""
        tried = [v for v in self.verdicts if v.outcome in ("healthy", "found")]
        count = len(self.wrong)
        said = "nothing wrong" if not count else f"{count} finding{'s' if count != 1 else ''}"
        return f"{said}: {len(tried)} probes tried, {len(self.verdicts) - len(tried)} do not apply or not tested."


def _sure(f: Finding) -> str:
    return f.cause if f.confidence == "certain" else f"{f.confidence}: {f.cause}"


def folded(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Symptoms join the finding that explains them; the worst come first, in the order of the probes."""
    found = list(findings)
    causes = [f for f in found if f.explains and f.severity != "note"]
    kept = []
    for f in found:
        roots = [c for c in causes if f.probe in c.explains and c.probe not in f.explains and c is not f]
        if not roots:
            kept.append(f)
    result = []
    for f in kept:
        also = tuple(f"{s.probe}: {s.measured}" for s in found if s not in kept and s.probe in f.explains)
        result.append(replace(f, also=also))
    order = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(result, key=lambda f: order[f.severity]))
