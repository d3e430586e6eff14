"""A user's own training step, watched: every update of every torch optimizer, and the gradients that led to it.

with watched(model) as seen:
    step(ids)
seen.updates[0].lr, .missing, .stale, .moved
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
    """One call of optimizer.step(). alike: the cosine between what it used and the gradients since the last one."""

    lr: float
    first_lr: float
    missing: list[str]
    alike: float | None
    backward: int
    size: float
    moved: float = 0.0
    scheduled: bool = False


@dataclass
class Seen:
    """What happened. asleep: whether a forward with gradients ran in eval()."""

    updates: list[Update] = field(default_factory=list)
    asleep: bool = False
    gradient: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def watched(model: nn.Module) -> Iterator[Seen]:
    """Watch what runs inside."""
    seen = Seen()
    named = {n: x for n, x in model.named_parameters() if x.requires_grad}
    names = {id(x): n for n, x in named.items()}
    fresh: dict[str, Tensor] = {}
    passes = [0]
    before: dict[str, Tensor] = {}
    first = next(iter(named), "")

    def arrived(g: Tensor, n: str) -> None:
        fresh[n] = fresh[n] + g.detach() if n in fresh else g.detach().clone()
        passes[0] += n == last_name[0]

    last_name = [first]
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
                [n for n in fresh if n not in held and bool((fresh[n] != 0).any())],
                dot / (size * whole) if size * whole > 0 else None,
                passes[0],
                size,
                scheduled=any("initial_lr" in g for g in optimizer.param_groups),
            )
        )
        seen.gradient = dict(fresh)
        before.clear()
        before.update({n: x.detach().clone() for n, x in held.items()})

    def post(optimizer: Any, args: Any, kwargs: Any) -> None:
        held = {names[id(x)]: x for g in optimizer.param_groups for x in g["params"] if id(x) in names}
        if not held or not before:
            return
        off = sum(float((x.detach() - before[n]).float().square().sum()) for n, x in held.items() if n in before)
        size = sum(float(x.float().square().sum()) for x in before.values())
        seen.updates[-1].moved = (off / max(size, 1e-30)) ** 0.5
        fresh.clear()
        passes[0] = 0

    handles.append(library.register_optimizer_step_pre_hook(pre))
    handles.append(library.register_optimizer_step_post_hook(post))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
