"""The user's own training step: gradients are of this step, every weight is in the optimizer, the rate is alive.

    step = training(model);   step(ids)      one update, as the loop does it

Also: what is resumed goes on as if it had not stopped.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.guard import duplicate, undropped
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
    return duplicate(e.p.fresh).float().train()


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
    lost = sorted(seen.got - seen.held)
    if lost:
        return [
            _finding(
                f"{len(lost)} tensors get a gradient and are in no optimizer: {', '.join(lost[:3])}",
                "the optimizer was made from a part of the model, or before a layer was replaced",
                "optimizer = AdamW(model.parameters(), ...), after the model is complete",
                lost[0].rpartition(".")[0],
            )
        ]
    stale = [u for u in ups[1:] if u.left and u.alike is not None and u.alike < 0.995]
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
    model = undropped(e.p.fresh).float()
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


def _still(seen: Seen) -> list[Finding]:
    rates = [u.lr for u in seen.updates]
    moved = max(u.moved for u in seen.updates)
    if max(rates) == min(rates) and (rates[0] < 1e-6 or rates[0] < 0.01 * seen.updates[0].first_lr or moved < 1e-7):
        begun = seen.updates[0].first_lr
        return [
            _finding(
                f"the learning rate stays at {number(rates[0])} for {len(rates)} updates (begun as {number(begun)}); "
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


def _not_resumed(e: Exam) -> str | None:
    if e.p.subject.training is None:
        return "no training step given: Subject(training=lambda model: step)"
    step = e.p.subject.training(_model(e))
    if not hasattr(step, "state_dict") or not hasattr(step, "load_state_dict"):
        return "the step has no state_dict() and load_state_dict()"
    return None


def _resume(e: Exam) -> list[Finding]:
    """3 + 3 steps are 6 steps."""
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
            f"six steps and three + three with a stop between them differ by {number(off)} in a weight (rate after the "
            f"stop: {number(seen.updates[0].lr if seen.updates else 0)})",
            "what the optimizer or the scheduler had counted is not saved, or not loaded",
            "save and load optimizer.state_dict() and scheduler.state_dict(), and the step",
            name="resume",
        )
    ]


STEP = Probe("training step", "an update uses this step's gradient, for every weight", _run, _why_not)
RESUME = Probe("resume", "3 + 3 steps are 6 steps", _resume, _not_resumed)
