"""Filters of sampling keep what their names say: top_k the k best, top_p the nucleus, min_p what is near the best.

    top_p (arXiv 1904.09751): the smallest set whose probability reaches p;   min_p: p_i >= value · max p

Whatever the filter: a row does not know the others, names of ids do not matter, and the best id stays.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from brickformer.doctor.exam import Exam, Probe
from brickformer.doctor.report import Finding


def _why_not(e: Exam) -> str | None:
    return None if e.p.subject.filters else "no filter given: Subject(filters={'top_k': (function, 3)})"


def _run(e: Exam) -> list[Finding]:
    found: list[Finding] = []
    for name, (function, value) in e.p.subject.filters.items():
        found += _one(name, function, value)
    return found


def _one(name: str, function: Callable[..., Tensor], value: float) -> list[Finding]:
    g = torch.Generator().manual_seed(4)
    logits = 2.0 * torch.randn(5, 23, generator=g)

    def kept(x: Tensor) -> Tensor:
        out = function(x.clone(), value)
        if out.shape != x.shape:
            raise ValueError(f"{name} gave {tuple(out.shape)} for {tuple(x.shape)}")
        return (out > 0) if float(out.min()) >= 0 and float(out.max()) <= 1 else (out > -1e4) & out.isfinite()

    try:
        base = kept(logits)
    except Exception as error:
        try:
            kept(logits[:1])
        except Exception:
            raise error from None
        said = (str(error).splitlines() or [""])[0][:90]
        return [_finding(name, f"{name} answers one row and raises {type(error).__name__} for five: {said}", "a batch")]
    right = _right(name, logits, value)
    best = base.gather(1, logits.argmax(-1, keepdim=True))
    if not bool(best.all()):
        return [_finding(name, f"{name} = {value:g} throws away the likeliest id", "the comparison is upside down")]
    alone = torch.cat([kept(row[None]) for row in logits])
    if not torch.equal(alone, base):
        return [_finding(name, f"{name} keeps other ids when other rows are there", "an index or a maximum over rows")]
    order = torch.randperm(23, generator=g)
    if not torch.equal(kept(logits[:, order]), base[:, order]):
        return [
            _finding(
                name,
                f"{name} keeps other ids when the ids get other numbers",
                "a fixed id stands where the best one was meant ([..., 0] instead of max), or sorted places are "
                "not put back",
            )
        ]
    if right is not None and not torch.equal(right, base):
        counts = f"{base.sum(-1).tolist()} ids where {right.sum(-1).tolist()} were expected"
        return [_finding(name, f"{name} = {value:g} keeps {counts}", "the cut is at the wrong place")]
    return []


def _right(name: str, logits: Tensor, value: float) -> Tensor | None:
    p = logits.softmax(-1)
    if name == "top_k":
        return logits >= logits.topk(int(value)).values[:, -1:]
    if name == "min_p":
        return p >= value * p.amax(-1, keepdim=True)
    if name == "top_p":
        order = p.argsort(-1, descending=True)
        q = p.gather(1, order)
        keep = q.cumsum(-1) - q < value
        return torch.zeros_like(keep).scatter(1, order, keep)
    return None


def _finding(name: str, measured: str, cause: str) -> Finding:
    return Finding(
        "sampling filters",
        "error",
        name,
        measured,
        "what the name says, row by row",
        cause,
        "compare with the definition on five random rows: p >= min_p * p.amax(-1, keepdim=True), and so on",
        f"{name}(logits)[:1] == {name}(logits[:1])",
    )


PROBE = Probe("sampling filters", "a filter keeps what its name says", _run, _why_not)
