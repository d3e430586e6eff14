"""A short convolution in front of any mixer: each channel also sees the last few tokens (arXiv 2512.17351).

    x'_t = Σ_j w_j · x_{t-j},   j = 0 ... kernel-1,   one weight a channel and a distance;   y = mixer(x')

It starts as the identity: w_0 = 1, the rest 0. With it a layer need not spend attention heads on "the token before me",
which is what small models learn first. Mamba and the delta rule have such a convolution inside; this brick gives it to
the others. Distances are in positions, not slots, so padding between tokens changes nothing.
Shapes: x (B, T, D) -> (B, T, D); S tokens kept.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from brickformer.mask import EMPTY, Span
from brickformer.mixers.base import Mixer, MixerSpec, expect_state
from brickformer.spec import spec
from brickformer.state import RingKV, State

KEPT = 32
"""Inputs kept, at least: enough to go back as far as speculation does."""


@spec("shortconv")
class ShortConv(MixerSpec):
    """A causal convolution over the last `kernel` tokens, then `mixer`: a Canon layer of place A (arXiv 2512.17351)."""

    mixer: MixerSpec
    kernel: int = 4

    def check(self) -> None:
        """A kernel of 1 would only scale channels."""
        if self.kernel < 2:
            raise self.refuse("kernel", "at least 2: the token itself and the one before")

    def build(self, dim: int) -> Mixer:
        """The module."""
        return ShortConvMixer(self.mixer.build(dim), dim, self.kernel)


@final
class ShortConvState(State):
    """The last inputs, and the state of the mixer behind."""

    def __init__(self, inputs: RingKV, mixer: State) -> None:
        self.inputs, self.mixer = inputs, mixer

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these rows."""
        self.inputs.select(rows)
        self.mixer.select(rows)

    def clone(self) -> ShortConvState:
        """An independent copy."""
        return ShortConvState(self.inputs.clone(), self.mixer.clone())

    def rewind(self, to: int) -> None:
        """As far as both parts can."""
        self.inputs.rewind(to)
        self.mixer.rewind(to)

    def in_int8(self) -> ShortConvState:
        """The mixer's part; the few inputs stay as they are."""
        return ShortConvState(self.inputs, self.mixer.in_int8())

    @property
    def nbytes(self) -> int:
        """Bytes of both parts."""
        return self.inputs.nbytes + self.mixer.nbytes


@final
class ShortConvMixer(Mixer):
    """Convolution, then mixer."""

    def __init__(self, mixer: Mixer, dim: int, kernel: int) -> None:
        super().__init__()
        self.mixer, self.causal, self.takes = mixer, mixer.causal, mixer.takes
        self.weight = nn.Parameter(torch.eye(kernel)[:1].T.expand(kernel, dim).clone())  # (kernel, D): 1 at distance 0

    def forward(self, x: Float[Tensor, "B T D"], at: Span, state: State | None = None) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""
        if state is None:
            return self.mixer(self._convolve(x, at, x, at), at)
        own = expect_state(state, ShortConvState, "shortconv")
        kept, _, kept_at = own.inputs.append(x[:, None], x[:, None, :, :0], at)  # (B, 1, S, D)
        return self.mixer(self._convolve(x, at, kept[:, 0], kept_at), at, own.mixer)

    def _convolve(self, x: Tensor, at: Span, kept: Tensor, kept_at: Span) -> Float[Tensor, "B T D"]:
        """x at `at`, whose forerunners are among `kept` at `kept_at`."""
        plain = kept is x and at.pos is None and at.doc is None and x.dtype is self.weight.dtype
        if plain and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
            return _Convolution.apply(x, self.weight)  # type: ignore[no-untyped-call]
        y = x * self.weight[0]
        if kept_at.pos is None and at.pos is None and at.doc is None:  # neighbours in time are neighbours in memory
            for distance, weight in enumerate(self.weight[1:], 1):
                first = at.start - kept_at.start - distance
                shifted = kept[:, max(first, 0) : max(first + at.length, 0)]
                y = y + F.pad(shifted, (0, 0, at.length - shifted.shape[1], 0)) * weight
            return y
        q, k = at.positions(x.device)[:, :, None], kept_at.positions(x.device)[:, None, :]
        for distance, weight in enumerate(self.weight[1:], 1):
            forerunner = (k == q - distance) & (q != EMPTY)  # (B or 1, T, S), at most one in a row
            if at.doc is not None and kept_at.doc is not None:
                forerunner = forerunner & (at.doc[:, :, None] == kept_at.doc[:, None, :])
            y = y + (forerunner.to(x.dtype) @ kept) * weight
        return y

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """The last inputs and the mixer's own state."""
        window, dim = max(len(self.weight), KEPT), self.weight.shape[1]
        inputs = RingKV(batch, 1, window, dim, v_width=0, device=device, dtype=dtype)
        return ShortConvState(inputs, self.mixer.init_state(batch, max_len, device=device, dtype=dtype))


class _Convolution(torch.autograd.Function):
    """y_t = Σ_j w_j x_{t-j} of a whole sequence;  ∂x_t = Σ_j w_j ∂y_{t+j};  ∂w_j = Σ_t ∂y_t x_{t-j}. Added in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """(B, T, D), (kernel, D) -> (B, T, D)."""
        ctx.save_for_backward(x, weight)
        y = x * weight[0]
        for j, w in enumerate(weight[1 : x.shape[1]], 1):
            y[:, j:].addcmul_(x[:, :-j], w)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and weight."""
        x, weight = ctx.saved_tensors
        dx, dw = dy * weight[0], torch.zeros_like(weight)
        dw[0] = (dy * x).flatten(0, 1).sum(0)
        for j, w in enumerate(weight[1 : x.shape[1]], 1):
            dx[:, :-j].addcmul_(dy[:, j:], w)
            dw[j] = (dy[:, j:] * x[:, :-j]).flatten(0, 1).sum(0)
        return dx, dw
