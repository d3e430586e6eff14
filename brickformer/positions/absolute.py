"""Positions at the embedding: a vector added to each token.

    Sinusoid    sin and cos of p · 10000^(-2i/D)       arXiv 1706.03762, 3.5
    Learned     a table of parameters                  arXiv 1705.03122
    Randomized  p drawn from a long range in training  arXiv 2305.16843

A table has an end. Past it there is nothing to look up, and the error says so.
Shapes: B batch, N or T tokens, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.errors import BrickError, SpecError
from brickformer.mask import EMPTY, Span
from brickformer.positions.base import Computed
from brickformer.ranges import LONGEST, check_width
from brickformer.spec import Spec, spec

SinCos = Literal["alternating", "halves"]


class AbsolutePosition(nn.Module, ABC):
    """Slot at the embedding."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "B T D"], at: Span) -> Float[Tensor, "B T D"]:
        """Embedded tokens, made to know where they are."""


class AbsolutePositionSpec(Spec):
    """Slot: specs of positions at the embedding."""

    __slots__ = ()
    reads_places = True

    @abstractmethod
    def build(self, dim: int) -> AbsolutePosition:
        """A module for vectors of width `dim`."""

    def limit(self) -> int | None:
        """How many positions it knows; None is no limit."""
        return None


@spec("sinusoid")
class Sinusoid(AbsolutePositionSpec):
    """sin and cos of geometric wavelengths, from 2π to 10000·2π (arXiv 1706.03762, 3.5).

    max_len: rows of the table. layout: each cos after its sin, as in the paper, or all sines and then all cosines, as
    in tensor2tensor and Marian.
    """

    max_len: int = 1024
    layout: SinCos = "alternating"

    def check(self) -> None:
        """At least one row."""
        check_width(self, "max_len", self.max_len, LONGEST)

    def limit(self) -> int | None:
        """Rows of the table."""
        return self.max_len

    def build(self, dim: int) -> AbsolutePosition:
        """The module. Errors: SpecError when the width is odd."""
        if dim % 2:
            raise SpecError(f"sinusoid: got a model width of {dim}, expected an even one: sin and cos come in pairs.")
        return SinusoidPosition(self.max_len, dim, self.layout)


def sinusoid(max_len: int, dim: int) -> Float[Tensor, "N D"]:
    """The table: column 2i is sin(p·10000^(-2i/D)), column 2i+1 its cos. Computed in float64, kept in float32."""
    rate = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(max_len, dtype=torch.float64)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


@final
class SinusoidPosition(Computed, AbsolutePosition):
    """x + table[p]: computed once, kept as a buffer, one look-up a call."""

    table: Tensor

    def __init__(self, max_len: int, dim: int, layout: SinCos = "alternating") -> None:
        super().__init__()
        self.size, self.layout = (max_len, dim), layout
        self.hold("table")

    def computed(self) -> Float[Tensor, "N D"]:
        """The table in its layout."""
        table = sinusoid(*self.size)
        return table if self.layout == "alternating" else torch.cat([table[:, 0::2], table[:, 1::2]], 1)

    def forward(self, x: Float[Tensor, "B T D"], at: Span) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D). Errors: BrickError past the end of the table."""
        return x + _rows(self.table, at, "Sinusoid").to(x.dtype)


@spec("learned")
class Learned(AbsolutePositionSpec):
    """A table of learned vectors, one a position (GPT-2, BERT).

    skip: rows at its beginning that no position reads (RoBERTa and BART have two).
    """

    max_len: int = 1024
    skip: int = 0

    def check(self) -> None:
        """At least one row."""
        check_width(self, "max_len", self.max_len)
        if self.skip < 0:
            raise self.refuse("skip", "0 (none) or more")

    def limit(self) -> int | None:
        """Rows of the table that are read."""
        return self.max_len

    def build(self, dim: int) -> AbsolutePosition:
        """The module."""
        return LearnedPosition(self.max_len, dim, self.skip)


@final
class LearnedPosition(AbsolutePosition):
    """x + table[skip + p]."""

    def __init__(self, max_len: int, dim: int, skip: int = 0) -> None:
        super().__init__()
        self.table, self.skip = nn.Embedding(max_len + skip, dim), skip

    def forward(self, x: Float[Tensor, "B T D"], at: Span) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D). Errors: BrickError past the end of the table."""
        return x + _rows(self.table.weight[self.skip :], at, "Learned")


def _rows(table: Tensor, at: Span, name: str) -> Tensor:
    """table[p] for every token of the span, (B or 1, N, D)."""
    if at.place is not None:
        return table[at.place.to(table.device)]
    if at.end > len(table):
        raise BrickError(
            f"{name} position holds {len(table)} positions; the input reaches position {at.end - 1}. Raise "
            f"{name}(max_len=...), shorten the input, or use a position without a limit: Rope, Alibi, T5Bias."
        )
    if at.pos is None:
        return table[None, at.start : at.end]
    return table[at.pos.masked_fill(at.pos == EMPTY, 0)]


@spec("randomized")
class Randomized(Spec):
    """Places for position bricks to read, in training drawn from a range longer than any training input.

    In training token i gets the i-th smallest of the places drawn from 0 ... range-1, so that far places are known
    before far tokens are met (arXiv 2305.16843). Afterwards token i gets place i · stride, the same in every call; a
    stride near range / (longest input) puts tokens as far apart as in training. Masks keep the true positions.
    """

    range: int
    stride: int = 1

    def check(self) -> None:
        """Some places, some stride."""
        check_width(self, "range", self.range, LONGEST)
        if not 1 <= self.stride <= self.range:
            raise self.refuse("stride", f"from 1 to range={self.range}")

    def build(self) -> RandomPlaces:
        """The module."""
        return RandomPlaces(self.range, self.stride)


@final
class RandomPlaces(nn.Module):
    """Gives a span its places: drawn in training, evenly spread afterwards."""

    def __init__(self, limit: int, stride: int) -> None:
        super().__init__()
        self.limit, self.stride = limit, stride

    def forward(self, at: Span) -> Span:
        """The span with places. Errors: BrickError when the range is too short for it."""
        last = at.end if self.training else (at.end - 1) * self.stride + 1
        if last > self.limit:
            raise BrickError(
                f"Randomized holds places below {self.limit}; {at.end} tokens need {last}. Raise range, lower stride, "
                f"or shorten the input."
            )
        slots = at.positions(torch.device("cpu") if at.pos is None else at.pos.device)
        slots = slots.masked_fill(slots == EMPTY, 0)
        if not self.training:
            return replace(at, place=slots * self.stride)
        drawn = torch.randperm(self.limit, device=slots.device)[: at.end].sort().values
        return replace(at, place=drawn[slots])
