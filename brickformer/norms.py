"""Norms: what keeps the size of a vector steady from layer to layer.

    LayerNorm   (x - mean x) / √(var x + ε) · g + b        arXiv 1607.06450
    RMSNorm     x / √(mean x² + ε) · g                     arXiv 1910.07467

All over the last axis, each vector alone: over time or over the batch it would let tokens see each other.
Both are torch's own modules. Shapes: (..., D) -> (..., D).
"""

from __future__ import annotations

from abc import abstractmethod

from torch import nn

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

    def build(self, dim: int) -> nn.Module:
        """torch's LayerNorm."""
        return nn.LayerNorm(dim, eps=self.eps, bias=self.bias)


@spec("rmsnorm")
class RMSNorm(NormSpec):
    """Root mean square 1, then gain (arXiv 1910.07467)."""

    eps: float = 1e-6

    def build(self, dim: int) -> nn.Module:
        """torch's RMSNorm."""
        return nn.RMSNorm(dim, eps=self.eps)
