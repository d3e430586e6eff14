"""Mamba: a linear recurrence whose decay and input depend on the token, the selective scan S6 (arXiv 2312.00752).

    x, z = u W_in;   x = silu(conv(x));   r, B, C = x W_x [, a norm of each];   Δ = softplus(r W_Δ + b_Δ)
    h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t x_t        A = -exp(A_log), one decay for each channel and each state
    y_t = C_t · h_t + D x_t                        out = (y · silu(z)) W_out

The scan of a run of tokens: it is cut into K chunks of about √T tokens. All chunks walk their tokens together, first
from an empty state; then their ends are joined one after another; then they walk again, each from its true start. That
is about 3√T steps, and only decays ≤ 1 are multiplied: nothing overflows. The backward pass computes the states again
from the starts of the chunks, which are all that is kept.
Shapes: B batch, T tokens, D model width, I inner channels, N states a channel, R rank of Δ; L steps of K chunks.
"""

from __future__ import annotations

import math
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from brickformer.linear import BranchOut, FusedLinear
from brickformer.mixers import kernels
from brickformer.mixers.base import Mixer, MixerSpec
from brickformer.mixers.line import Line
from brickformer.mixers.recurrent import LinearRecurrence, LinearState, convolve, short_conv, step_biases, wide
from brickformer.norms import NormSpec
from brickformer.ranges import check_width
from brickformer.spec import spec

SHORT: Final = 8
"""Runs of at most so many tokens are walked without cutting them into chunks."""


@spec("mamba")
class Mamba(MixerSpec):
    """Selective state space (arXiv 2312.00752).

    state: N, states of a channel. inner: I, channels inside, default 2·dim. conv: tokens the short convolution sees.
    rank: R, width of the step size's bottleneck, default dim/16. bias: on the projections in and out; conv_bias: on the
    convolution. inner_norm: of r, of B and of C, each its own, which keeps large models steady (Jamba,
    arXiv 2403.19887, 6.4).
    """

    state: int = 16
    inner: int | None = None
    conv: int = 4
    rank: int | None = None
    bias: bool = False
    conv_bias: bool = True
    inner_norm: NormSpec | None = None

    def check(self) -> None:
        """Widths are at least 1."""
        check_width(self, "state", self.state)
        check_width(self, "conv", self.conv)
        for name, width in (("inner", self.inner), ("rank", self.rank)):
            if width is not None:
                check_width(self, name, width)

    def build(self, dim: int) -> Mixer:
        """The module."""
        inner, rank = self.inner or 2 * dim, self.rank or math.ceil(dim / 16)
        norm = self.inner_norm
        return MambaMixer(
            FusedLinear(dim, (inner, inner), bias=self.bias),
            short_conv(inner, self.conv, bias=self.conv_bias),
            FusedLinear(inner, (rank, self.state, self.state), bias=False),
            StepSize(rank, inner),
            BranchOut(inner, dim, bias=self.bias),
            *(norm.build(width) if norm else nn.Identity() for width in (rank, self.state, self.state)),
        )


@final
class StepSize(nn.Module):
    """Δ = softplus(r Wᵀ + b). No `nn.Linear`, because its bias must start as the inverse softplus of a step size."""

    def __init__(self, rank: int, inner: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inner, rank).uniform_(-(rank**-0.5), rank**-0.5))
        self.bias = nn.Parameter(step_biases(inner))

    def forward(self, r: Float[Tensor, "B T R"]) -> Float[Tensor, "B T I"]:
        """(B, T, R) -> (B, T, I), in float32 or wider."""
        return F.softplus(F.linear(r, self.weight).to(wide(r)) + self.bias.to(wide(r)))


@final
class MambaState(LinearState):
    """h: (B, N, I)."""

    brick = "mamba"


@final
class MambaMixer(LinearRecurrence):
    """Convolution, selective scan, gate."""

    memory, kernel, kernel_types = MambaState, kernels.mamba_kernel, kernels.SINGLE

    def __init__(
        self,
        into: FusedLinear,
        conv: nn.Conv1d,
        select: FusedLinear,
        step: StepSize,
        out: BranchOut,
        step_norm: nn.Module,
        b_norm: nn.Module,
        c_norm: nn.Module,
    ) -> None:
        super().__init__()
        inner, states = into.parts[0], select.parts[1]
        self.into, self.conv, self.select, self.step, self.out = into, conv, select, step, out
        self.step_norm, self.b_norm, self.c_norm = step_norm, b_norm, c_norm
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1.0).log().expand(inner, states).clone())
        self.D = nn.Parameter(torch.ones(inner))
        self.tail_size, self.h_size = (conv.kernel_size[0] - 1, inner), (states, inner)
        self.numbers = states * inner

    def selected(
        self, x: Float[Tensor, "B T I"]
    ) -> tuple[Float[Tensor, "B T I"], Float[Tensor, "B T N"], Float[Tensor, "B T N"]]:
        """What the tokens choose: Δ (in float32 or wider), B, C."""
        r, b, c = self.select(x).split(self.select.parts, -1)
        return self.step(self.step_norm(r)), self.b_norm(b), self.c_norm(c)

    def block(self, x: Tensor, line: Line, tail: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """One run of tokens."""
        x, z = self.into(x).chunk(2, -1)  # (B, T, I)
        x, tail = convolve(x, self.conv, line, tail)
        dt, b, c = self.selected(x)
        dt = line.quiet(dt)
        x, b, c, skip, a_log = (v.to(dt.dtype) for v in (x, b, c, self.D, self.A_log))
        a, begins = -a_log.exp().t(), None if line.since is None else line.since == 0
        if h is None:
            y = kernels.selective_scan(dt, x, a, b, c)
        else:
            y, h = selective_scan(dt, x, a, b, c, h, begins)
        y = torch.addcmul(y, skip, x).to(z.dtype)
        return self.out(y * F.silu(z)), tail, h


# ---- the scan -------------------------------------------------------------------------------------------------------


def selective_scan(
    dt: Float[Tensor, "B T I"],
    x: Float[Tensor, "B T I"],
    a: Float[Tensor, "N I"],
    b: Float[Tensor, "B T N"],
    c: Float[Tensor, "B T N"],
    h: Float[Tensor, "B N I"],
    begins: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T I"], Float[Tensor, "B N I"]]:
    """y_t = c_t · h_t with h_t = exp(dt_t a) h_{t-1} + dt_t b_t x_t, and the last h.

    begins: tokens that meet an empty memory, h_{t-1} = 0. Linear in T in time and memory.
    """
    tokens = dt.shape[1]
    if tokens == 1 and begins is None:
        h = torch.addcmul((dt * a).exp() * h, b.mT, dt * x)
        return c @ h, h
    steps = tokens if tokens <= SHORT else math.ceil(math.sqrt(tokens / 2))
    keep = None if begins is None else _by_step((~begins)[..., None].to(dt.dtype), steps, fill=1.0)
    y, last = _Scan.apply(*(_by_step(v, steps) for v in (dt, dt * x, b, c)), a, h, keep)  # type: ignore[no-untyped-call]
    return y.permute(1, 2, 0, 3).flatten(1, 2)[:, :tokens], last


def _by_step(x: Tensor, steps: int, fill: float = 0.0) -> Tensor:
    """(B, T, X) -> (L, B, K, X): step j of every chunk side by side; what fills the last chunk changes no state."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % steps), value=fill)
    return x.unflatten(1, (-1, steps)).movedim(2, 0).contiguous()


def _decays(dt: Tensor, a: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """The decay of every step, (L, B, K, N, I), and of every whole chunk, (B, K, N, I)."""
    step = (dt.unsqueeze(3) * a).exp_()
    whole = (dt.sum(0).unsqueeze(2) * a).exp_()
    if keep is not None:
        step *= keep[..., None]
        whole *= keep.prod(0)[..., None]
    return step, whole


@final
class _Scan(torch.autograd.Function):
    """The scan over chunks cut by `_by_step`: dt, u (L, B, K, I); b, c (L, B, K, N); a (N, I); h (B, N, I)."""

    @staticmethod
    def forward(
        ctx: Any, dt: Tensor, u: Tensor, b: Tensor, c: Tensor, a: Tensor, h: Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        steps, batch, count, inner = dt.shape
        decay, whole = _decays(dt, a, keep)
        u, b, c_row = u.unsqueeze(3), b.unsqueeze(4), c.unsqueeze(3)  # (L, B, K, 1, I), (…, N, 1), (…, 1, N)
        start = h.unsqueeze(1)
        if count > 1:
            end = h.new_zeros(batch, count, *h.shape[1:])
            for j in range(steps):
                end.mul_(decay[j]).addcmul_(u[j], b[j])
            starts = [h]
            for k in range(count - 1):
                starts.append(torch.addcmul(end[:, k], whole[:, k], starts[-1]))
            start = torch.stack(starts, 1)  # (B, K, N, I)
        now = start.clone()
        y = torch.empty_like(dt)
        for j in range(steps):
            now.mul_(decay[j]).addcmul_(u[j], b[j])
            y[j] = (c_row[j] @ now).squeeze(2)
        ctx.save_for_backward(dt, u, b, c, a, keep, start)
        return y, now[:, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor, g_last: Tensor) -> tuple[Tensor | None, ...]:
        dt, u, b, c, a, keep, start = ctx.saved_tensors
        steps, batch, count, inner = dt.shape
        decay, whole = _decays(dt, a, keep)
        gy, c_col = gy.unsqueeze(3), c.unsqueeze(4)  # (L, B, K, 1, I), (L, B, K, N, 1)
        states = torch.empty_like(decay)  # before each step
        now = start.clone()
        for j in range(steps):
            states[j] = now
            now.mul_(decay[j]).addcmul_(u[j], b[j])
        g = now.new_zeros(now.shape)  # ∂/∂ the state after each chunk, from later chunks
        if count > 1:
            for j in reversed(range(steps)):
                g.addcmul_(gy[j], c_col[j]).mul_(decay[j])
            ends = [g_last]
            for k in reversed(range(1, count)):
                ends.append(torch.addcmul(g[:, k], whole[:, k], ends[-1]))
            g = torch.stack(ends[::-1], 1)
        else:
            g += g_last.unsqueeze(1)
        d_dt, du, db, dc, da = (
            torch.empty_like(dt),
            torch.empty_like(dt),
            torch.empty_like(c),
            torch.empty_like(c),
            0 * a,
        )
        for j in reversed(range(steps)):
            after = torch.addcmul(u[j] * b[j], decay[j], states[j])
            dc[j] = (after @ gy[j].mT).squeeze(-1)
            g.addcmul_(gy[j], c_col[j])
            du[j] = (b[j].mT @ g).squeeze(2)
            db[j] = (g @ u[j].mT).squeeze(-1)
            g.mul_(decay[j])
            from_decay = states[j].mul_(g)
            d_dt[j] = (from_decay * a).sum(2)
            da += (from_decay * dt[j].unsqueeze(2)).sum((0, 1))
        return d_dt, du, db, dc, da, g[:, 0], None
