"""Rows of a batch do not know each other: f(batch)[0] == f(batch[:1]), whatever the other rows are."""

from __future__ import annotations

import torch
from torch import Tensor

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.outputs import differ
from brickformer.doctor.report import Finding


def _run(e: Exam) -> list[Finding]:
    p = e.p
    ids, src = p.draw(3), p.source(3)
    a = p(ids, src=src)
    for row in (0, 2):
        theirs = torch.arange(3) != row
        other, source2 = ids.clone(), None
        other[theirs] = p.draw(6, seed=9)[3:][theirs]
        if src is not None:
            source2 = src.clone()
            source2[theirs] = p.draw(6, src.shape[1], 11, "src")[3:][theirs]
        b = p(other, src=source2)
        moved = float(differ(a[row : row + 1], b[row : row + 1]).max())
        if moved > p.allowed:

            def touched(x: Tensor, y: Tensor, row: int = row) -> bool:
                x, y = (x.transpose(0, 1), y.transpose(0, 1)) if p.seq_first and x.ndim == 3 else (x, y)
                return x.ndim == 3 and x.shape[0] == 3 and bool((x[row] - y[row]).abs().max() > p.allowed)

            where = e.begins(lambda: p(ids, src=src), lambda x=other, s=source2: p(x, src=s), touched)
            return [_finding(where, f"other rows beside it moved row {row} by {number(moved)}")]
    try:
        alone = p(ids[:1], src=None if src is None else src[:1])
    except Exception as error:
        return [
            Finding(
                "batch",
                "warning",
                "",
                f"three rows are answered, one row raises {type(error).__name__}: {_line(error)}",
                "the same answer",
                "a squeeze() or a view drops the axis of the batch",
                "squeeze(dim) of one axis by name, never squeeze()",
            )
        ]
    if alone.shape != a[:1].shape:
        return []
    moved = float(differ(a[:1], alone).max())
    return [_finding("", f"row 0 alone differs by {number(moved)}")] if moved > p.allowed else []


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:90]


def _finding(where: str, measured: str) -> Finding:
    return Finding(
        "batch",
        "error",
        where,
        measured,
        "0: a row is answered as if it were alone",
        "a view or an attention runs over the batch: wrong order of axes (batch first or sequence first), or heads "
        "and rows mixed up",
        "check each view and transpose, and batch_first of every part",
        "(model(x)[:1] - model(x[:1])).abs().max()  # must be 0",
        explains=frozenset({"cached", "overfit"}),
    )


PROBE = Probe("batch", "rows of a batch do not know each other", _run)
