"""Feed-forward: change each vector alone.

    MLP   out(act(in(x)))                       arXiv 1706.03762, eq. 2
    GLU   out(act(gate(x)) · up(x))             arXiv 2002.05202; with silu: SwiGLU

Shapes: x (B, T, D) -> (B, T, D); F hidden width. An MLP has 2·D·F weights, a GLU 3·D·F: for equal size give the GLU
2/3 of the hidden width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, assert_never, final

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.linear import BranchOut, FusedLinear, Linear
from brickformer.ranges import check_dropout, check_width
from brickformer.spec import Spec, spec

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2"]


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function of that name. gelu_tanh: GELU by its tanh formula (GPT-2); relu2: max(0, x)² (arXiv 2109.08668)."""
    match name:
        case "relu":
            return F.relu
        case "gelu":
            return F.gelu
        case "gelu_tanh":
            return lambda x: F.gelu(x, approximate="tanh")
        case "silu":
            return F.silu
        case "relu2":
            return lambda x: F.relu(x).square()
        case other:
            assert_never(other)


class FeedForward(nn.Module, ABC):
    """Slot: a function of each vector alone."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""


class FeedForwardSpec(Spec):
    """Slot: specs of feed-forward bricks."""

    __slots__ = ()

    @abstractmethod
    def build(self, dim: int) -> FeedForward:
        """A module for vectors of width `dim`."""


@spec("mlp")
class MLP(FeedForwardSpec):
    """Two linear maps with an activation between (arXiv 1706.03762, eq. 2). dropout: on the hidden units."""

    hidden: int
    activation: Activation = "relu"
    bias: bool = True
    dropout: float = 0.0

    def check(self) -> None:
        """At least one hidden unit; dropout a probability."""
        check_width(self, "hidden", self.hidden)
        check_dropout(self, self.dropout)

    def build(self, dim: int) -> FeedForward:
        """The module."""
        return MLPFeedForward(
            Linear(dim, self.hidden, bias=self.bias),
            BranchOut(self.hidden, dim, bias=self.bias),
            activation=activation(self.activation),
            dropout=self.dropout,
        )


@final
class MLPFeedForward(FeedForward):
    """out(drop(act(in(x))))."""

    def __init__(
        self, into: nn.Linear, out: nn.Linear, *, activation: Callable[[Tensor], Tensor], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.into, self.out, self.activation = into, out, activation
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""
        hidden = self.activation(self.into(x))  # (B, T, F)
        return self.out(self.drop(hidden))


@spec("glu")
class GLU(FeedForwardSpec):
    """Gated linear unit (arXiv 2002.05202): silu is SwiGLU, gelu GeGLU, relu ReGLU. dropout: on the hidden units."""

    hidden: int
    activation: Activation = "silu"
    bias: bool = False
    dropout: float = 0.0

    def check(self) -> None:
        """At least one hidden unit; dropout a probability."""
        check_width(self, "hidden", self.hidden)
        check_dropout(self, self.dropout)

    def build(self, dim: int) -> FeedForward:
        """The module."""
        return GLUFeedForward(
            FusedLinear(dim, (self.hidden, self.hidden), bias=self.bias),
            BranchOut(self.hidden, dim, bias=self.bias),
            activation=activation(self.activation),
            dropout=self.dropout,
        )


@final
class GLUFeedForward(FeedForward):
    """out(drop(act(gate(x)) · up(x))), gate and up in one product."""

    def __init__(
        self, gate_up: FusedLinear, out: nn.Linear, *, activation: Callable[[Tensor], Tensor], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.gate_up, self.out, self.activation = gate_up, out, activation
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # 2 × (B, T, F)
        return self.out(self.drop(self.activation(gate) * up))
