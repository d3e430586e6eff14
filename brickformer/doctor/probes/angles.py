"""Rotary angles need float32: bfloat16 knows no integer above 256 that is odd, so positions and angles coincide.

    angle(t, i) = t · θ^(-2i/K)      (arXiv 2104.09864); compared with the same angle in float64

The model is run in bfloat16 and in float64, and what reaches cos() is compared.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.guard import duplicate
from brickformer.doctor.report import Finding
from brickformer.doctor.trace import traced


def _run(e: Exam) -> list[Finding]:
    p = e.p
    length = _longest(e)
    ids = p.draw(1, length)
    src = p.source(1)
    with traced(p.model) as exact:
        p(ids, src=src)
    if not exact.angles:
        return []
    rough = next(((place, x) for place, x in exact.angles if x.dtype in _HALF and _grows(x)), None)
    if rough is not None:
        return [
            _finding(
                rough[0], f"cos() is given angles in {str(rough[1].dtype)[6:]}, whatever the model's type", "error"
            )
        ]
    model = duplicate(p.fresh).to(torch.bfloat16)
    with traced(model) as half, contextlib.suppress(RuntimeError):  # types that do not go together: later than angles
        p(ids.to(torch.bfloat16) if p.width else ids, src=src, model=model)
    for (place, a), (_, b) in zip(exact.angles, half.angles, strict=False):
        if a.shape != b.shape or not _grows(a):
            continue
        off = float((a.double() - b.double()).abs().max())
        if off > 1e-3 and b.dtype in _HALF:
            return [
                _finding(
                    place,
                    f"in bfloat16 the angle of one of {length} positions is off by {number(off)} rad: cos() is given "
                    f"{str(b.dtype)[6:]}",
                    "warning",
                )
            ]
        if off > 0.02:
            return [
                _finding(
                    place,
                    f"after .to(bfloat16) an angle is off by {number(off)} rad: the frequencies are rounded",
                    "note",
                )
            ]
    return []


_HALF = (torch.bfloat16, torch.float16)


def _grows(x: Tensor) -> bool:
    """Whether these are angles of positions: more than one, the largest above half a turn."""
    return x.numel() > 4 and float(x.detach().double().abs().nan_to_num().max()) > 2.0


def _longest(e: Exam) -> int:
    """As many tokens as it takes, up to 64."""
    for length in (64, 32, 16):
        try:
            e.p(e.p.draw(1, length))
        except Exception:
            continue
        return length
    return e.p.tokens


def _finding(place: str, measured: str, severity: str) -> Finding:
    return Finding(
        "angles",
        severity,  # type: ignore[arg-type]
        place,
        measured,
        "angles in float32, whatever the type of the weights",
        "positions or frequencies are held in half precision: integers above 256 coincide there",
        "t = torch.arange(T, dtype=torch.float32); angle = t[:, None] * freq.float(); round after cos and sin",
        "compare with float32: cos(torch.arange(4096).bfloat16() * freq)",
        explains=frozenset({"positions", "cached", "left padding"}),
    )


PROBE = Probe("angles", "angles are made in float32", _run)
