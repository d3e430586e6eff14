"""What stands in masked scores: so negative that a weight of 0 comes out, and below every real score.

softmax(-inf) = 0;   softmax(0) is a weight like any other;   -1e5 is a mask until a score is smaller
"""

from __future__ import annotations

import math

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.probes.attention import seen
from brickformer.doctor.report import Finding
from brickformer.doctor.trace import Heads


def _mask_value(e: Exam) -> list[Finding]:
    for h in e.trace.heads:
        soft = [f for f in h.fills if f > -50 and h.softmaxes]
        if soft and not h.fused:
            value = max(soft)
            return [
                Finding(
                    "mask value",
                    "error",
                    h.place,
                    f"masked scores become {value:g} (or it is added to them); after softmax a masked key keeps "
                    f"exp({value:g}) = {number(math.exp(min(value, 80)))} against exp(score)",
                    "-inf, or at least -1e4: a weight of 0",
                    "the value written into masked scores is not very negative",
                    "scores.masked_fill(blocked, float('-inf')) before the softmax",
                    explains=frozenset({"causality", "padding", "memory", "cached"}),
                )
            ]
        weak = [f for f in h.fills if -2e6 < f <= -50]
        if weak and not h.fused and (largest := _largest(h)) > 0.5 * -max(weak):
            return [
                Finding(
                    "mask value",
                    "error",
                    h.place,
                    f"masked scores become {max(weak):g}, and real scores reach {number(largest)} in size",
                    "-inf, or the smallest number of the type: below every score",
                    "the constant is not below the scores of these weights, so masked keys win",
                    "scores.masked_fill(blocked, torch.finfo(scores.dtype).min)",
                    explains=frozenset({"causality", "padding", "memory", "cached", "documents"}),
                )
            ]
        weak = [f for f in weak if f > -2e5]
        if weak:
            return [
                Finding(
                    "mask value",
                    "note",
                    h.place,
                    f"masked scores become {max(weak):g}",
                    "-inf, or the smallest number of the type",
                    "holds as long as no score is that negative: a trained model may reach it",
                    "use float('-inf'), or torch.finfo(scores.dtype).min",
                )
            ]
    return []


def _largest(h: Heads) -> float:
    """The largest score before the mask."""
    if h.factor is None or h.q.ndim != h.k.ndim or h.q.shape[-1] != h.k.shape[-1] or h.q.shape[:-2] != h.k.shape[:-2]:
        return 0.0
    return float((h.q.detach() @ h.k.detach().transpose(-1, -2) * h.factor).abs().max())


PROBE = Probe("mask value", "masked scores are very negative", _mask_value, seen)
