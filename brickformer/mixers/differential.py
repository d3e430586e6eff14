"""Differential attention: the difference of two attention maps, so that noise they share cancels (arXiv 2410.05258).

    out_h = (1 - λ₀) · norm((softmax(q¹ k¹ᵀ/√K) - λ softmax(q² k²ᵀ/√K)) v),      λ = exp(a·b) - exp(c·d) + λ₀

Each head has two maps over one value of width 2K, so H heads here cost what 2H plain heads of width K do.
Shapes: B batch, T tokens, S keys, H heads, K width of a query.
"""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.attend import Attend, Backend
from brickformer.errors import SpecError, StateError
from brickformer.linear import BranchOut, FusedLinear
from brickformer.mask import Mask, Span
from brickformer.mixers.attention import merge_heads, split_heads
from brickformer.mixers.base import Mixer, MixerSpec, expect_cache
from brickformer.norms import NormSpec, RMSNorm
from brickformer.positions import NoPosition, Position, PositionSpec
from brickformer.ranges import check_dropout, check_width
from brickformer.spec import spec
from brickformer.state import State, kv_for


@spec("differential")
class DifferentialAttention(MixerSpec):
    """Differential attention (arXiv 2410.05258). heads: differences; a query has dim / (2·heads) channels.

    lambda_init: λ₀; the paper raises it with depth, from 0.2 at the first layer to 0.8. norm: of what each head saw.
    """

    heads: int
    position: PositionSpec | None = None
    mask: Mask = Mask()
    lambda_init: float = 0.8
    norm: NormSpec = RMSNorm()
    dropout: float = 0.0
    backend: Backend = "auto"

    def check(self) -> None:
        """Some heads; λ₀ from 0 to below 1."""
        check_width(self, "heads", self.heads)
        check_dropout(self, self.dropout)
        if not 0.0 <= self.lambda_init < 1.0:
            raise self.refuse("lambda_init", "from 0 to below 1")

    def build(self, dim: int) -> Mixer:
        """The module. Errors: SpecError when twice the heads do not divide dim."""
        if dim % (2 * self.heads):
            raise SpecError(f"differential.heads: got {self.heads}, expected 2 · heads to divide dim={dim}.")
        width = dim // (2 * self.heads)
        return DifferentialMixer(
            FusedLinear(dim, (dim, dim, dim), bias=False),
            BranchOut(dim, dim, bias=False),
            attend=Attend(self.mask, dropout=self.dropout, backend=self.backend),
            position=self.position.build(2 * self.heads, width, self.mask.causal) if self.position else NoPosition(),
            norm=self.norm.build(2 * width),
            width=width,
            lambda_init=self.lambda_init,
        )


@final
class DifferentialMixer(Mixer):
    """Two maps a head, one subtracted from the other."""

    def __init__(
        self,
        qkv: FusedLinear,
        out: BranchOut,
        *,
        attend: Attend,
        position: Position,
        norm: nn.Module,
        width: int,
        lambda_init: float,
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.attend, self.position, self.norm = qkv, out, attend, position, norm
        self.width, self.lambda_init, self.causal = width, lambda_init, attend.mask.causal
        self.lambdas = nn.Parameter(0.1 * torch.randn(4, width))  # a, b, c, d

    def forward(self, x: Float[Tensor, "B T D"], at: Span, state: State | None = None) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""
        q, k, v = (split_heads(y, self.width) for y in self.qkv(x).split(self.qkv.parts, dim=-1))
        q = self.position.rotate(q, at)  # (B, 2H, T, K): the first maps, then the second
        k = self.position.rotate(k, at)  # (B, 2H, T, K)
        k_at = at
        if state is not None:
            k, v, k_at = expect_cache(state, self.attend.mask, "differential").append(k, v, at)  # (B, 2H, S, K)
        whole = torch.cat(v.chunk(2, dim=1), dim=-1)  # (B, H, S, 2K): each value comes in two halves
        maps = self.attend(q, k, torch.cat([whole, whole], dim=1), at, k_at, self.position.bias(at, k_at, x.device))
        first, second = maps.chunk(2, dim=1)  # 2 × (B, H, T, 2K)
        a, b, c, d = self.lambdas
        strength = torch.exp(a @ b) - torch.exp(c @ d) + self.lambda_init
        return self.out(merge_heads(self.norm(first - strength * second)) * (1.0 - self.lambda_init))

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """As plain attention with twice the heads."""
        if not self.causal:
            raise StateError("differential: sees the future, so it cannot decode step by step. Use Mask(causal=True).")
        heads = self.qkv.parts[1] // self.width
        return kv_for(self.attend.mask, batch, heads, max_len, self.width, device=device, dtype=dtype)
