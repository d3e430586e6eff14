"""Every length up to the longest works: one token, and as many as the table has rows."""

from __future__ import annotations

import torch

from brickformer.doctor.exam import Exam, Probe, no_tokens
from brickformer.doctor.outputs import main_of
from brickformer.doctor.report import Finding


def _run(e: Exam) -> list[Finding]:
    p = e.p
    works = [n for n in range(1, p.tokens + 1) if _tried(e, n)]
    if works == [p.tokens]:
        return []  # one length only
    missing = [n for n in range(1, p.tokens) if n not in works]
    if missing and missing == [1]:
        return [_finding("one token alone raises an error or loses an axis; two do not")]
    return []


def _tried(e: Exam, n: int) -> bool:
    try:
        out = e.p(e.p.draw(2, n))
    except Exception:
        return False
    return out.shape[0] == 2 and out.shape[1] == n and _axes(e, n) == _axes(e, e.p.tokens)


def _axes(e: Exam, n: int) -> int:
    """How many axes the answer has before it is arranged."""
    p = e.p
    with torch.no_grad():
        out = main_of(p.raw(p.draw(2, n), p.source(2), None, None, p.model), 2, n)
    return 0 if out is None else out.ndim


def _finding(measured: str) -> Finding:
    return Finding(
        "length",
        "warning",
        "",
        measured,
        "every length from 1 on",
        "squeeze() drops an axis that happens to be 1",
        "squeeze(dim) of one axis by number, never squeeze()",
    )


PROBE = Probe("length", "every length works", _run, no_tokens)
