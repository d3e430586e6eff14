"""The slot of positions inside attention.

Shapes: B batch, H heads, N tokens, T queries, S keys, K head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.mask import Span
from brickformer.spec import Spec


class Position(nn.Module, ABC):
    """Slot inside attention."""

    def rotate(self, x: Float[Tensor, "B H N K"], at: Span) -> Float[Tensor, "B H N K"]:
        """Queries or keys, made to know where they are."""
        return x

    def bias(self, q: Span, k: Span, device: torch.device) -> Float[Tensor, "#B H T S"] | None:
        """What to add to the scores of queries at `q` and keys at `k`; None adds nothing."""
        return None


class PositionSpec(Spec):
    """Slot: specs of positions inside attention."""

    __slots__ = ()

    @abstractmethod
    def build(self, heads: int, width: int, causal: bool) -> Position:
        """A module for `heads` query heads of `width`."""


@final
class NoPosition(Position):
    """Attention that sees its keys as a bag (in a causal model the mask alone gives some order)."""
