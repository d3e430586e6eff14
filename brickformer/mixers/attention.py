"""Self-attention: every token looks at the tokens its mask allows (arXiv 1706.03762, 3.2).

    q, k, v = x W_q, x W_k, x W_v;   heads;   out = Attend(q, k, v) W_o

kv_heads < heads is grouped-query attention (arXiv 2305.13245), kv_heads = 1 multi-query (arXiv 1911.02150).
Shapes: B batch, T tokens, S keys, D model width, H heads, G key heads, K head width.
"""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.attend import Attend, Backend
from brickformer.errors import SpecError, StateError
from brickformer.linear import BranchOut, FusedLinear, Linear
from brickformer.mask import Mask, Span
from brickformer.mixers.base import Mixer, MixerSpec, expect_cache
from brickformer.norms import NormSpec
from brickformer.positions import NoPosition, Position, PositionSpec
from brickformer.ranges import check_cap, check_dropout, check_size, check_width, divisors
from brickformer.spec import Spec, spec
from brickformer.state import State, kv_for


@spec("attention")
class Attention(MixerSpec):
    """Self-attention.

    heads: query heads. kv_heads: key/value heads, default all. head_dim: width of a head, default dim/heads.
    position: rotary, ALiBi, T5's bias, or none. mask: causal by default; `FULL` in an encoder; a window.
    qk_norm: norm of each head's queries and keys (arXiv 2010.04245); qk_norm_all: of all heads' together, before they
    are cut (OLMo 2: arXiv 2501.00656). softcap: see `Attend`. dropout: on the weights.
    bias: on queries, keys, values and output; out_bias: on the output, default as bias. scale: default 1/√K.
    sinks: a learned score a head that takes weight and gives nothing, so that a head may look away (arXiv 2309.17453).
    gate: what the heads saw, times sigmoid(x W_g), before the output (arXiv 2505.06708).
    value_residual: v becomes λ v + μ v of the first layer, two learned numbers, both 1/2 at first (arXiv 2410.17897).
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    position: PositionSpec | None = None
    mask: Mask = Mask()
    qk_norm: NormSpec | None = None
    qk_norm_all: NormSpec | None = None
    softcap: float | None = None
    scale: float | None = None
    dropout: float = 0.0
    bias: bool = False
    out_bias: bool | None = None
    sinks: bool = False
    gate: bool = False
    value_residual: bool = False
    backend: Backend = "auto"

    def check(self) -> None:
        """Heads divide into key heads; probabilities and caps make sense."""
        check_heads(self, self.heads, self.kv_heads)
        check_dropout(self, self.dropout)
        check_cap(self, self.softcap)
        check_size(self, "scale", self.scale)
        if self.sinks and self.backend == "flex":
            raise self.refuse("backend", "'auto', 'sdpa' or 'reference' when there are sinks")

    def build(self, dim: int) -> Mixer:
        """The module. Errors: SpecError when the widths do not fit."""
        width = head_width(self, dim, self.heads, self.head_dim)
        groups = self.kv_heads or self.heads
        out_bias = self.bias if self.out_bias is None else self.out_bias
        return AttentionMixer(
            FusedLinear(dim, (self.heads * width, groups * width, groups * width), bias=self.bias),
            BranchOut(self.heads * width, dim, bias=out_bias),
            heads=self.heads,
            attend=Attend(
                self.mask, scale=self.scale, softcap=self.softcap, dropout=self.dropout, backend=self.backend
            ),
            position=self.position.build(self.heads, width, self.mask.causal) if self.position else NoPosition(),
            q_norm=self.qk_norm.build(width) if self.qk_norm else nn.Identity(),
            k_norm=self.qk_norm.build(width) if self.qk_norm else nn.Identity(),
            q_norm_all=self.qk_norm_all.build(self.heads * width) if self.qk_norm_all else nn.Identity(),
            k_norm_all=self.qk_norm_all.build(groups * width) if self.qk_norm_all else nn.Identity(),
            sinks=nn.Parameter(torch.zeros(self.heads)) if self.sinks else None,
            gate=Linear(dim, self.heads * width) if self.gate else None,
            residue=nn.Parameter(torch.full((2,), 0.5)) if self.value_residual else None,
        )


@final
class AttentionMixer(Mixer):
    """Multi-head, grouped or multi-query self-attention."""

    def __init__(
        self,
        qkv: FusedLinear,
        out: BranchOut,
        *,
        heads: int,
        attend: Attend,
        position: Position,
        q_norm: nn.Module,
        k_norm: nn.Module,
        q_norm_all: nn.Module,
        k_norm_all: nn.Module,
        sinks: nn.Parameter | None = None,
        gate: nn.Linear | None = None,
        residue: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.attend, self.position = qkv, out, attend, position
        self.q_norm, self.k_norm, self.sinks, self.gate, self.residue = q_norm, k_norm, sinks, gate, residue
        self.q_norm_all, self.k_norm_all = q_norm_all, k_norm_all
        self.width = qkv.parts[0] // heads
        self.kv_heads = qkv.parts[1] // self.width
        self.causal = attend.mask.causal
        self.gives = self.kv_heads, self.width
        self.takes = None if residue is None else self.gives

    def values(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B G T K"]:
        """Its own, before anything is mixed in."""
        return split_heads(self.qkv(x).split(self.qkv.parts, dim=-1)[2], self.width)

    def forward(self, x: Float[Tensor, "B T D"], at: Span, state: State | None = None) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""
        q, k, v = self.qkv(x).split(self.qkv.parts, dim=-1)
        q, k, v = (split_heads(y, self.width) for y in (self.q_norm_all(q), self.k_norm_all(k), v))
        q = self.position.rotate(self.q_norm(q), at)  # (B, H, T, K)
        k = self.position.rotate(self.k_norm(k), at)  # (B, G, T, K)
        if self.residue is not None:
            v = self.residue[0] * v + self.residue[1] * (v if at.values is None else at.values)
        k_at = at
        if state is not None:
            k, v, k_at = expect_cache(state, self.attend.mask, "attention").append(k, v, at)  # (B, G, S, K)
        bias = self.position.bias(at, k_at, x.device)
        seen = self.attend(q, k, v, at, k_at, bias, self.sinks)  # (B, H, T, K)
        y = merge_heads(seen)
        return self.out(y if self.gate is None else y * torch.sigmoid(self.gate(x)))

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """A KV cache; a ring of the last tokens where the mask has a window."""
        if not self.causal:
            raise StateError(
                "attention: sees the future, so it cannot decode step by step. Use mask=Mask(causal=True)."
            )
        return kv_for(self.attend.mask, batch, self.kv_heads, max_len, self.width, device=device, dtype=dtype)


def split_heads(x: Float[Tensor, "B T HK"], width: int) -> Float[Tensor, "B H T K"]:
    """(B, T, H·K) -> (B, H, T, K): first cut the last axis, then swap; a plain view would mix tokens."""
    batch, tokens, joined = x.shape
    return x.view(batch, tokens, joined // width, width).transpose(1, 2)


def merge_heads(x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B T HK"]:
    """(B, H, T, K) -> (B, T, H·K): swap back, then join."""
    return x.transpose(1, 2).flatten(2)


def check_heads(of: Spec, heads: int, kv_heads: int | None) -> None:
    """Errors: SpecError when query heads cannot share the key heads evenly."""
    check_width(of, "heads", heads)
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        raise of.refuse("kv_heads", f"a divisor of heads={heads}: {_near(heads, kv_heads, 8)}")


def head_width(of: Spec, dim: int, heads: int, head_dim: int | None) -> int:
    """The width of one head. Errors: SpecError when the heads do not divide the model width."""
    if head_dim is not None:
        check_width(of, "head_dim", head_dim)
        return head_dim
    if dim % heads:
        fits = _near(dim, heads, 4)
        raise SpecError(f"{of.kind}.heads: got {heads}, expected a divisor of dim={dim} ({fits}), or give head_dim.")
    return dim // heads


def _near(n: int, to: int, count: int) -> str:
    """The divisors of n that are nearest to a number: ``1, 2, 4``."""
    nearest = sorted(divisors(n), key=lambda d: abs(d - to))[:count]
    return ", ".join(map(str, sorted(nearest)))
