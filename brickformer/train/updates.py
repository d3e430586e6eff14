"""How large a step was: ‖Δθ‖ / ‖θ‖ of each group of parameters. About 1e-3 is usual; 1e-1 is too much, 1e-6 nothing.

Groups are what parameters are for, told from their names: embed, mixer, cross, ffn, norm, head; what is none of these
is `rest`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

MOST: Final = 2**16
"""Numbers of a parameter that are looked at."""

_PARTS: Final = frozenset({"embed", "head", "mixer", "cross", "ffn", "norm"})


def group(name: str) -> str:
    """Which group a parameter belongs to: ``decoder.stack.layers.0.mixer.qkv.weight`` -> mixer."""
    parts = name.split(".")
    if any(p.startswith("around") or p in ("norm", "q_norm", "k_norm") for p in parts):
        return "norm"
    return next((p for p in parts if p in _PARTS), "rest")


@contextmanager
def measured(model: nn.Module, into: dict[str, Tensor]) -> Iterator[None]:
    """What happens inside is a step: afterwards `into` has ``update.GROUP``, scalar tensors.

    Of a large parameter every n-th number stands for its neighbours, so that no second copy of a model is held.
    """
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: _some(p).clone() for name, p in params.items()}
    yield
    sums: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, p in params.items():
        weight = p.numel() / before[name].numel()
        moved = (_some(p) - before[name]).float().square().sum() * weight
        sums.setdefault(group(name), []).append((moved, before[name].float().square().sum() * weight))
    for name, pairs in sums.items():
        moved, size = (torch.stack(column).sum().sqrt() for column in zip(*pairs, strict=True))
        into[f"update.{name}"] = moved / size.clamp_min(1e-12)


def _some(p: Tensor) -> Tensor:
    """All numbers of a small parameter, MOST or fewer of a large one."""
    return p.detach().flatten()[:: math.ceil(p.numel() / MOST) or 1]
