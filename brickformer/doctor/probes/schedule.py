"""The learning rate: finite, positive, gets somewhere, and warms a deep post-norm stack up (arXiv 2002.04745).

rate(s) = width^-1/2 · min(s^-1/2, s · warmup^-3/2)      (arXiv 1706.03762), or any other curve
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.probes.initial import blocks_of
from brickformer.doctor.probes.training import trained
from brickformer.doctor.report import Finding


def _no_rate(e: Exam) -> str | None:
    if e.p.subject.schedule is None and e.p.subject.training is None:
        return "neither a schedule nor a training step given"
    return None


def _schedule(e: Exam) -> list[Finding]:
    function, steps = e.p.subject.schedule, e.p.subject.steps or 1000
    found: list[Finding] = []
    rates: list[float] = []
    if function is not None:
        try:
            rates = [float(function(s)) for s in range(steps + 1)]
        except (ZeroDivisionError, ValueError, OverflowError) as error:
            return [
                _rate(f"the schedule raises {type(error).__name__} at step {len(rates)}", "count from 1: max(step, 1)")
            ]
        found = _curve(rates, steps)
    return found or _post_norm(e, rates)


def _curve(rates: list[float], steps: int) -> list[Finding]:
    top = max(rates)
    bad = next((i for i, r in enumerate(rates) if not math.isfinite(r) or r < 0), None)
    if bad is not None:
        return [_rate(f"the rate at step {bad} is {rates[bad]:g}", "rates are finite and not negative")]
    if top == 0:
        return [_rate("the rate is 0 at every step", "an integer division, or a factor of 0")]
    at = rates.index(top)
    if at == steps and rates[0] < 0.5 * top:
        return [_rate(f"the rate still rises at the last step {steps}", "the warm-up is longer than the training")]
    jump = max(range(1, len(rates)), key=lambda i: abs(rates[i] - rates[i - 1]))
    if (
        1 < jump < steps
        and abs(rates[jump] - rates[jump - 1]) > 0.5 * top
        and rates[jump - 1] > rates[jump]
        and jump <= at + 1
    ):
        return [
            _rate(
                f"the rate falls from {rates[jump - 1]:g} to {rates[jump]:g} at step {jump}",
                "warm-up and decay do not meet",
            )
        ]
    if at > 0 and 2 < at < steps // 2 and rates[-1] > 0.95 * top and min(rates[at:]) < 0.5 * top:
        return [_rate("the rate falls and rises to its top again at the end", "the cosine runs over half of the steps")]
    low = min(rates[at:])
    tail = rates[-max(len(rates) // 20, 2) :]
    if rates[-1] > 1.5 * low and all(x <= y for x, y in pairwise(tail)) and tail[0] < tail[-1]:
        return [
            _rate(
                f"the rate rises again at the end, from {low:.2g} to {rates[-1]:.2g}", "a period or a min that is a max"
            )
        ]
    if top < 1e-7:
        return [_rate(f"the rate is never above {top:.2g}", "a unit or an exponent is wrong")]
    return []


def _post_norm(e: Exam, rates: list[float]) -> list[Finding]:
    """Six post-norm layers or more that begin with the full rate."""
    if not rates:
        rates = [u.lr for u in trained(e)[0].updates]
    layers = blocks_of(e.p.fresh)
    if not rates or len(layers) < 6 or max(rates) < 3e-4 or rates[0] < 0.5 * max(rates):
        return []
    if not _normed(e, layers):
        return []
    growth = _growth(e, layers)
    return [
        Finding(
            "schedule",
            "warning",
            layers[0][0].rpartition(".")[0],
            f"{len(layers)} post-norm layers begin at the full rate {number(rates[0])}; the gradient of the last layer "
            f"is {number(growth)} times that of the first",
            "a warm-up of some hundred steps, or pre-norm",
            "post-norm gradients are large near the output before anything is learnt (arXiv 2002.04745)",
            "rate * min(1, step / 500), or x + f(norm(x))",
            confidence="likely",
        )
    ]


def _normed(e: Exam, layers: list[tuple[str, nn.Module]]) -> bool:
    """Whether what every layer returns is what a norm said."""
    from_norm: set[int] = set()
    kept: list[Any] = []
    right: list[bool] = []

    def norm(m: Any, a: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            from_norm.add(id(out))
            kept.append(out)

    def layer(m: Any, a: Any, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        right.append(id(out) in from_norm)

    handles = []
    for _, block in layers:
        handles += [m.register_forward_hook(norm) for m in block.modules() if "norm" in type(m).__name__.lower()]
        handles.append(block.register_forward_hook(layer))
    try:
        e.p(e.ids, model=e.p.fresh)
    finally:
        for handle in handles:
            handle.remove()
    return bool(right) and all(right)


def _growth(e: Exam, layers: list[tuple[str, nn.Module]]) -> float:
    model = e.p.fresh
    first, last = ([x for x in block.parameters() if x.requires_grad] for block in (layers[0][1], layers[-1][1]))
    with torch.enable_grad():
        out = e.p(e.ids, model=model, grad=True)
        loss = out.log_softmax(-1)[..., 0].mean()
        g = torch.autograd.grad(loss, [*first, *last], allow_unused=True)
    sizes = [
        math.sqrt(sum(float(x.square().sum()) for x in part if x is not None))
        for part in (g[: len(first)], g[len(first) :])
    ]
    return sizes[1] / max(sizes[0], 1e-30)


def _rate(measured: str, cause: str) -> Finding:
    return Finding(
        "schedule",
        "error",
        "",
        measured,
        "a warm-up, then a decay, both within the steps of the training",
        cause,
        "plot the rate over all steps before training",
        "[schedule(s) for s in range(steps)]",
    )


PROBE = Probe("schedule", "the rate is finite, alive and warmed up", _schedule, _no_rate)
