"""Exponential moving average of the weights: an average over the end of training for the price of one addition a step.

    θ̄ ← d θ̄ + (1-d) θ,   d = min(decay, (1+t)/(10+t)) after t steps        Polyak averaging

The lower d of the first steps lets the average forget the initial weights. Buffers are not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from brickformer.errors import RunError


@final
class Average:
    """The running average of a model's parameters."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.params = dict(model.named_parameters())
        self.shadow = {name: p.detach().clone() for name, p in self.params.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after `step` steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.shadow.values()), list(self.params.values()), 1.0 - decay)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Make the average the weights."""
        for name, p in self.params.items():
            p.copy_(self.shadow[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model holds the average inside, its own weights again afterwards."""
        own = {name: p.detach().clone() for name, p in self.params.items()}
        self.copy_to_model()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self.params.items():
                    p.copy_(own[name])

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a saved average back. Errors: RunError when it belongs to another model."""
        if tensors.keys() != self.shadow.keys():
            raise RunError("state of the average: its names are not this model's. Was the spec or `ema` changed?")
        for name, value in tensors.items():
            self.shadow[name].copy_(value)
