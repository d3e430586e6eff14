"""Grouped heads: query head h reads key head h // (H/G), as every published model does (arXiv 2305.13245).

    k.repeat_interleave(H // G, 1), not k.repeat(1, H // G, 1, 1)

Shapes: k, v (B, H, S, K) after they were repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from brickformer.doctor.exam import Exam, Probe
from brickformer.doctor.probes.attention import seen
from brickformer.doctor.report import Finding


def _run(e: Exam) -> list[Finding]:
    for h in e.trace.heads:
        k, v = _groups(h.k), None if h.v is None else _groups(h.v)
        if k is None or v is None or len(set(k)) in (1, len(k)):
            continue
        if len(set(k)) == len(set(v)) and k != v:
            return [
                _finding(h.place, k, f"keys are shared as {k}, values as {v}: a head reads foreign values", "error")
            ]
        if k != sorted(k):
            return [_finding(h.place, k, f"query heads share key heads as {k}", "warning")]
    return []


def _groups(x: Tensor) -> list[int] | None:
    """Which heads hold the same numbers: [0, 0, 1, 1]. None where heads are no axis of their own."""
    if x.ndim != 4 or x.shape[1] < 2 or not x.is_floating_point():
        return None
    heads = x.detach()[0]
    first: list[int] = []
    names: list[int] = []
    for i in range(len(heads)):
        same = next((n for n, j in enumerate(first) if torch.equal(heads[i], heads[j])), None)
        if same is None:
            same = len(first)
            first.append(i)
        names.append(same)
    return names


def _finding(place: str, k: list[int], measured: str, severity: str) -> Finding:
    right = sorted(k)
    return Finding(
        "grouped heads",
        severity,  # type: ignore[arg-type]
        place,
        measured,
        f"{right}: neighbours share",
        "the key heads are tiled instead of repeated one by one: weights of another implementation do not fit",
        "k.repeat_interleave(H // G, dim=1), or enable_gqa=True; the same for v",
        "with equal key heads the output must be that of plain multi-head attention",
        "likely" if severity == "warning" else "certain",
    )


PROBE = Probe("grouped heads", "neighbouring query heads share a key head", _run, seen)
