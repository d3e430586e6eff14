"""Diagnose a model: admit it, try every probe, fold symptoms into their causes.

    report = diagnose(model);   report.ok;   print(report)

The model is copied first: weights, mode, buffers and random numbers of the caller are afterwards what they were. A
probe never raises: what could not be tested is a verdict with its reason.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from brickformer.doctor.adapter import admit
from brickformer.doctor.exam import Exam, Probe
from brickformer.doctor.guard import undisturbed
from brickformer.doctor.probes import PROBES
from brickformer.doctor.report import Finding, Report, Verdict, folded
from brickformer.doctor.subject import Subject
from brickformer.errors import SpecError


def diagnose(what: nn.Module | Subject, **said: Any) -> Report:
    """Every probe on a model. said: fields of Subject, as kind="decoder" or pad=0.

    Errors: SpecError for what is no model; CannotCall (a BrickError) when nobody can call it.
    """
    if isinstance(what, nn.Module):
        what = Subject(what, **said)
    if not isinstance(what, Subject):
        raise SpecError(f"diagnose(): got {type(what).__name__}; expected an nn.Module or a Subject.")
    with undisturbed():
        exam = Exam(admit(what))
        found: list[Finding] = []
        verdicts = []
        for probe in PROBES:
            if probe.name == "overfit" and any(f.severity == "error" for f in found):
                verdicts.append(Verdict(probe.name, "not owed", "something else is wrong already"))
                continue
            verdict, findings = _tried(probe, exam)
            verdicts.append(verdict)
            found += findings
    return Report(what.name or type(what.model).__name__, tuple(exam.p.facts), folded(found), tuple(verdicts))


def _tried(probe: Probe, exam: Exam) -> tuple[Verdict, list[Finding]]:
    try:
        exam.p.model.eval()
        reason = probe.why_not(exam)
        if reason is not None:
            return Verdict(probe.name, "not owed", reason), []
        findings = probe.run(exam)
    except Exception as e:
        said = (str(e).splitlines() or [""])[0]
        return Verdict(probe.name, "untested", f"{type(e).__name__}: {said}"[:200]), []
    return Verdict(probe.name, "found" if findings else "healthy"), findings
