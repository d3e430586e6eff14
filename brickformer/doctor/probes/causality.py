"""The future is not seen: changing token j leaves every output before j as it is, with padding in between as well."""

from __future__ import annotations

import torch

from brickformer.doctor.exam import Exam, Probe, causal_only, number
from brickformer.doctor.outputs import differ
from brickformer.doctor.report import Finding


def _leak(e: Exam, pad_at: int | None = None) -> tuple[float, int, int] | None:
    """(how much, changed token, output that moved) of the worst leak."""
    p, worst = e.p, None
    ids = e.ids.clone()
    kept = torch.ones(p.tokens, dtype=torch.bool)
    if pad_at is not None:
        pad = p.target_pad if p.kind == "encoder_decoder" else p.pad
        assert pad is not None
        ids[:, pad_at] = pad
        kept[pad_at] = False
    base = p(ids)
    for j in range(1, p.tokens):
        if j == pad_at:
            continue
        moved = differ(base, p(p.other(ids, j))).amax(0)
        moved = torch.where(kept, moved, 0.0)[:j]
        if len(moved) and float(moved.max()) > p.allowed and (worst is None or float(moved.max()) > worst[0]):
            worst = (float(moved.max()), j, int(moved.argmax()))
    return worst


def _run(e: Exam) -> list[Finding]:
    p = e.p
    worst, padded = _leak(e), False
    if worst is None and (p.target_pad if p.kind == "encoder_decoder" else p.pad) is not None and not p.width:
        worst, padded = _leak(e, 2), True
    if worst is None:
        return []
    size, j, i = worst
    ids = e.ids
    where = ""
    if not padded:
        test = e.tokenwise(lambda moved: bool(moved[:, :j].any()))
        where = e.begins(lambda: p(ids), lambda: p(p.other(ids, j)), test)
    cause, fix = _cause(e, padded)
    return [
        Finding(
            "causality",
            "error",
            where,
            f"changing token {j} moved the output at token {i} by {number(size)}"
            + (" while token 2 is padding" if padded else ""),
            "0: an output depends on its own and earlier tokens only",
            cause,
            fix,
            f"y = x.clone(); y[:, {j}] = another id\n(model(x) - model(y))[:, :{j}].abs().max()  # must be 0",
            "certain" if p.surely_causal else "likely",
        )
    ]


def _cause(e: Exam, padded: bool) -> tuple[str, str]:
    if padded:
        return (
            "the padding mask blanks rows of queries instead of columns of keys, so padded rows look everywhere",
            "let the padding mask hide keys: shape (B, 1, 1, S), not (B, 1, T, 1); and combine it with the causal mask",
        )
    fills = [f for h in e.trace.heads for f in h.fills]
    if any(f > -50 for f in fills):
        return (
            f"masked scores are filled with {max(fills):g}, which softmax does not turn into 0",
            "fill with float('-inf') before the softmax",
        )
    if e.trace.heads and not any(h.masked for h in e.trace.heads):
        return "no causal mask reaches the scores", "hide keys after the query: scores.masked_fill(j > i, -inf)"
    return (
        "the causal mask is missing, transposed or dropped on the way",
        "print the mask of 4 tokens: it must hide what is above the diagonal, in every layer",
    )


PROBE = Probe("causality", "no output sees a later token", _run, causal_only)
