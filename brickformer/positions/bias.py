"""Positions as a bias on the scores: the further a key, the less it counts, by rule or by learning.

    Alibi    score - slope_h · |p_q - p_k|             arXiv 2108.12409
    T5Bias   score + table[h, bucket(p_k - p_q)]       arXiv 1910.10683

Shapes: B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from brickformer.mask import EMPTY, Span
from brickformer.positions.base import Computed, Position, PositionSpec, shared
from brickformer.spec import spec


@spec("alibi")
class Alibi(PositionSpec):
    """Attention with linear biases (arXiv 2108.12409): far keys score less; needs no table and has no limit."""

    def build(self, heads: int, width: int, causal: bool) -> Position:
        """The module."""
        return AlibiPosition(heads)


@final
class AlibiPosition(Computed, Position):
    """-slope_h · |p_q - p_k|, slopes 2^(-8/n), 2^(-16/n), ... for n the number of heads."""

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.hold("slopes")

    def computed(self) -> Float[Tensor, " H"]:
        """The slopes."""
        return torch.tensor(alibi_slopes(self.heads))

    def bias(self, q: Span, k: Span, device: torch.device) -> Float[Tensor, "#B H T S"]:
        """(B or 1, H, T, S)."""
        key = k.positions(device)[:, None, None, :]
        far = (q.positions(device)[:, None, :, None] - key).abs().masked_fill(key == EMPTY, 0)
        return -self.slopes[:, None, None] * far


def alibi_slopes(heads: int) -> list[float]:
    """The paper's slopes; for a number of heads that is no power of two, every other one of the next power's."""
    n = 1 << (heads.bit_length() - 1)  # the largest power of two in it
    slopes = [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / n) for i in range(heads - n)]


@spec("t5bias")
class T5Bias(PositionSpec):
    """A learned bias per distance bucket (arXiv 1910.10683): exact up close, logarithmic further out.

    shared: one table for all layers of a stack, as T5 has, instead of one a layer.
    """

    buckets: int = 32
    max_distance: int = 128
    shared: bool = False

    def check(self) -> None:
        """Enough buckets for both directions."""
        if self.buckets < 4 or self.buckets % 2:
            raise self.refuse("buckets", "an even number, at least 4")
        if self.max_distance <= self.buckets:
            raise self.refuse("max_distance", f"more than buckets ({self.buckets})")

    def build(self, heads: int, width: int, causal: bool) -> Position:
        """The module."""

        def make() -> Position:
            return T5BiasPosition(heads, self.buckets, self.max_distance, causal=causal)

        return shared((self, heads, causal), make) if self.shared else make()


@final
class T5BiasPosition(Position):
    """table[bucket(p_k - p_q), h]. Causal attention spends all buckets on the past, two-way half on each."""

    def __init__(self, heads: int, buckets: int, max_distance: int, *, causal: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        self.max_distance, self.causal = max_distance, causal

    def bias(self, q: Span, k: Span, device: torch.device) -> Float[Tensor, "#B H T S"]:
        """(B or 1, H, T, S)."""
        key = k.positions(device)[:, None, :]
        past = (q.positions(device)[:, :, None] - key).masked_fill(key == EMPTY, 0)
        bias: Tensor = self.table(self.bucket(past))  # (B, T, S, H)
        return bias.permute(0, 3, 1, 2)

    def bucket(self, past: Int[Tensor, "B T S"]) -> Int[Tensor, "B T S"]:
        """The bucket of a key that is `past` tokens before its query (negative: after it)."""
        n = self.table.num_embeddings
        side = torch.zeros_like(past)
        if not self.causal:
            n //= 2
            side = (past < 0) * n
            past = past.abs()
        past = past.clamp_min(0)
        exact = n // 2
        log = torch.log(past.clamp_min(1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (log * (n - exact)).long()).clamp(max=n - 1)
        return side + torch.where(past < exact, past, far)
