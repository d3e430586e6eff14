"""GatedDelta: linear attention by the gated delta rule (arXiv 2412.06464).

    q, k, v = silu(conv(x W)), each q and k of length 1
    α_t = exp(-exp(A_log) softplus(x W_α + b_α)),   β_t = σ(x W_β)
    S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ        y_t = S_tᵀ q_t / √K
    out = (RMSNorm(y) · silu(x W_z)) W_o

S maps keys to values. α_t forgets everything alike; the delta rule takes away what S answers to k_t, a share β_t of it,
and writes v_t in its place. Step form: d_t = β_t (v_t - α_t S_{t-1}ᵀ k_t), S_t = α_t S_{t-1} + k_t d_tᵀ.

Chunk form, for chunks of L tokens that begin with S; P(t, s) = α_{s+1} ··· α_t for s ≤ t, else 0. What the tokens of
a chunk write, d_t, solves a triangular system (the WY form of the product of the (I - β k kᵀ)):

    A = I + strict lower part of β_t P(t, s) k_t·k_s;    U = A⁻¹ (β V);    W = A⁻¹ (β P(t, start) K);    D = U - W S
    Y = (P(t, start) Q S + (P ∘ Q Kᵀ) D) / √K;    S ← P(end, start) S + Σ_s P(end, s) k_s d_sᵀ

Shapes: B batch, T tokens, D model width, G key heads, H value heads, K key width, V value width; C chunks of L tokens.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from brickformer.linear import BranchOut, FusedLinear
from brickformer.mixers import kernels
from brickformer.mixers.attention import head_width
from brickformer.mixers.base import Mixer, MixerSpec
from brickformer.mixers.chunked import CHUNK, Decays, from_chunks, to_chunks
from brickformer.mixers.line import Line
from brickformer.mixers.recurrent import LinearRecurrence, LinearState, convolve, short_conv, step_biases, wide
from brickformer.ranges import check_eps, check_width
from brickformer.spec import spec


@spec("gated_delta")
class GatedDelta(MixerSpec):
    """Linear attention by the gated delta rule (arXiv 2412.06464).

    heads: query and key heads. value_heads: a multiple of heads, default heads; each has a memory and a decay of its
    own. head_dim: width of a query or key, default dim/heads. value_dim: width of a value, default head_dim.
    conv: tokens the short convolution sees. eps: of the norm. bias: on the projections in and out.
    """

    heads: int
    value_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    conv: int = 4
    eps: float = 1e-6
    bias: bool = False

    def check(self) -> None:
        """Widths are at least 1; value heads come in equal groups."""
        for name, width in (("heads", self.heads), ("head_dim", self.head_dim), ("value_dim", self.value_dim)):
            if width is not None:
                check_width(self, name, width)
        check_width(self, "conv", self.conv)
        check_eps(self, self.eps)
        if self.value_heads is not None and (self.value_heads < 1 or self.value_heads % self.heads):
            raise self.refuse("value_heads", f"a multiple of heads={self.heads}")

    def build(self, dim: int) -> Mixer:
        """The module. Errors: SpecError when the widths do not fit."""
        width, heads = head_width(self, dim, self.heads, self.head_dim), self.value_heads or self.heads
        value = self.value_dim or width
        keys, values = self.heads * width, heads * value
        return GatedDeltaMixer(
            FusedLinear(dim, (keys, keys, values, values, heads, heads), bias=self.bias),
            short_conv(2 * keys + values, self.conv, bias=False),
            HeadNorm(value, self.eps),
            BranchOut(values, dim, bias=self.bias),
            width=width,
        )


@final
class HeadNorm(nn.Module):
    """RMSNorm(y) · g · silu(z), each head alone (arXiv 2412.06464, 3.4); in float32 or wider."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, y: Float[Tensor, "B T H V"], z: Float[Tensor, "B T H V"]) -> Float[Tensor, "B T H V"]:
        """y, z (B, T, H, V) -> (B, T, H, V)."""
        normed = F.rms_norm(y, y.shape[-1:], eps=self.eps) * self.weight.to(y.dtype)
        return normed * F.silu(z.to(y.dtype))


@final
class GatedDeltaState(LinearState):
    """h: (B, H, K, V), the map from keys to values."""

    brick = "gated_delta"


@final
class GatedDeltaMixer(LinearRecurrence):
    """Convolution, gated delta rule, norm and gate."""

    memory, kernel, kernel_types = GatedDeltaState, kernels.delta_kernel, kernels.HALF

    def __init__(self, into: FusedLinear, conv: nn.Conv1d, norm: HeadNorm, out: BranchOut, *, width: int) -> None:
        super().__init__()
        keys, _, values, _, heads, _ = into.parts
        self.into, self.conv, self.norm, self.out, self.width = into, conv, norm, out, width
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.01, 16.0).log_())
        self.dt_bias = nn.Parameter(step_biases(heads))
        self.tail_size = (conv.kernel_size[0] - 1, 2 * keys + values)
        self.h_size = (heads, width, values // heads)
        self.numbers = into.out_features + heads * (2 * width + 3 * CHUNK) + 2 * values

    def block(self, x: Tensor, line: Line, tail: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """One run of tokens."""
        keys, _, values, _, heads, _ = self.into.parts
        mixed, z, beta, dt = self.into(x).split([2 * keys + values, values, heads, heads], -1)
        mixed, tail = convolve(mixed, self.conv, line, tail)
        a_log, bias, beta, dt, mixed = (v.to(wide(x)) for v in (self.A_log, self.dt_bias, beta, dt, mixed))
        log_a = line.quiet(-a_log.exp() * F.softplus(dt + bias))  # (B, T, H)
        q, k, v = mixed.split([keys, keys, values], -1)
        q, k = (unit(w.unflatten(-1, (-1, self.width))) for w in (q, k))  # (B, T, G, K)
        v = v.unflatten(-1, (heads, -1))  # (B, T, H, V)
        beta = line.quiet(beta.sigmoid())
        if h is None:
            y = kernels.gated_delta_rule(q, k, v, log_a, beta, x.dtype)
        else:
            y, h = gated_delta_rule(q, k, v, log_a, beta, h, line.since)
        y = self.norm(y, z.unflatten(-1, (heads, -1))).flatten(-2)
        return self.out(y.to(x.dtype)), tail, h


def unit(x: Float[Tensor, "*x K"]) -> Float[Tensor, "*x K"]:
    """x / √(Σ x² + 1e-6): length 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def gated_delta_rule(
    q: Float[Tensor, "B T G K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T H V"],
    log_a: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    h: Float[Tensor, "B H K V"],
    since: Int[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """y_t = S_tᵀ q_t / √K by the gated delta rule, from S_0 = h; and the last S.

    since: tokens of the same document before each token; at 0 the memory starts anew.
    """
    tokens, shared = q.shape[1], v.shape[2] // q.shape[2]
    q = q * q.shape[3] ** -0.5
    if shared > 1:
        q, k = (w.repeat_interleave(shared, 2) for w in (q, k))  # (B, T, H, K)
    if tokens == 1 and since is None:
        return _step(q, k, v, log_a, beta, h)
    length = min(CHUNK, tokens)
    decays = Decays.of(log_a, since, length)
    q, k, v, beta = (to_chunks(w, length) for w in (q, k, v, beta))  # (B, C, H, L, K or V), (B, C, H, L)
    beta, enter = beta[..., None], decays.enter[..., None]

    system = beta * decays.pair * (k @ k.mT)  # unit lower triangular: what is on and above the diagonal is not read
    right = torch.cat([beta * v, beta * enter * k], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores, q, k = decays.pair * (q @ k.mT), q * enter, k * decays.leave[..., None]
    out = []
    by_chunk = (x.unbind(1) for x in (u, w, scores, q, k.mT, decays.total[..., None, None]))
    for new, against, inside, asked, keys, left in zip(*by_chunk, strict=True):
        written = new - against @ h  # (B, H, L, V)
        out.append(asked @ h + inside @ written)
        h = torch.addcmul(keys @ written, left, h)
    return from_chunks(torch.stack(out, 1), tokens), h


def _step(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """One token, by the rule as it stands."""
    k, q = k[:, 0, :, :, None], q[:, 0, :, None]  # (B, H, K, 1), (B, H, 1, K)
    h = h * log_a.exp()[:, 0, :, None, None]
    written = beta[:, 0, :, None, None] * (v[:, 0, :, None] - k.mT @ h)  # (B, H, 1, V)
    h = torch.addcmul(h, k, written)
    return (q @ h).transpose(1, 2), h
