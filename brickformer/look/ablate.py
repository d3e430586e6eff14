"""What a head contributes: the answers with it, and with zeros in its place.

    removed = mean over tokens of KL(p ‖ p without the head) = Σ p ln(p / p′)       nats a token
    without logits: ‖y - y′‖ / ‖y‖

One forward pass a head. Mixers without attention are removed as a whole, once: each of their heads gets that number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from brickformer.attend import Attend
from brickformer.look.maps import Map

REMOVALS: Final = 320
"""Forward passes spent on removals at most."""

Run = Callable[[], Tensor]
"""The answers: (B, T, V) logits, or (B, T, D) vectors."""


def distance_from(before: Tensor, *, logits: bool) -> Callable[[Tensor], float]:
    """How far other answers are from these, see above; what belongs to these alone is computed once."""
    before = before.double()
    if not logits:
        length = before.norm().clamp_min(1e-30)
        return lambda after: float((after.double() - before).norm() / length)
    log_p = before.log_softmax(-1)
    p = log_p.exp()
    return lambda after: float((p * (log_p - after.double().log_softmax(-1))).nansum(-1).mean().clamp_min(0.0))


def answers(out: Any) -> tuple[Tensor, bool] | None:
    """What a model answers, and whether it says that these are logits."""
    if isinstance(out, Tensor):
        return out, False
    logits = getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return logits, True
    parts = list(out.values()) if isinstance(out, dict) else list(out) if isinstance(out, tuple | list) else []
    first = next((x for x in parts if isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= 2), None)
    return None if first is None else (first, False)


@contextmanager
def without(module: nn.Module, head: int | None) -> Any:
    """The model while one head of an `Attend` (or all that a mixer says) is zeros."""

    def hook(_: nn.Module, args: object, out: Tensor) -> Tensor:
        if head is None:
            return torch.zeros_like(out)
        left = out.clone()
        left[:, head] = 0.0
        return left

    handle: RemovableHandle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def passes(model: nn.Module, maps: Iterable[Map]) -> int:
    """How many forward passes `contributions` takes, without the one that changes nothing."""
    modules = dict(model.named_modules())
    return sum(m.heads if isinstance(modules.get(f"{_path(m)}.attend"), Attend) else 1 for m in maps)


@torch.no_grad()
def contributions(model: nn.Module, maps: Iterable[Map], run: Run, *, logits: bool) -> dict[str, list[float]]:
    """For every map by its name, one number a head; of a mixer that is removed as a whole, the same for all heads."""
    modules, moved = dict(model.named_modules()), distance_from(run(), logits=logits)
    found: dict[str, list[float]] = {}
    for m in maps:
        path = _path(m)
        attend = modules.get(f"{path}.attend")
        values = []
        if isinstance(attend, Attend):
            for head in m.places:
                with without(attend, head):
                    values.append(moved(run()))
        elif path in modules:
            with without(modules[path], None):
                values = [moved(run())] * m.heads
        found[m.name] = values or [math.nan] * m.heads
    return found


def _path(m: Map) -> str:
    """The module of a map; a looped layer is removed in all its turns."""
    return m.name.split(" (")[0]
