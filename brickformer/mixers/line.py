"""Line: the tokens of a call in the order in which a recurrence meets them.

A recurrence meets the tokens of a row one by one, so a padded token must not be met at all. A line holds the real
tokens of every row at its front, in their order, and the padding behind them, where nothing comes after it. Bricks
`pack` what comes in and `unpack` what goes out: two gathers, without waiting for the device, and nothing at all where
the span promises that there is no padding. Padding must still leave the memory alone (`live`, `quiet`), and a packed
document starts with an empty one (`since`).
Shapes: B batch, T tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from brickformer.mask import Span


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Real tokens first.

    length: T. order: (B, T) where token i of the line stood in the call; rank: where token i of the call stands in the
    line; None: in the same place. live: True at real tokens of the line; None: all of them. since: how many tokens of
    its document came before each token of the line; None: one document.
    """

    length: int
    order: Int[Tensor, "B T"] | None = None
    rank: Int[Tensor, "B T"] | None = None
    live: Bool[Tensor, "B T"] | None = None
    since: Int[Tensor, "B T"] | None = None

    @classmethod
    def of(cls, at: Span) -> Self:
        """The line of a span. Nothing is computed where the span knows neither padding nor documents."""
        real, doc = at.real(), at.doc
        order = rank = live = since = None
        if real is not None:
            places, count = torch.arange(at.length, device=real.device), real.sum(1, keepdim=True)
            live = places < count
            if at.length > 1:
                rank = torch.where(real, real.cumsum(1), count + (~real).cumsum(1)) - 1
                order = torch.empty_like(rank).scatter_(1, rank, places.expand_as(rank))
        if doc is not None:
            doc = doc if order is None else doc.gather(1, order.expand_as(doc))
            begins = torch.ones_like(doc, dtype=torch.bool)
            begins[:, 1:] = doc[:, 1:] != doc[:, :-1]
            places = torch.arange(at.length, device=doc.device).expand_as(doc)
            since = places - places.masked_fill(~begins, 0).cummax(1).values
        return cls(at.length, order, rank, live, since)

    def pack(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Tokens in the order of the call -> in the order of the line."""
        return _reorder(x, self.order)

    def unpack(self, y: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Tokens in the order of the line -> in the order of the call."""
        return _reorder(y, self.rank)

    def quiet(self, x: Float[Tensor, "B T *rest"]) -> Float[Tensor, "B T *rest"]:
        """x, with zeros at padding."""
        return x if self.live is None else x.masked_fill(~self.live.view(*self.live.shape, *[1] * (x.ndim - 2)), 0.0)

    def blocks(self, x: Float[Tensor, "B T D"], size: int) -> Iterator[tuple[Tensor, Line]]:
        """Packed tokens and their line, cut into runs of at most `size` tokens."""
        begin = 0
        for piece in x.split(size, 1):  # not slices: the gradient of each slice is as long as the whole
            cut = slice(begin, begin + piece.shape[1])
            live = None if self.live is None else self.live[:, cut]
            since = None if self.since is None else self.since[:, cut]
            yield piece, Line(piece.shape[1], None, None, live, since)
            begin = cut.stop


def _reorder(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.gather(1, order[..., None].expand_as(x))
