"""Into and out of the model: token ids to vectors, vectors to logits.

    x = drop(norm(position(scale · table[id])))        scale = √D as in arXiv 1706.03762, 3.4, or 1
    logits = h · W_headᵀ                               W_head = table when tied (arXiv 1608.05859)

Shapes: ids (B, T) -> (B, T, D); h (B, T, D) -> (B, T, V).
"""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from brickformer.errors import BrickError
from brickformer.feedforward import check_dropout
from brickformer.linear import Linear
from brickformer.mask import Span
from brickformer.norms import NormSpec
from brickformer.positions import AbsolutePosition, AbsolutePositionSpec, Randomized, RandomPlaces
from brickformer.spec import Spec, spec


@spec("embed")
class Embed(Spec):
    """How ids become vectors. scaled: times √D. position: a table added to each token, or none. norm: after the sum.

    randomized: places drawn from a long range in training, for position bricks here and in attention.
    """

    position: AbsolutePositionSpec | None = None
    scaled: bool = False
    norm: NormSpec | None = None
    dropout: float = 0.0
    randomized: Randomized | None = None

    def check(self) -> None:
        """Dropout is a probability; a table has a row for every place that may be drawn."""
        check_dropout(self, self.dropout)
        limit = self.position.limit() if self.position else None
        if self.randomized is not None and limit is not None and limit < self.randomized.range:
            raise self.refuse("randomized", f"a range of at most the table's max_len, {limit}", "Raise max_len.")

    def build(self, tokens: TokenEmbedding) -> Embedding:
        """The module, on a table that may be shared."""
        dim = tokens.embedding_dim
        return Embedding(
            tokens,
            scale=math.sqrt(dim) if self.scaled else 1.0,
            position=self.position.build(dim) if self.position else None,
            norm=self.norm.build(dim) if self.norm else nn.Identity(),
            dropout=self.dropout,
            places=self.randomized.build() if self.randomized else None,
        )


@final
class TokenEmbedding(nn.Embedding):
    """The table of token vectors, (V, D)."""


@final
class Embedding(nn.Module):
    """Ids to vectors."""

    def __init__(
        self,
        tokens: TokenEmbedding,
        *,
        scale: float,
        position: AbsolutePosition | None,
        norm: nn.Module,
        dropout: float,
        places: RandomPlaces | None = None,
    ) -> None:
        super().__init__()
        self.tokens, self.scale, self.position, self.norm = tokens, scale, position, norm
        self.drop, self.places = nn.Dropout(dropout), places

    def place(self, at: Span) -> Span:
        """The span as position bricks should read it, here and in every layer."""
        return at if self.places is None else self.places(at)

    def forward(self, ids: Int[Tensor, "B T"], at: Span) -> Float[Tensor, "B T D"]:
        """(B, T) ids at `at` -> (B, T, D)."""
        x = self.tokens(ids)
        if self.scale != 1.0:
            x = x * self.scale
        if self.position is not None:
            x = self.position(x, at)
        return self.drop(self.norm(x))


@spec("head")
class Head(Spec):
    """How vectors become logits. tied: with the token table. softcap: logits become cap·tanh(logit/cap)."""

    tied: bool = True
    bias: bool = False
    softcap: float | None = None

    def check(self) -> None:
        """A cap is above 0."""
        if self.softcap is not None and self.softcap <= 0.0:
            raise self.refuse("softcap", "a cap above 0", "Leave it out for none.")

    def build(self, tokens: TokenEmbedding) -> LogitHead:
        """The module; when tied it holds the very parameter of the table."""
        project = Linear(tokens.embedding_dim, tokens.num_embeddings, bias=self.bias)
        if self.tied:
            project.weight = tokens.weight
        return LogitHead(project, softcap=self.softcap)


@final
class LogitHead(nn.Module):
    """Vectors to logits."""

    def __init__(self, project: nn.Linear, *, softcap: float | None) -> None:
        super().__init__()
        self.project, self.softcap = project, softcap

    def forward(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """(B, T, D) -> (B, T, V)."""
        logits = self.project(h)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def check_ids(ids: Tensor, what: str) -> None:
    """Errors: BrickError when ids are not int64 or int32 in a (B, T) table; their range is checked by the look-up."""
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32) or ids.shape[1] == 0:
        raise BrickError(
            f"{what}: got shape {tuple(ids.shape)} of {ids.dtype}, expected (batch, tokens) of integers, "
            f"at least one token, int64 or int32."
        )
