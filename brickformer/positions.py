"""Positions: attention alone cannot tell the order of its keys; these bricks can.

Inside attention (`Position`): turn queries and keys, or add a bias to the scores.
    Rope     (q_2i, q_2i+1) turned by the angle p·θ^(-2i/K); q·k then depends on p_q - p_k only       arXiv 2104.09864
    Alibi    score - slope_h · |p_q - p_k|                                                            arXiv 2108.12409
    T5Bias   score + table[h, bucket(p_k - p_q)]                                                      arXiv 1910.10683
At the embedding (`AbsolutePosition`): add a vector to each token.
    Sinusoid  sin and cos of p · 10000^(-2i/D)                                                        arXiv 1706.03762
    Learned   a table of parameters

Two kinds, two types: a position cannot be put where it does nothing.
Shapes: B batch, H heads, T queries, S keys, K head width, D model width, N tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from brickformer.errors import BrickError, SpecError
from brickformer.mask import EMPTY, Span
from brickformer.spec import Spec, spec


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


class AbsolutePosition(nn.Module, ABC):
    """Slot at the embedding."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "B T D"], at: Span) -> Float[Tensor, "B T D"]:
        """Embedded tokens, made to know where they are."""


class AbsolutePositionSpec(Spec):
    """Slot: specs of positions at the embedding."""

    __slots__ = ()

    @abstractmethod
    def build(self, dim: int) -> AbsolutePosition:
        """A module for vectors of width `dim`."""


@final
class NoPosition(Position):
    """Attention that sees its keys as a bag (in a causal model the mask alone gives some order)."""


# ---- rotary ---------------------------------------------------------------------------------------------------------


@spec("rope")
class Rope(PositionSpec):
    """Rotary positions (arXiv 2104.09864). theta: the base of the wavelengths; the two halves of a head are paired."""

    theta: float = 10_000.0

    def check(self) -> None:
        """The base is above 1."""
        if self.theta <= 1.0:
            raise self.refuse("theta", "a base above 1")

    def build(self, heads: int, width: int, causal: bool) -> Position:
        """Errors: SpecError when the head width is odd."""
        if width % 2:
            raise SpecError(
                f"rope: got a head width of {width}, expected an even one: rotary turns pairs. Change heads."
            )
        return RopePosition(width, theta=self.theta)


@final
class RopePosition(Position):
    """(x_i, x_i+K/2) turned by p·θ^(-2i/K). Angles are float32 whatever the model's type."""

    def __init__(self, width: int, *, theta: float) -> None:
        super().__init__()
        self.width, self.theta = width, theta

    def rotate(self, x: Float[Tensor, "B H N K"], at: Span) -> Float[Tensor, "B H N K"]:
        """(B, H, N, K) -> (B, H, N, K): the same length, another angle."""
        cos, sin = self._table(at, x)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def _table(self, at: Span, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, (B or 1, 1, N, K/2)."""
        limit = 1 << max(at.end - 1, 255).bit_length()  # whole powers of two: few tables, shared by all layers
        dtype = x.dtype if x.dtype is torch.float64 else torch.float32
        cos, sin = _rope_table(self.width, self.theta, limit, x.device, dtype, x.dtype)
        if at.pos is None:
            return cos[at.start : at.end], sin[at.start : at.end]
        slots = at.pos.masked_fill(at.pos == EMPTY, 0)[:, None]
        return cos[slots], sin[slots]


@lru_cache(maxsize=64)
def _rope_table(
    width: int, theta: float, limit: int, device: torch.device, dtype: torch.dtype, out: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of p·θ^(-2i/K) for p < limit: (limit, K/2) each, computed in `dtype`, kept as `out`."""
    with torch.inference_mode(False), torch.no_grad():  # a table first needed in inference serves training too
        rate = 1.0 / theta ** (torch.arange(0, width, 2, device=device, dtype=dtype) / width)
        angle = torch.arange(limit, device=device, dtype=dtype)[:, None] * rate
        return angle.cos().to(out), angle.sin().to(out)


# ---- biases ---------------------------------------------------------------------------------------------------------


@spec("alibi")
class Alibi(PositionSpec):
    """Attention with linear biases (arXiv 2108.12409): far keys score less; needs no table and has no limit."""

    def build(self, heads: int, width: int, causal: bool) -> Position:
        """The module."""
        return AlibiPosition(heads)


@final
class AlibiPosition(Position):
    """-slope_h · |p_q - p_k|, slopes 2^(-8/n), 2^(-16/n), ... for n the number of heads."""

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor(alibi_slopes(heads)), persistent=False)

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
    """A learned bias per distance bucket (arXiv 1910.10683): exact up close, logarithmic further out."""

    buckets: int = 32
    max_distance: int = 128

    def check(self) -> None:
        """Enough buckets for both directions."""
        if self.buckets < 4 or self.buckets % 2:
            raise self.refuse("buckets", "an even number, at least 4")
        if self.max_distance <= self.buckets:
            raise self.refuse("max_distance", f"more than buckets ({self.buckets})")

    def build(self, heads: int, width: int, causal: bool) -> Position:
        """The module."""
        return T5BiasPosition(heads, self.buckets, self.max_distance, causal=causal)


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


# ---- at the embedding -----------------------------------------------------------------------------------------------


@spec("sinusoid")
class Sinusoid(AbsolutePositionSpec):
    """sin and cos of geometric wavelengths, from 2π to 10000·2π (arXiv 1706.03762, 3.5). max_len: rows of the table."""

    max_len: int = 1024

    def check(self) -> None:
        """At least one row."""
        if self.max_len < 1:
            raise self.refuse("max_len", "at least 1")

    def build(self, dim: int) -> AbsolutePosition:
        """The module. Errors: SpecError when the width is odd."""
        if dim % 2:
            raise SpecError(f"sinusoid: got a model width of {dim}, expected an even one: sin and cos come in pairs.")
        return SinusoidPosition(sinusoid(self.max_len, dim))


def sinusoid(max_len: int, dim: int) -> Float[Tensor, "N D"]:
    """The table: column 2i is sin(p·10000^(-2i/D)), column 2i+1 its cos. Computed in float64, kept in float32."""
    rate = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(max_len, dtype=torch.float64)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


@final
class SinusoidPosition(AbsolutePosition):
    """x + table[p]: computed once, kept as a buffer, one look-up a call."""

    table: Tensor

    def __init__(self, table: Float[Tensor, "N D"]) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Float[Tensor, "B T D"], at: Span) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D). Errors: BrickError past the end of the table."""
        return x + _rows(self.table, at, "Sinusoid").to(x.dtype)


@spec("learned")
class Learned(AbsolutePositionSpec):
    """A table of learned vectors, one a position (GPT-2, BERT)."""

    max_len: int = 1024

    def check(self) -> None:
        """At least one row."""
        if self.max_len < 1:
            raise self.refuse("max_len", "at least 1")

    def build(self, dim: int) -> AbsolutePosition:
        """The module."""
        return LearnedPosition(self.max_len, dim)


@final
class LearnedPosition(AbsolutePosition):
    """x + table[p]."""

    def __init__(self, max_len: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_len, dim)

    def forward(self, x: Float[Tensor, "B T D"], at: Span) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D). Errors: BrickError past the end of the table."""
        return x + _rows(self.table.weight, at, "Learned")


def _rows(table: Tensor, at: Span, name: str) -> Tensor:
    """table[p] for every token of the span, (B or 1, N, D)."""
    if at.end > len(table):
        raise BrickError(
            f"{name} position holds {len(table)} positions; the input reaches position {at.end - 1}. Raise "
            f"{name}(max_len=...), shorten the input, or use a position without a limit: Rope, Alibi, T5Bias."
        )
    if at.pos is None:
        return table[None, at.start : at.end]
    return table[at.pos.masked_fill(at.pos == EMPTY, 0)]
