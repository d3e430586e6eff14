"""Mamba-2: one decay a head, so that the recurrence is a masked matrix product: SSD (arXiv 2405.21060).

    z, x, B, C, δ = u W_in;   x, B, C = silu(conv(x, B, C))
    Δ = softplus(δ + b_Δ);   a_t = exp(Δ_t A),  A = -exp(A_log)
    h_t = a_t h_{t-1} + Δ_t x_t ⊗ B_t           y_t = h_t C_t + D x_t           out = norm(y · silu(z)) W_out

The blocks of section 6, for chunks of L tokens; P(t, s) = a_{s+1} ··· a_t for s ≤ t, else 0:

    inside a chunk        Y = (P ∘ C Bᵀ) (Δ X)
    what a chunk adds     S = Σ_s P(end, s) Δ_s x_s ⊗ B_s
    from chunk to chunk   h ← P(end, start) h + S
    from before           Y += P(t, start) h C_t

Shapes: B batch, T tokens, D model width, H heads, G groups of R heads that share B and C, P head width, N states;
C chunks of L tokens.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from brickformer.errors import SpecError
from brickformer.linear import BranchOut, FusedLinear
from brickformer.mixers import kernels
from brickformer.mixers.base import Mixer, MixerSpec
from brickformer.mixers.chunked import CHUNK, Decays, from_chunks, to_chunks
from brickformer.mixers.line import Line
from brickformer.mixers.recurrent import LinearRecurrence, LinearState, convolve, short_conv, step_biases, wide
from brickformer.ranges import check_eps, check_width
from brickformer.spec import spec


@spec("mamba2")
class Mamba2(MixerSpec):
    """State space duality (arXiv 2405.21060).

    heads: H, default 2·dim/head_dim. head_dim: P, width of a head. state: N, states of a channel. groups: G, heads in
    one group share B and C, and are normed together. conv: tokens the short convolution sees. eps: of the norm. bias:
    on the projections in and out; conv_bias: on the convolution.
    """

    heads: int | None = None
    head_dim: int = 64
    state: int = 128
    groups: int = 1
    conv: int = 4
    eps: float = 1e-5
    bias: bool = False
    conv_bias: bool = True

    def check(self) -> None:
        """Widths are at least 1; groups divide the heads."""
        for name, width in (("head_dim", self.head_dim), ("state", self.state), ("conv", self.conv)):
            check_width(self, name, width)
        check_width(self, "groups", self.groups)
        check_eps(self, self.eps)
        if self.heads is not None:
            check_width(self, "heads", self.heads)
            if self.heads % self.groups:
                raise self.refuse("groups", f"a divisor of heads={self.heads}")

    def build(self, dim: int) -> Mixer:
        """The module. Errors: SpecError when 2·dim is no multiple of the head width, or groups do not divide heads."""
        heads = self.heads or 2 * dim // self.head_dim
        if self.heads is None and (heads == 0 or 2 * dim % self.head_dim):
            raise SpecError(
                f"mamba2.head_dim: got {self.head_dim}, expected a divisor of 2·dim={2 * dim}, or give heads."
            )
        if heads % self.groups:
            raise SpecError(f"mamba2.groups: got {self.groups}, expected a divisor of heads={heads}.")
        inner, shared = heads * self.head_dim, self.groups * self.state
        return Mamba2Mixer(
            FusedLinear(dim, (inner, inner, shared, shared, heads), bias=self.bias),
            short_conv(inner + 2 * shared, self.conv, bias=self.conv_bias),
            GatedNorm(inner, self.groups, self.eps),
            BranchOut(inner, dim, bias=self.bias),
            groups=self.groups,
        )


@final
class GatedNorm(nn.Module):
    """RMSNorm(y · silu(z)) · g, each group of channels alone (arXiv 2405.21060, 7.1); in float32 or wider."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, y: Float[Tensor, "B T I"], z: Float[Tensor, "B T I"]) -> Float[Tensor, "B T I"]:
        """y, z (B, T, I) -> (B, T, I)."""
        gated = (y * F.silu(z.to(y.dtype))).unflatten(-1, (self.groups, -1))
        return F.rms_norm(gated, gated.shape[-1:], eps=self.eps).flatten(-2) * self.weight.to(y.dtype)


@final
class Mamba2State(LinearState):
    """h: (B, G, R·P, N)."""

    brick = "mamba2"


@final
class Mamba2Mixer(LinearRecurrence):
    """Convolution, SSD, gated norm."""

    memory, kernel, kernel_types = Mamba2State, kernels.mamba2_kernel, kernels.HALF

    def __init__(self, into: FusedLinear, conv: nn.Conv1d, norm: GatedNorm, out: BranchOut, *, groups: int) -> None:
        super().__init__()
        inner, _, shared, _, heads = into.parts
        self.into, self.conv, self.norm, self.out, self.groups = into, conv, norm, out, groups
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1.0, 16.0).log_())
        self.dt_bias = nn.Parameter(step_biases(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.tail_size = (conv.kernel_size[0] - 1, inner + 2 * shared)
        self.h_size = (groups, inner // groups, shared // groups)
        self.numbers = into.out_features + 2 * inner + CHUNK * heads

    def block(self, x: Tensor, line: Line, tail: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """One run of tokens."""
        inner, _, shared, _, heads = self.into.parts
        z, mixed, dt = self.into(x).split([inner, inner + 2 * shared, heads], -1)
        mixed, tail = convolve(mixed, self.conv, line, tail)
        a_log, skip, bias, dt, mixed = (v.to(wide(x)) for v in (self.A_log, self.D, self.dt_bias, dt, mixed))
        dt = line.quiet(F.softplus(dt + bias))  # (B, T, H)
        values, b, c = mixed.split([inner, shared, shared], -1)
        values = values.unflatten(-1, (heads, -1))  # (B, T, H, P)
        b, c = (v.unflatten(-1, (self.groups, -1)) for v in (b, c))  # (B, T, G, N)
        if h is None:
            y = kernels.ssd(dt, values, -a_log.exp(), b, c, x.dtype)
        else:
            y, h = ssd(dt, values, -a_log.exp(), b, c, h, line.since)
        y = torch.addcmul(y, skip[:, None], values).flatten(-2)
        return self.out(self.norm(y, z).to(x.dtype)), tail, h


# ---- structured state space duality ---------------------------------------------------------------------------------


def ssd(
    dt: Float[Tensor, "B T H"],
    x: Float[Tensor, "B T H P"],
    a: Float[Tensor, " H"],
    b: Float[Tensor, "B T G N"],
    c: Float[Tensor, "B T G N"],
    h: Float[Tensor, "B G RP N"],
    since: Int[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H P"], Float[Tensor, "B G RP N"]]:
    """y_t = h_t c_t with h_t = exp(dt_t a) h_{t-1} + dt_t x_t ⊗ b_t for every head, and the last h.

    since: tokens of the same document before each token; at 0 the memory starts anew.
    """
    tokens, heads, groups = x.shape[1], x.shape[2], b.shape[2]
    log_a, x = dt * a, dt[..., None] * x
    if tokens == 1 and since is None:
        decay = log_a.exp()[..., None].expand_as(x).reshape(*h.shape[:3], 1)
        h = torch.addcmul(h * decay, x.reshape(*h.shape[:3], 1), b[:, 0, :, None])
        return (h @ c[:, 0, :, :, None]).reshape(x.shape), h
    length = min(CHUNK, tokens)
    decays = Decays.of(log_a, since, length)
    x, b, c = (to_chunks(v, length) for v in (x, b, c))  # (B, C, H, L, P), 2 × (B, C, G, L, N)

    grouped = (groups, heads // groups)
    scores = (c @ b.mT).unsqueeze(3) * decays.pair.unflatten(2, grouped)  # (B, C, G, R, L, L)
    inside = scores.flatten(2, 3) @ x  # (B, C, H, L, P)

    written = _beside(x * decays.leave[..., None], groups).mT @ b  # (B, C, G, R·P, N)
    total = decays.total.unflatten(2, grouped)[..., None].expand(-1, -1, -1, -1, x.shape[-1]).flatten(3, 4)[..., None]
    before = []
    for new, left in zip(written.unbind(1), total.unbind(1), strict=True):
        before.append(h)
        h = torch.addcmul(new, left, h)
    read = c @ torch.stack(before, 1).mT  # (B, C, G, L, R·P)
    read = read.unflatten(-1, (grouped[1], -1)).transpose(3, 4).flatten(2, 3)  # (B, C, H, L, P)
    return from_chunks(torch.addcmul(inside, read, decays.enter[..., None]), tokens), h


def _beside(x: Tensor, groups: int) -> Tensor:
    """(B, C, H, L, P) -> (B, C, G, L, R·P): the heads of a group side by side."""
    return x.unflatten(2, (groups, -1)).transpose(3, 4).flatten(4)
