"""Prove an assembled model: build a tiny twin of the same bricks and try every property it owes.

    report = check(spec);   report.ok;   print(report)

Nothing that is drawn here is missing elsewhere: the random numbers of the caller go on as if nothing had happened.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from brickformer.models import AnyModel, ModelSpec
from brickformer.proof.blame import blame, said
from brickformer.proof.properties import PROPERTIES, Property
from brickformer.proof.report import Report, Row
from brickformer.proof.subject import Subject
from brickformer.proof.twin import Twin, twin_of
from brickformer.proof.weights import weights_rows

RUNS = Property("runs", "runs", lambda s: "")


def check(what: ModelSpec | AnyModel) -> Report:
    """Every property that a model of this spec owes, proved on its twin; of a model, also its own weights.

    Errors: SpecError when it cannot be built at all.
    """
    spec = what if isinstance(what, ModelSpec) else what.spec
    with _undisturbed():
        twin = twin_of(spec)
        rows = _rows(twin)
        if not isinstance(what, ModelSpec):
            rows += weights_rows(what, twin.tokens)
    return Report(spec.kind, twin.depth, len(twin.layers), tuple(rows))


def _rows(twin: Twin) -> list[Row]:
    try:
        subject = Subject(twin.spec, twin.tokens)
    except Exception as e:
        return [_broken(RUNS, twin, said(e))]
    return [_row(prop, subject, twin) for prop in PROPERTIES]


def _row(prop: Property, subject: Subject, twin: Twin) -> Row:
    try:
        reason = prop.why_not(subject)
        if reason is not None:
            return Row(prop.says, "not owed", reason)
        return Row(prop.says, "holds", prop.run(subject))
    except Exception as e:
        return _broken(prop, twin, said(e))


def _broken(prop: Property, twin: Twin, message: str) -> Row:
    found = blame(prop, twin, message)
    return Row(prop.says, "broken", found.message, found.where, found.kind)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Random numbers, Python's and torch's, and the type of new tensors are afterwards what they were."""
    state, dtype = random.getstate(), torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            random.setstate(state)
