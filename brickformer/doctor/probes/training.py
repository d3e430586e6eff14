"""The user's own training step: gradients are of this step, every weight is in the optimizer, the rate is alive.

    step = training(model);   step(ids)      one update, as the loop does it

Also: what is resumed goes on as if it had not stopped; a post-norm stack of many layers is warmed up (arXiv
2002.04745); a schedule is finite, positive, and gets somewhere.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.probes.initial import _blocks as blocks_of
from brickformer.doctor.probes.watch import Seen, watched
from brickformer.doctor.report import Finding

STEPS = 24


def _why_not(e: Exam) -> str | None:
    return None if e.p.subject.training is not None else "no training step given: Subject(training=lambda model: step)"


def _batch(e: Exam, i: int) -> tuple[Tensor, ...]:
    p = e.p
    ids, src = p.draw(4, seed=i), p.source(4, seed=i)
    return (ids,) if src is None else (src, ids)


def _model(e: Exam) -> nn.Module:
    return copy.deepcopy(e.p.fresh).float().train()


def trained(e: Exam, steps: int = STEPS) -> tuple[Seen, nn.Module]:
    """The first steps of the user's loop, watched; kept, since several probes ask."""
    kept = vars(e).get("_trained")
    if kept is None:
        assert e.p.subject.training is not None
        torch.manual_seed(0)
        model = _model(e)
        step = e.p.subject.training(model)
        with watched(model) as seen:
            for i in range(steps):
                e.p.budget.tick()
                step(*_batch(e, i))
        kept = vars(e)["_trained"] = (seen, model)
    return kept


def _run(e: Exam) -> list[Finding]:
    seen, _ = trained(e)
    ups = seen.updates
    if not ups:
        return [_finding(f"no optimizer was stepped in {STEPS} calls", "the step makes no update", "optimizer.step()")]
    if all(u.size == 0 for u in ups):
        return [
            _finding(
                "the optimizer is stepped without any gradient",
                "backward() comes after step(), or zero_grad() between them",
                "loss.backward(); optimizer.step(); optimizer.zero_grad()",
            )
        ]
    lost = sorted(set.intersection(*(set(u.missing) for u in ups)))
    if lost:
        return [
            _finding(
                f"{len(lost)} tensors get a gradient and are in no optimizer: {', '.join(lost[:3])}",
                "the optimizer was made from a part of the model, or before a layer was replaced",
                "optimizer = AdamW(model.parameters(), ...), after the model is complete",
                lost[0].rpartition(".")[0],
            )
        ]
    stale = [u for u in ups[1:] if u.alike is not None and u.alike < 0.995]
    if len(stale) > len(ups) // 2:
        return [
            _finding(
                f"the gradient that is used has a cosine of {number(stale[0].alike or 0)} with the one of this step",
                "gradients of earlier steps are still in it: zero_grad() is missing",
                "optimizer.zero_grad() once an update",
            )
        ]
    if seen.asleep and _drops(e.p.fresh):
        return [
            _finding(
                "the model is in eval() while it is trained: dropout is off",
                "model.eval() of an evaluation (or of generate) was never taken back",
                "model.train() before the steps",
            )
        ]
    return _times(e, seen) or _still(seen)


def _drops(model: nn.Module) -> bool:
    return any(
        isinstance(v, float) and v > 0 and ("drop" in n.lower() or n == "p")
        for m in model.modules()
        for n, v in vars(m).items()
    )


def _times(e: Exam, seen: Seen) -> list[Finding]:
    """k backward passes for one update: the mean of their losses, not the sum."""
    p, k = e.p, seen.updates[0].backward
    if p.subject.loss is None or k < 2 or len(seen.updates) != STEPS:
        return []
    assert p.subject.training is not None
    model = _still_model(e)
    ids = _batch(e, 0)
    src = ids[0] if len(ids) > 1 else None
    with torch.enable_grad():
        loss = p.loss(ids[-1], src, model)
        assert loss is not None
        own = torch.autograd.grad(loss, [x for x in model.parameters() if x.requires_grad], allow_unused=True)
    size = sum(float(g.square().sum()) for g in own if g is not None) ** 0.5
    step = p.subject.training(model)
    with watched(model) as again:
        step(*ids)
    ratio = again.updates[0].size / max(size, 1e-30) if again.updates else 1.0
    if not math.isclose(ratio, k, rel_tol=0.15):
        return []
    return [
        _finding(
            f"{k} backward passes add up to {number(ratio)} times the gradient of the whole batch",
            "the losses of the parts are added, not averaged",
            f"(loss / {k}).backward(), weighted by the tokens of each part",
        )
    ]


def _still_model(e: Exam) -> nn.Module:
    from brickformer.doctor.guard import undropped

    return undropped(e.p.fresh).float()


def _still(seen: Seen) -> list[Finding]:
    rates = [u.lr for u in seen.updates]
    moved = max(u.moved for u in seen.updates)
    if max(rates) == min(rates) and (rates[0] < 1e-6 or rates[0] < 0.01 * seen.updates[0].first_lr or moved < 1e-7):
        begun = seen.updates[0].first_lr
        return [
            _finding(
                f"the learning rate stays at {number(rates[0])} for {len(rates)} updates (it was made with {number(begun)}); "
                f"an update moves the weights by {number(moved)} of their size",
                "the scheduler is stepped once an epoch (or never), and counts steps",
                "scheduler.step() after every optimizer.step()",
            )
        ]
    return []


def _finding(measured: str, cause: str, fix: str, where: str = "", name: str = "training step") -> Finding:
    return Finding(
        name,
        "error",
        where,
        measured,
        "one update from the gradient of this step, with a living rate, for every weight",
        cause,
        fix,
        "print the learning rate and the gradient's norm at each of the first 20 updates",
        explains=frozenset({"overfit"}),
    )


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
    if rates[-1] > 1.5 * low and all(x <= y for x, y in zip(tail, tail[1:], strict=False)) and tail[0] < tail[-1]:
        return [_rate(f"the rate rises again at the end, from {low:.2g} to {rates[-1]:.2g}", "a period or a min that is a max")]
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
            f"{len(layers)} post-norm layers begin at the full rate {number(rates[0])}; the gradient of the last layer is "
            f"{number(growth)} times that of the first",
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


def _not_resumed(e: Exam) -> str | None:
    if e.p.subject.training is None:
        return "no training step given: Subject(training=lambda model: step)"
    step = e.p.subject.training(_model(e))
    if not hasattr(step, "state_dict") or not hasattr(step, "load_state_dict"):
        return "the step has no state_dict() and load_state_dict()"
    return None


def _resume(e: Exam) -> list[Finding]:
    """2 + 2 steps are 4 steps."""
    training = e.p.subject.training
    assert training is not None

    def run(model: nn.Module, step: Any, which: range) -> None:
        for i in which:
            torch.manual_seed(i)
            e.p.budget.tick()
            step(*_batch(e, i))

    whole = _model(e)
    run(whole, training(whole), range(6))
    half = _model(e)
    step: Any = training(half)
    run(half, step, range(3))
    weights, state = copy.deepcopy(half.state_dict()), copy.deepcopy(step.state_dict())
    rest = _model(e)
    rest.load_state_dict(weights)
    again: Any = training(rest)
    again.load_state_dict(state)
    with watched(rest) as seen:
        run(rest, again, range(3, 6))
    off = max(float((a - b).abs().max()) for a, b in zip(whole.parameters(), rest.parameters(), strict=True))
    if off <= 1e-7:
        return []
    return [
        _finding(
            f"six steps and three + three with a stop between them differ by {number(off)} in a weight (rate after the stop: "
            f"{number(seen.updates[0].lr if seen.updates else 0)})",
            "what the optimizer or the scheduler had counted is not saved, or not loaded",
            "save and load optimizer.state_dict() and scheduler.state_dict(), and the step",
            name="resume",
        )
    ]


STEP = Probe("training step", "an update uses this step's gradient, for every weight", _run, _why_not)
SCHEDULE = Probe("schedule", "the rate is finite, alive and warmed up", _schedule, _no_rate)
RESUME = Probe("resume", "2 + 2 steps are 4 steps", _resume, _not_resumed)
