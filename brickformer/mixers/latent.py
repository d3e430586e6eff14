"""Latent attention: keys and values are unpacked from one small vector a token, the only thing kept (arXiv 2405.04434).

    c = norm(x W_down)                      R numbers a token: the cache, with a short rotary key shared by all heads
    k_h = [c W_uk_h ; rope(x W_kr)]         v_h = c W_uv_h
    q_h = [q W_uq_h ; rope(q W_qr_h)]       q = x, or norm(x W_qdown) when queries are compressed too
    out = Attend(q, k, v) W_o               scale = 1/√(N + P)

At one new token the unpacking moves to the other side, q·(c W_uk_h) = (q W_uk_hᵀ)·c: all heads look at the cache
itself, one key head of width R + P, and nothing is unpacked for old tokens. The two forms are equal; a test says so.

Shapes: B batch, T tokens, S keys, H heads, R rank, N head width without position, P rotary width, V value width.
"""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.attend import Attend, Backend
from brickformer.errors import SpecError, StateError
from brickformer.linear import BranchOut, FusedLinear, Linear
from brickformer.mask import Mask, Span
from brickformer.mixers.attention import merge_heads, split_heads
from brickformer.mixers.base import Mixer, MixerSpec, expect_cache
from brickformer.norms import NormSpec, RMSNorm
from brickformer.positions import Position, PositionSpec, Rope
from brickformer.ranges import check_dropout, check_size, check_width
from brickformer.spec import spec
from brickformer.state import State, kv_for


@spec("latent")
class LatentAttention(MixerSpec):
    """Multi-head latent attention (DeepSeek-V2 and V3; arXiv 2405.04434).

    rank: numbers kept a token. q_rank: compress queries too. head_dim: a head's part without position, default
    dim/heads; rope_dim: its rotary part, one for all keys; v_dim: of the values, default head_dim.
    """

    heads: int
    rank: int
    rope_dim: int
    head_dim: int | None = None
    v_dim: int | None = None
    q_rank: int | None = None
    position: PositionSpec = Rope()
    mask: Mask = Mask()
    norm: NormSpec = RMSNorm()
    scale: float | None = None
    dropout: float = 0.0
    backend: Backend = "auto"

    def check(self) -> None:
        """Every width at least 1."""
        for name, value in (("heads", self.heads), ("rank", self.rank), ("rope_dim", self.rope_dim)):
            check_width(self, name, value)
        for name, given in (("head_dim", self.head_dim), ("v_dim", self.v_dim), ("q_rank", self.q_rank)):
            if given is not None:
                check_width(self, name, given)
        check_dropout(self, self.dropout)
        check_size(self, "scale", self.scale)

    def build(self, dim: int) -> Mixer:
        """The module. Errors: SpecError when the heads do not divide dim and no head_dim is given."""
        if self.head_dim is None and dim % self.heads:
            raise SpecError(f"latent.heads: got {self.heads}, expected a divisor of dim={dim}, or give head_dim.")
        width = self.head_dim or dim // self.heads
        v_width = self.v_dim or width
        q_down: nn.Module = nn.Identity()
        if self.q_rank is not None:
            q_down = nn.Sequential(Linear(dim, self.q_rank, bias=False), self.norm.build(self.q_rank))
        scale = 1.0 / math.sqrt(width + self.rope_dim) if self.scale is None else self.scale
        return LatentMixer(
            q_down,
            FusedLinear(self.q_rank or dim, (self.heads * width, self.heads * self.rope_dim), bias=False),
            FusedLinear(dim, (self.rank, self.rope_dim), bias=False),
            self.norm.build(self.rank),
            FusedLinear(self.rank, (self.heads * width, self.heads * v_width), bias=False),
            BranchOut(self.heads * v_width, dim, bias=False),
            heads=self.heads,
            attend=Attend(self.mask, scale=scale, dropout=self.dropout, backend=self.backend),
            position=self.position.build(self.heads, self.rope_dim, self.mask.causal),
        )


@final
class LatentMixer(Mixer):
    """Attention over unpacked latents; at one token, over the latents themselves."""

    def __init__(
        self,
        q_down: nn.Module,
        q_up: FusedLinear,
        down: FusedLinear,
        norm: nn.Module,
        up: FusedLinear,
        out: BranchOut,
        *,
        heads: int,
        attend: Attend,
        position: Position,
    ) -> None:
        super().__init__()
        self.q_down, self.q_up, self.down, self.norm, self.up, self.out = q_down, q_up, down, norm, up, out
        self.heads, self.attend, self.position, self.causal = heads, attend, position, attend.mask.causal
        self.rank, self.rope_width = down.parts
        self.width, self.v_width = (part // heads for part in up.parts)

    def forward(self, x: Float[Tensor, "B T D"], at: Span, state: State | None = None) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""
        q, q_rope = self.q_up(self.q_down(x)).split(self.q_up.parts, dim=-1)
        q = split_heads(q, self.width)  # (B, H, T, N)
        q_rope = self.position.rotate(split_heads(q_rope, self.rope_width), at)  # (B, H, T, P)
        c, k_rope = self.down(x).split(self.down.parts, dim=-1)
        k_rope = self.position.rotate(k_rope[:, None], at)  # (B, 1, T, P)
        kept = torch.cat([self.norm(c)[:, None], k_rope], dim=-1)  # (B, 1, T, R + P)
        k_at = at
        if state is not None:
            cache = expect_cache(state, self.attend.mask, "latent")
            kept, _, k_at = cache.append(kept, kept[..., :0], at)  # (B, 1, S, R + P)
        bias = self.position.bias(at, k_at, x.device)
        if state is not None and at.length == 1:
            seen = self._look_at_latents(q, q_rope, kept, at, k_at, bias)
        else:
            c, k_rope = kept.split([self.rank, self.rope_width], dim=-1)
            k, v = self.up(c[:, 0]).split(self.up.parts, dim=-1)
            k = torch.cat([split_heads(k, self.width), k_rope.expand(-1, self.heads, -1, -1)], dim=-1)
            seen = self.attend(torch.cat([q, q_rope], dim=-1), k, split_heads(v, self.v_width), at, k_at, bias)
        return self.out(merge_heads(seen))

    def _look_at_latents(
        self, q: Tensor, q_rope: Tensor, kept: Tensor, at: Span, k_at: Span, bias: Tensor | None
    ) -> Float[Tensor, "B H 1 V"]:
        """Queries brought to the latents, values unpacked from what was seen: nothing old is unpacked."""
        up_k = self.up.part(0).view(self.heads, self.width, self.rank)
        up_v = self.up.part(1).view(self.heads, self.v_width, self.rank)
        q = torch.cat([torch.einsum("bhtn,hnr->bhtr", q, up_k), q_rope], dim=-1)  # (B, H, 1, R + P)
        seen = self.attend(q, kept, kept, at, k_at, bias)[..., : self.rank]
        return torch.einsum("bhtr,hvr->bhtv", seen, up_v)

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """R + P numbers a token; a ring of the last ones where the mask has a window."""
        if not self.causal:
            raise StateError("latent: sees the future, so it cannot decode step by step. Use mask=Mask(causal=True).")
        width = self.rank + self.rope_width
        return kv_for(self.attend.mask, batch, 1, max_len, width, v_width=0, device=device, dtype=dtype)
