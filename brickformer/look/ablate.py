"""What a head contributes: the answers with it, and with zeros in its place.

    removed = mean over tokens of KL(p ‖ p without the head) = Σ p ln(p / p′)       nats a token
    without logits: ‖y - y′‖ / ‖y‖

One forward pass a head. Mixers without attention are removed as a whole.
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
"""Heads removed at most: each costs a forward pass."""

Run = Callable[[], Tensor]
"""The answers: (B, T, V) logits, or (B, T, D) vectors."""


def distance(before: Tensor, after: Tensor, *, logits: bool) -> float:
    """How far answers moved, see above."""
    before, after = before.double(), after.double()
    if not logits:
        return float((after - before).norm() / before.norm().clamp_min(1e-30))
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    return float((p.exp() * (p - q)).nansum(-1).mean().clamp_min(0.0))


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


@torch.no_grad()
def contributions(model: nn.Module, maps: Iterable[Map], run: Run, *, logits: bool) -> dict[str, list[float]]:
    """For every map by its name, one number a head."""
    modules, before = dict(model.named_modules()), run()
    found: dict[str, list[float]] = {}
    for m in maps:
        path = m.name.split(" (")[0]  # a looped layer is removed in all its turns
        attend = modules.get(f"{path}.attend")
        values = []
        for head in range(m.heads):
            if isinstance(attend, Attend):
                with without(attend, head):
                    values.append(distance(before, run(), logits=logits))
            elif path in modules and head == 0:
                with without(modules[path], None):
                    values.append(distance(before, run(), logits=logits))
            else:
                values.append(math.nan)
        found[m.name] = values
    return found
