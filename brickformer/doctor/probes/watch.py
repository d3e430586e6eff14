"""A user's own training step, watched: every update of every torch optimizer, and the gradients that led to it.

with watched(model) as seen:
    step(ids)
seen.updates[0].lr, .alike, .left, .moved;   seen.got - seen.held
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as library


@dataclass
class Update:
    """One call of optimizer.step().

    alike: the cosine between what it used and the gradients since the last one (1 where clipped as a whole). left:
    whether gradients that the last one used were still there when those arrived.
    """

    lr: float
    first_lr: float
    alike: float | None
    left: bool
    backward: int
    size: float
    moved: float = 0.0


@dataclass
class Seen:
    """What happened. asleep: a forward with gradients ran in eval(). got, held: what had a gradient, an optimizer."""

    updates: list[Update] = field(default_factory=list)
    asleep: bool = False
    got: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)


@contextmanager
def watched(model: nn.Module) -> Iterator[Seen]:
    """Watch what runs inside."""
    seen = Seen()
    named = {n: x for n, x in model.named_parameters() if x.requires_grad}
    names = {id(x): n for n, x in named.items()}
    fresh: dict[str, Tensor] = {}
    left: set[str] = set()
    passes = [0]
    before: dict[str, Tensor] = {}
    first = next(iter(named), "")

    def arrived(g: Tensor, n: str) -> None:
        grad = named[n].grad
        cleared = grad is None or not bool((grad != 0).any())
        if cleared:
            left.discard(n)
        elif n not in fresh:
            left.add(n)
        fresh[n] = g.detach().clone() if cleared or n not in fresh else fresh[n] + g.detach()
        if n == first:
            passes[0] = 1 if cleared else passes[0] + 1

    handles: list[Any] = [x.register_hook(lambda g, n=n: arrived(g, n)) for n, x in named.items()]

    def awake(m: nn.Module, args: Any) -> None:
        seen.asleep |= torch.is_grad_enabled() and not m.training

    handles.append(model.register_forward_pre_hook(awake))

    def pre(optimizer: Any, args: Any, kwargs: Any) -> None:
        held = {names[id(x)]: x for g in optimizer.param_groups for x in g["params"] if id(x) in names}
        if not held:
            return
        pairs = [(x.grad.detach(), fresh[n]) for n, x in held.items() if x.grad is not None and n in fresh]
        dot = sum(float((a.float() * b.float()).sum()) for a, b in pairs)
        size = sum(float(b.float().square().sum()) for _, b in pairs) ** 0.5
        whole = sum(float(a.float().square().sum()) for a, _ in pairs) ** 0.5
        rates = [float(g["lr"]) for g in optimizer.param_groups]
        begin = [float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups]
        seen.updates.append(
            Update(
                max(rates),
                max(begin),
                dot / (size * whole) if size * whole > 0 else None,
                not left.isdisjoint(held),
                passes[0],
                size,
            )
        )
        seen.got |= {n for n, g in fresh.items() if bool((g != 0).any())}
        seen.held |= set(held)
        before.clear()
        before.update({n: x.detach().clone() for n, x in held.items()})

    def post(optimizer: Any, args: Any, kwargs: Any) -> None:
        held = {names[id(x)]: x for g in optimizer.param_groups for x in g["params"] if id(x) in names}
        if not held or not before:
            return
        off = sum(float((x.detach() - before[n]).float().square().sum()) for n, x in held.items() if n in before)
        size = sum(float(x.float().square().sum()) for x in before.values())
        seen.updates[-1].moved = (off / max(size, 1e-30)) ** 0.5
        for n in held:
            fresh.pop(n, None)
            left.discard(n)
        passes[0] = 0

    handles.append(library.register_optimizer_step_pre_hook(pre))
    handles.append(library.register_optimizer_step_post_hook(post))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
