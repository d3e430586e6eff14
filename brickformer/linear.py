"""Linear maps, and one matrix product for several projections of the same input.

    y = x Wᵀ + b,   W = [W_1; W_2; ...]   stacked along the output rows

Queries, keys and values (or gate and up) read the same x, so one product over the stacked rows does the work of three:
fewer kernel launches in training, and at batch 1 one pass over memory instead of three. Which rows belong to which
projection is kept in `parts`, so that an optimizer that orthogonalises matrices, a quantizer, or a table of checkpoint
names can treat each projection on its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.product import product


@final
class Linear(nn.Linear):
    """`nn.Linear` by the quicker product. x (..., I) -> (..., O)."""

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        """x Wᵀ + b."""
        return product(x, self.weight, self.bias)


@final
class FusedLinear(nn.Linear):
    """`nn.Linear` whose output rows belong to several projections, of widths `parts`.

    x (..., D) -> (..., sum(parts)). Cut the result with ``y.split(layer.parts, dim=-1)``.
    """

    def __init__(self, dim: int, parts: tuple[int, ...], *, bias: bool = True) -> None:
        super().__init__(dim, sum(parts), bias=bias)
        self.parts = parts

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        """x Wᵀ + b, the outputs of all parts side by side."""
        return product(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{super().extra_repr()}, parts={self.parts}"

    def part(self, index: int) -> Float[Tensor, "P D"]:
        """The weight rows of one projection, a view."""
        return torch.split(self.weight, list(self.parts), dim=0)[index]


@final
class BranchOut(nn.Linear):
    """`nn.Linear` that writes a branch into the residual stream: its initial size is shared out over the depth."""

    def forward(self, x: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        """x Wᵀ + b."""
        return product(x, self.weight, self.bias)


def is_plain(linear: nn.Linear) -> bool:
    """Whether it computes x Wᵀ + b and nothing else: not so a class of others with a forward of its own."""
    kind = type(linear)
    ours = kind in (Linear, FusedLinear, BranchOut) or kind.forward is nn.Linear.forward
    return ours and "forward" not in linear.__dict__


class CodedMap(nn.Module, ABC):
    """Slot: a linear map whose weights are kept in another form than `nn.Linear`'s, and who knows its own product."""

    @abstractmethod
    def product(self) -> Callable[[Tensor], Tensor]:
        """`forward` as a plain function of x, for a decode step that calls it a hundred times a token."""
