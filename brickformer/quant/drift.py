"""Drift: a matrix is fed by others that were rounded; it is to answer what the full model would have answered.

    min over W̃ of  mean ‖W̃ x̂ - W x‖² + λ ‖W̃ - W‖²        W̃ = W + W D (H + λ)⁻¹,   D = mean (x - x̂) x̂ᵀ

x: what the full model feeds the matrix, x̂: what the coded one does, H = mean x̂ x̂ᵀ. W̃ is rounded in the place of W, and
errors of earlier matrices are made good as far as a linear map can (as in arXiv 2504.02692).

The full model is a twin of the one that is coded. It shares all tensors with it; of a matrix that is coded it keeps
the weights in bfloat16, so that both together never take more than the full model did.

Shapes: x, x̂ (I,), W (O, I), H, D (I, I).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.linear import CodedMap, FusedLinear
from brickformer.quant.hessian import DAMP
from brickformer.surgery import get, replace


def followed(weight: Float[Tensor, "O I"], h: Float[Tensor, "I I"], d: Float[Tensor, "I I"]) -> Float[Tensor, "O I"]:
    """W̃, in float32; W itself where nothing has drifted or nothing is fed."""
    w = weight.float()
    damp = DAMP * float(h.diagonal().mean())
    if damp <= 0.0 or not d.any():
        return w
    lower, bad = torch.linalg.cholesky_ex(h + damp * torch.eye(len(h), device=h.device))
    return w if int(bad) else w + w @ torch.cholesky_solve(d.t(), lower).t()


def twin(model: nn.Module) -> nn.Module:
    """The same modules once more around the same tensors."""
    return copy.deepcopy(model, {id(t): t for t in chain(model.parameters(), model.buffers())})


def halve(whole: nn.Module, name: str) -> None:
    """Keep the weights of a linear map of the twin in bfloat16: its model is about to give them up."""
    module = get(whole, name)
    assert isinstance(module, nn.Linear)
    replace(whole, name, _Half(module))


@final
class _Half(CodedMap):
    """A linear map with weights in bfloat16 and all else in the type of its input."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = like.in_features, like.out_features
        self.parts = like.parts if isinstance(like, FusedLinear) else (like.out_features,)
        self.kept, self.bias, self.dtype = like.weight.detach().to(torch.bfloat16), like.bias, like.weight.dtype

    @property
    def weight(self) -> Float[Tensor, "O I"]:
        """In the type that it was in, for code that looks at weights."""
        return self.kept.to(self.dtype)

    def forward(self, x: Float[Tensor, "*N I"]) -> Float[Tensor, "*N O"]:
        """(..., I) -> (..., O)."""
        return F.linear(x, self.kept.to(x.dtype), self.bias)

    def product(self) -> Callable[[Tensor], Tensor]:
        """No other than `forward`: it reads many rows."""
        return self.forward
