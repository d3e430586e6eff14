"""Another way to the same answer: a quantised copy, a converted model, a loss that several processes compute.

KL(p ‖ p') small for a twin with fewer bits;     loss == loss' for another way to compute it
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.guard import copied
from brickformer.doctor.outputs import differ
from brickformer.doctor.report import Finding

MOST = 0.05  # nats: what int8 costs a healthy model is below 0.001


def _why_not(e: Exam) -> str | None:
    return None if e.p.subject.twins else "no twin given: Subject(twins={'int8': quantised})"


def _run(e: Exam) -> list[Finding]:
    found: list[Finding] = []
    for name, twin in e.p.subject.twins.items():
        found += _model(e, name, twin) if isinstance(twin, nn.Module) else _function(e, name, twin)
    return found


def _model(e: Exam, name: str, twin: nn.Module) -> list[Finding]:
    ids, src = e.p.draw(4), e.p.source(4)
    modes = [(m, m.training) for m in twin.modules()]
    try:
        return _compared(e, name, ids, src, _plain(e), twin.eval())
    finally:
        for m, mode in modes:
            m.training = mode


def _compared(e: Exam, name: str, ids: Tensor, src: Tensor | None, whole: nn.Module, other: nn.Module) -> list[Finding]:
    p = e.p
    outs: list[Tensor] = []
    with torch.no_grad():
        for model in (whole, other):
            try:
                outs.append(p(ids, src=src, model=model))
            except RuntimeError as error:
                if model is other and "dtype" in str(error).lower() and p.width:
                    outs.append(p(ids.float(), src=src, model=model))
                    continue
                raise
    a, b = (x.double() for x in outs)
    if not bool(b.isfinite().all()):
        return [_gap(name, "", f"the answers of {name} are not finite", "a scale of 0, or an overflow")]
    gap = float(F.kl_div(b.log_softmax(-1), a.log_softmax(-1), reduction="sum", log_target=True) / a[..., 0].numel())
    if gap <= MOST:
        return []
    place = _first(e, whole, other, ids, src)
    return [
        _gap(
            name,
            place,
            f"{name} is {number(gap)} nats a token away (outputs differ by {number(differ(a, b).max())})",
            "one scale for a row of numbers of very different size: an outlier takes the grid, the rest becomes 0",
        )
    ]


def _plain(e: Exam) -> nn.Module:
    """The model as it came, in its own precision."""
    return copied(e.p.subject.model).eval()


def _first(e: Exam, a: nn.Module, b: nn.Module, ids: Tensor, src: Tensor | None) -> str:
    """The module of the same path whose answer is the first to be far off."""
    kept: list[dict[str, Tensor]] = []
    for model in (a, b):
        outs: dict[str, Tensor] = {}
        for path, _, said in e.record(partial(e.p, ids, src=src, model=model), model):
            if said:
                outs.setdefault(path, said[0].double())
        kept.append(outs)
    for path, x in kept[0].items():
        y = kept[1].get(path)
        if path and y is not None and y.shape == x.shape:
            off = float((x - y).norm() / x.norm().clamp(min=1e-12))
            if off > 0.1:
                return path
    return ""


def _function(e: Exam, name: str, twin: Any) -> list[Finding]:
    p = e.p
    model = _plain(e)
    ids, src = p.draw(4), p.source(4)
    given = (ids,) if src is None else (src, ids)
    with torch.no_grad():
        other = twin(model, *given)
        other = other if isinstance(other, Tensor) else torch.as_tensor(other)
        if other.numel() == 1:
            own = p.loss(ids, src, model)
            if own is None:
                raise LookupError("the twin gives a loss, and no loss of its own is known: Subject(loss=...)")
            return _losses(name, float(own), float(other))
        own = p(ids, src=src, model=model)
        moved = float(differ(own, p.arranged(other, *ids.shape[:2])).max())
    return [] if moved <= 1e-3 else [_gap(name, "", f"{name} differs by {number(moved)}", "another computation")]


def _losses(name: str, own: float, other: float) -> list[Finding]:
    off = other - own
    if abs(off) <= 1e-3 * max(1.0, abs(own)):
        return []
    parts = next((k for k in (2, 4, 8, 3, 16) if math.isclose(abs(off), math.log(k), abs_tol=0.05)), None)
    times = next((k for k in (2, 4, 8, 3, 16) if math.isclose(other, own * k, rel_tol=0.01)), None)
    cause = "the two ways do not compute the same"
    if parts:
        cause = (
            f"off by ln {parts}: the softmax runs over a {parts}th of the vocabulary, the parts are never put together"
        )
    elif times:
        cause = f"{times} times as large: the parts are added up, not averaged"
    return [_gap(name, "", f"the loss is {number(own)}, {name} says {number(other)}", cause)]


def _gap(name: str, place: str, measured: str, cause: str) -> Finding:
    return Finding(
        "twins",
        "error",
        place,
        measured,
        "the same answer, but for what the format costs",
        cause,
        "compare layer by layer; keep outlier columns apart, or one scale a channel; reduce over all parts",
        "(model(x).log_softmax(-1) - twin(x).log_softmax(-1)).abs().max()",
        "likely",
    )


PROBE = Probe("twins", "another way gives the same answer", _run, _why_not)
