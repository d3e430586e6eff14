"""What a forward returned, whatever its form: a tensor, a tuple, a dict, an object with fields; flat or not.

Shapes: B batch, T tokens, F features (V for logits).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_BEST = "logits prediction_logits lm_logits output outputs last_hidden_state hidden_states hidden".split()


def parts(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a result with its name, the outermost first."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth > 3 or value is None or isinstance(value, str | int | float):
        return
    elif isinstance(value, dict) or hasattr(value, "items"):
        items = dict(value.items())
        for key in sorted(items, key=lambda k: _BEST.index(k) if k in _BEST else len(_BEST)):
            yield from parts(items[key], str(key), depth + 1)
    elif isinstance(value, tuple | list):
        for x in value:
            yield from parts(x, name, depth + 1)
    elif hasattr(value, "__dict__"):
        yield from parts(vars(value), name, depth + 1)


def loss_of(value: Any) -> Tensor | None:
    """The loss that a forward computed itself: the scalar among what it returned."""
    for _, x in parts(value):
        if x.is_floating_point() and x.numel() == 1 and x.ndim <= 1 and x.requires_grad:
            return x.reshape(())
    return None


def main_of(value: Any, rows: int, tokens: int) -> Tensor | None:
    """The floating tensor that speaks of the tokens: (B, T, F), (T, B, F), (B·T, F), else pooled (B, F)."""
    floats = [x for _, x in parts(value) if x.is_floating_point() and x.ndim >= 2]
    for x in floats:
        if x.ndim == 3 and sorted(x.shape[:2]) == sorted((rows, tokens)):
            return x
    for x in floats:
        if x.ndim == 2 and x.shape[0] == rows * tokens:
            return x
    for x in floats:
        if x.ndim == 3 and x.shape[0] == rows and x.shape[1] == 1:
            return x
    for x in floats:
        if x.shape[0] == rows:
            return x.flatten(1)
    for x in floats:
        if x.ndim == 3 and rows in x.shape[:2]:
            return x
    return None


def scale_of(x: Tensor) -> float:
    """The size of what is compared, at least a little."""
    return max(float(x.detach().abs().nan_to_num().max()), 1e-6) if x.numel() else 1.0


def differ(a: Tensor, b: Tensor) -> Tensor:
    """How far (B, T, F) differ at each (B, T), as a part of the size of the whole; infinite where one is not finite."""
    off = (a - b).abs()
    off = torch.where(off.isnan(), torch.full_like(off, torch.inf), off)
    return off.amax(-1) / max(scale_of(a), scale_of(b))
