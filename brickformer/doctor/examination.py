"""Diagnose a model: admit it, try every probe, fold symptoms into their causes.

    report = diagnose(model);   report.ok;   print(report)

The model is copied first: weights, mode, buffers and random numbers of the caller are afterwards what they were. A
probe never raises: what could not be tested is a verdict with its reason. Each probe gets a share of the time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from brickformer.doctor.adapter import CannotCall, admit
from brickformer.doctor.exam import Exam, Probe
from brickformer.doctor.guard import Budget, OutOfTime, undisturbed
from brickformer.doctor.kinds import of_library
from brickformer.doctor.probes import PROBES
from brickformer.doctor.report import Finding, Report, Verdict, folded
from brickformer.doctor.subject import Subject
from brickformer.errors import SpecError

ON_PURPOSE = frozenset(
    {
        "scale",
        "padding",
        "initial weights",
        "left padding",
        "dead parameters",
        "sharing",
        "angles",
        "length",
        "routing",
    }
)
"""What a published architecture may do on purpose (GPT-Neo scales nothing, FNet has no mask): a note, no alarm."""
LAST = frozenset({"overfit", "random labels"})  # name no cause: only where no error was found


def diagnose(what: nn.Module | Subject, *, seconds: float = 60.0, **said: Any) -> Report:
    """Every probe on a model. said: fields of Subject, as kind="decoder" or pad=0; seconds: what it may take in all.

    Errors: SpecError for what is no model; CannotCall (a BrickError) when nobody can call it.
    """
    if isinstance(what, nn.Module):
        what = Subject(what, **said)
    if not isinstance(what, Subject):
        raise SpecError(f"diagnose(): got {type(what).__name__}; expected an nn.Module or a Subject.")
    budget = Budget(seconds)
    with undisturbed():
        exam = Exam(_admitted(what, budget))
        found: list[Finding] = []
        verdicts = []
        for probe in PROBES:
            if probe.name in LAST and any(f.severity == "error" for f in found):
                verdicts.append(Verdict(probe.name, "not owed", "something else is wrong already"))
                continue
            budget.share(0.4)
            verdict, findings = _tried(probe, exam)
            verdicts.append(verdict)
            found += findings
    if of_library(what.model):
        found = [replace(f, severity="note") if f.probe in ON_PURPOSE else f for f in found]
    return Report(what.name or type(what.model).__name__, tuple(exam.p.facts), folded(found), tuple(verdicts))


def _admitted(what: Subject, budget: Budget) -> Any:
    budget.share(0.6)
    try:
        return admit(what, budget)
    except OutOfTime as e:
        raise CannotCall(
            f"{type(what.model).__name__}: how it is called could not be worked out in time ({e}). Give the doctor a "
            f"narrow model of two layers, or say kind, vocab and call: Subject(model, kind=..., vocab=..., call=...)."
        ) from None


def _tried(probe: Probe, exam: Exam) -> tuple[Verdict, list[Finding]]:
    try:
        exam.p.model.eval()
        reason = probe.why_not(exam)
        if reason is not None:
            return Verdict(probe.name, "not owed", reason), []
        findings = probe.run(exam)
    except OutOfTime as e:
        return Verdict(probe.name, "untested", str(e)), []
    except (Exception, SystemExit) as e:
        said = (str(e).splitlines() or [""])[0]
        return Verdict(probe.name, "untested", f"{type(e).__name__}: {said}"[:200]), []
    return Verdict(probe.name, "found" if findings else "healthy"), findings
