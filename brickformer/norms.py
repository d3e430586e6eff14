"""Norms: what keeps the size of a vector steady from layer to layer.

    LayerNorm   (x - mean x) / √(var x + ε) · g + b        arXiv 1607.06450
    RMSNorm     x / √(mean x² + ε) · g                     arXiv 1910.07467
    OffsetRMSNorm  the same with 1 + g, g at first 0       Gemma (arXiv 2403.08295)
    ScaleNorm   x / ‖x‖ · g, g one number                  arXiv 1910.05895
    DynamicTanh tanh(α x) · g + b, α one number            arXiv 2503.10622: a norm's squashing without its statistics
    NoNorm      x

All over the last axis, each vector alone: over time or over the batch it would let tokens see each other.
LayerNorm is torch's own module; RMSNorm is torch's with a quicker backward on a CPU. Shapes: (..., D) -> (..., D).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from brickformer.ranges import check_eps, check_positive
from brickformer.spec import Spec, spec


class NormSpec(Spec):
    """Slot: what is done to a vector before or after a branch."""

    __slots__ = ()

    @abstractmethod
    def build(self, dim: int) -> nn.Module:
        """A module (..., dim) -> (..., dim)."""


@spec("layernorm")
class LayerNorm(NormSpec):
    """Mean 0, variance 1, then gain and bias (arXiv 1607.06450)."""

    eps: float = 1e-5
    bias: bool = True

    def check(self) -> None:
        """ε above 0."""
        check_eps(self, self.eps)

    def build(self, dim: int) -> nn.Module:
        """torch's LayerNorm."""
        return nn.LayerNorm(dim, eps=self.eps, bias=self.bias)


@spec("rmsnorm")
class RMSNorm(NormSpec):
    """Root mean square 1, then gain (arXiv 1910.07467)."""

    eps: float = 1e-6

    def check(self) -> None:
        """ε above 0."""
        check_eps(self, self.eps)

    def build(self, dim: int) -> nn.Module:
        """The module."""
        return RootMeanSquare(dim, eps=self.eps)


@final
class RootMeanSquare(nn.RMSNorm):
    """torch's RMSNorm; where torch has no fused kernel for its training, on a CPU, with a backward of few passes."""

    def forward(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """(..., D) -> (..., D)."""
        exact = x.dtype in (torch.float32, torch.float64) and x.dtype is self.weight.dtype
        plain = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if exact and plain and x.device.type == "cpu" and not torch._C._are_functorch_transforms_active():
            return _RootMeanSquare.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return super().forward(x)


@spec("offset_rmsnorm")
class OffsetRMSNorm(NormSpec):
    """RMSNorm whose gain is stored as its distance from 1, so that weight decay draws it to 1 (arXiv 2403.08295)."""

    eps: float = 1e-6

    def check(self) -> None:
        """ε above 0."""
        check_eps(self, self.eps)

    def build(self, dim: int) -> nn.Module:
        """The module."""
        return OffsetRootMeanSquare(dim, eps=self.eps)


@final
class OffsetRootMeanSquare(nn.Module):
    """x / √(mean x² + ε) · (1 + weight). The gain is made in float32: 1 + g would round a small g off in half types."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """(..., D) -> (..., D)."""
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        gain = 1.0 + self.weight.to(wide.dtype)
        return F.rms_norm(wide, wide.shape[-1:], gain, self.eps).to(x.dtype)


class _RootMeanSquare(torch.autograd.Function):
    """y = n · g with n = x r, r = (mean x² + ε)^(-1/2);  ∂x = r (u - n · mean(u n)) with u = ∂y · g;  ∂g = Σ ∂y n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """(..., D) -> (..., D)."""
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        n = x * r
        ctx.save_for_backward(n, gain, r)
        return n * gain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of x and gain."""
        n, gain, r = ctx.saved_tensors
        dyn = dy * n
        mean = (dyn @ gain).unsqueeze(-1).div_(-n.shape[-1])
        return (dy * gain).addcmul_(n, mean).mul_(r), dyn.flatten(0, -2).sum(0), None


@spec("scalenorm")
class ScaleNorm(NormSpec):
    """Length g, one number for the whole vector, at first √D (arXiv 1910.05895)."""

    eps: float = 1e-5

    def check(self) -> None:
        """ε above 0."""
        check_eps(self, self.eps)

    def build(self, dim: int) -> nn.Module:
        """The module."""
        return ScaledLength(math.sqrt(dim), self.eps)


@final
class ScaledLength(nn.Module):
    """x / ‖x‖ · gain."""

    def __init__(self, gain: float, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.tensor(gain)), eps

    def forward(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """(..., D) -> (..., D). A vector shorter than eps is divided by eps."""
        return x * (self.gain / x.norm(dim=-1, keepdim=True).clamp_min(self.eps)).to(x.dtype)


@spec("dynamictanh")
class DynamicTanh(NormSpec):
    """tanh(α x), then gain and bias (arXiv 2503.10622). alpha: where α starts."""

    alpha: float = 0.5

    def check(self) -> None:
        """α above 0."""
        check_positive(self, "alpha", self.alpha)

    def build(self, dim: int) -> nn.Module:
        """The module."""
        return Squash(dim, self.alpha)


@final
class Squash(nn.Module):
    """tanh(alpha · x) · gain + bias."""

    def __init__(self, dim: int, alpha: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.gain, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """(..., D) -> (..., D)."""
        return torch.tanh(self.alpha * x) * self.gain + self.bias


@spec("nonorm")
class NoNorm(Spec):
    """The vector as it is, before the mixer of a layer whose input is normed already (ModernBERT, arXiv 2412.13663).

    Not a norm: a stack without any grows with its depth, so no other place takes it.
    """

    def build(self, dim: int) -> nn.Module:
        """The identity."""
        return nn.Identity()


@final
class LayerScale(nn.Module):
    """x · γ, a gain for each channel of a branch, small at first (arXiv 2103.17239)."""

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((dim,), start))

    def forward(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """(..., D) -> (..., D)."""
        return x * self.gain
