"""Into and out of the model: token ids to vectors, vectors to logits.

    x = project(drop(norm(position(scale · table[id] + segment))))   scale = √D as in arXiv 1706.03762, 3.4, or 1
    logits = transform(h) · W_headᵀ                                  W_head = table when tied (arXiv 1608.05859)

project widens a narrow table (arXiv 1909.11942, 3.1), transform narrows again: norm(act(W h + b)), as BERT has it.
Shapes: ids (B, T) -> (B, T, D); h (B, T, D) -> (B, T, V); E width of the table, D where nothing else is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from brickformer.errors import BrickError, SpecError
from brickformer.feedforward import Activation, activation
from brickformer.linear import Linear
from brickformer.mask import Span
from brickformer.norms import LayerNorm, NormSpec
from brickformer.positions import AbsolutePosition, AbsolutePositionSpec, Randomized, RandomPlaces
from brickformer.ranges import check_cap, check_dropout, check_width
from brickformer.spec import Spec, spec


@spec("embed")
class Embed(Spec):
    """How ids become vectors. scaled: times √D. position: a table added to each token, or none. norm: after the sum.

    randomized: places drawn from a long range in training, for position bricks here and in attention. width: E of the
    table, default D; where it is given, a linear map E -> D follows (ALBERT). segments: how many kinds of text there
    are, each a learned vector added to its tokens (BERT's sentences A and B, told in `Span.segment`); 0 for none.
    """

    position: AbsolutePositionSpec | None = None
    scaled: bool = False
    norm: NormSpec | None = None
    dropout: float = 0.0
    randomized: Randomized | None = None
    width: int | None = None
    segments: int = 0

    def check(self) -> None:
        """Dropout is a probability; a table has a row for every place that may be drawn."""
        check_dropout(self, self.dropout)
        if self.width is not None:
            check_width(self, "width", self.width)
        if self.segments < 0:
            raise self.refuse("segments", "0 (none) or more")
        limit = self.position.limit() if self.position else None
        if self.randomized is not None and limit is not None and limit < self.randomized.range:
            raise self.refuse("randomized", f"a range of at most the table's max_len, {limit}", "Raise max_len.")

    def table(self, vocab: int, dim: int) -> TokenEmbedding:
        """A token table for a model of width `dim`."""
        return TokenEmbedding(vocab, self.width or dim)

    def build(self, tokens: TokenEmbedding, dim: int) -> Embedding:
        """The module, on a table that may be shared, for a model of width `dim`."""
        width = tokens.embedding_dim
        return Embedding(
            tokens,
            scale=math.sqrt(width) if self.scaled else 1.0,
            position=self.position.build(width) if self.position else None,
            norm=self.norm.build(width) if self.norm else nn.Identity(),
            dropout=self.dropout,
            places=self.randomized.build() if self.randomized else None,
            segments=nn.Embedding(self.segments, width) if self.segments else None,
            project=nn.Identity() if self.width is None else nn.Linear(width, dim),
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
        segments: nn.Embedding | None = None,
        project: nn.Module,
    ) -> None:
        super().__init__()
        self.tokens, self.scale, self.position, self.norm = tokens, scale, position, norm
        self.drop, self.places, self.segments, self.project = nn.Dropout(dropout), places, segments, project

    def place(self, at: Span) -> Span:
        """The span as position bricks should read it, here and in every layer."""
        return at if self.places is None else self.places(at)

    def forward(self, ids: Int[Tensor, "B T"], at: Span) -> Float[Tensor, "B T D"]:
        """(B, T) ids at `at` -> (B, T, D)."""
        x = self.tokens(ids)
        if self.scale != 1.0:
            x = x * self.scale
        if self.segments is not None:
            if at.segment is not None:
                _check_range(at.segment, "embed", "segment", self.segments.num_embeddings, "Raise Embed(segments=...).")
            x = x + (self.segments.weight[0] if at.segment is None else self.segments(at.segment))
        elif at.segment is not None:
            raise BrickError("embed: got segments, but has no table of them. Use Embed(segments=2), or leave them out.")
        if self.position is not None:
            x = self.position(x, at)
        return self.project(self.drop(self.norm(x)))


@spec("transform")
class Transform(Spec):
    """A last layer before the table, as in BERT (arXiv 1810.04805): norm(act(W h + b)), from width D to the table's."""

    activation: Activation = "gelu"
    norm: NormSpec = LayerNorm()
    bias: bool = True

    def build(self, dim: int, width: int) -> HeadTransform:
        """The module."""
        return HeadTransform(Linear(dim, width, bias=self.bias), self.norm.build(width), activation(self.activation))


@final
class HeadTransform(nn.Module):
    """norm(act(W h + b))."""

    def __init__(self, dense: nn.Linear, norm: nn.Module, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.dense, self.norm, self.activation = dense, norm, activation

    def forward(self, h: Float[Tensor, "*N D"]) -> Float[Tensor, "*N E"]:
        """(..., D) -> (..., E)."""
        return self.norm(self.activation(self.dense(h)))


@spec("head")
class Head(Spec):
    """How vectors become logits.

    tied: with the token table. softcap: logits become cap·tanh(logit/cap). transform: a layer before the table. scaled:
    h is divided by √D first, as T5 does with a tied table (arXiv 1910.10683).
    """

    tied: bool = True
    bias: bool = False
    softcap: float | None = None
    transform: Transform | None = None
    scaled: bool = False

    def check(self) -> None:
        """A cap is above 0."""
        check_cap(self, self.softcap)

    def build(self, tokens: TokenEmbedding, dim: int) -> LogitHead:
        """The module; when tied it holds the very parameter of the table. Errors: SpecError: widths do not meet."""
        width = dim if self.transform is None else tokens.embedding_dim
        if self.tied and width != tokens.embedding_dim:
            raise SpecError(
                f"head.tied: the table is {tokens.embedding_dim} wide, the model {dim}. Give the head "
                "transform=Transform(), or tied=False."
            )
        project = Linear(width, tokens.num_embeddings, bias=self.bias)
        if self.tied:
            project.weight = tokens.weight
        transform = nn.Identity() if self.transform is None else self.transform.build(dim, width)
        return LogitHead(project, softcap=self.softcap, transform=transform, scale=dim**-0.5 if self.scaled else 1.0)


@final
class LogitHead(nn.Module):
    """Vectors to logits."""

    def __init__(self, project: nn.Linear, *, softcap: float | None, transform: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.transform, self.project, self.softcap, self.scale = transform, project, softcap, scale

    def forward(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """(B, T, D) -> (B, T, V)."""
        h = self.transform(h)
        logits = self.project(h if self.scale == 1.0 else h * self.scale)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def check_ids(ids: Tensor, what: str, vocab: int) -> None:
    """Errors: BrickError when ids are not int64 or int32 in a (B, T) table, or on a CPU not below `vocab`."""
    if not isinstance(ids, Tensor):
        raise BrickError(f"{what}: got a {type(ids).__name__}, expected a tensor of ids (batch, tokens).")
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32) or ids.shape[1] == 0:
        raise BrickError(
            f"{what}: got shape {tuple(ids.shape)} of {ids.dtype}, expected (batch, tokens) of integers, "
            f"at least one token, int64 or int32."
        )
    _check_range(ids, what, "id", vocab, "Use the tokenizer the model was made for, or raise vocab.")


def _check_range(ids: Tensor, what: str, name: str, count: int, do: str) -> None:
    """Errors: BrickError with the first that is not from 0 to count - 1. A GPU is not asked: it would be waited for."""
    unseen = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()  # no numbers to look at there
    if ids.device.type != "cpu" or unseen or type(ids) is not Tensor or not ids.numel():
        return
    low, high = ids.aminmax()
    if int(low) < 0 or int(high) >= count:
        row, t = ((ids < 0) | (ids >= count)).nonzero()[0].tolist()
        raise BrickError(
            f"{what}: got {name} {int(ids[row, t])} in row {row} at token {t}, expected 0 to {count - 1}. {do}"
        )
