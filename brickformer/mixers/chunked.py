"""Chunks: a linear recurrence with one decay a head, written as matrix products over L tokens at a time.

    h_t = a_t h_{t-1} + w_t,   0 ≤ a_t ≤ 1        P(t, s) = a_{s+1} ··· a_t,   what is left at t of what s wrote

Inside a chunk every P(t, s) is computed from sums of log a, and only differences that are ≤ 0 are exponentiated, so
nothing overflows. P is 0 across the beginning of a document.
Shapes: B batch, T tokens, C chunks of L tokens, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

CHUNK: Final = 64
"""L: inside a chunk the work of a token grows with L; from chunk to chunk there are T/L steps one after another."""


@dataclass(frozen=True, slots=True, eq=False)
class Decays:
    """What is left of what was written.

    pair: (B, C, H, L, L) P(t, s), 0 for s > t. enter: (B, C, H, L) at token t, of the state before the chunk. leave:
    (B, C, H, L) after the chunk, of what token s wrote. total: (B, C, H) after the chunk, of the state before it.
    """

    pair: Float[Tensor, "B C H L L"]
    enter: Float[Tensor, "B C H L"]
    leave: Float[Tensor, "B C H L"]
    total: Float[Tensor, "B C H"]

    @classmethod
    def of(cls, log_a: Float[Tensor, "B T H"], since: Int[Tensor, "B T"] | None, length: int) -> Self:
        """From log a ≤ 0, and the tokens of the same document before each token (None: one document)."""
        log_p = to_chunks(log_a, length).cumsum(-1)  # (B, C, H, L) log P(t, start)
        later = torch.ones(length, length, dtype=torch.bool, device=log_a.device).triu(1)
        enter, leave = log_p, log_p[..., -1:] - log_p
        if since is not None:
            filled = F.pad(since, (0, -since.shape[1] % length), value=1).unflatten(1, (-1, length))
            document = (filled == 0).cumsum(-1)[:, :, None]  # (B, C, 1, L); 0: the one from before the chunk
            later = later | (document[..., :, None] != document[..., None, :])
            enter = enter.masked_fill(document > 0, -math.inf)
            leave = leave.masked_fill(document < document[..., -1:], -math.inf)
        pair = (log_p[..., :, None] - log_p[..., None, :]).masked_fill(later, -math.inf)
        enter = enter.exp()
        return cls(pair.exp(), enter, leave.exp(), enter[..., -1])


def to_chunks(x: Float[Tensor, "B T H *K"], length: int) -> Float[Tensor, "B C H L *K"]:
    """(B, T, H, ...) -> (B, C, H, L, ...), the last chunk filled with zeros: they write and decay nothing."""
    missing = -x.shape[1] % length
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    return x.unflatten(1, (-1, length)).transpose(2, 3)


def from_chunks(y: Float[Tensor, "B C H L K"], tokens: int) -> Float[Tensor, "B T H K"]:
    """(B, C, H, L, K) -> (B, T, H, K)."""
    return y.transpose(2, 3).flatten(1, 2)[:, :tokens]
