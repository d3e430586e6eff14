"""Bricks of somebody's own, each with one fault that a person could have made; and one that is good.

The good one is a gated moving average: h_t = a h_{t-1} + (1 - a) v_t, out = (h · σ(gate)) W. Shapes: x (B, T, D).
"""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor, nn

from brickformer.feedforward import MLP, FeedForward, FeedForwardSpec
from brickformer.linear import BranchOut
from brickformer.mask import Mask, Span
from brickformer.mixers.attention import Attention
from brickformer.mixers.base import Mixer, MixerSpec, expect_state
from brickformer.mixers.recurrent import RecurrentState
from brickformer.norms import NormSpec
from brickformer.spec import spec
from brickformer.state import State

Fault = Literal[
    "none",
    "sees the future",
    "sees one token ahead",
    "forgets its cache",
    "rows of its state stay",
    "its copy is no copy",
    "mixes the batch",
    "ignores padding",
    "random in eval",
    "counts calls",
    "dead parameter",
    "detached",
    "unregistered tensor",
    "overflows",
    "answers in float32",
    "crashes",
]


@spec("faulty")
class Faulty(MixerSpec):
    """A gated moving average with a fault."""

    fault: Fault = "none"

    def build(self, dim: int) -> Mixer:
        """The module."""
        return FaultyMixer(dim, self.fault)


class Average(RecurrentState):
    """h: (B, D)."""

    brick = "faulty"

    def __init__(self, h: Tensor) -> None:
        super().__init__()
        self.h = h


class StubbornAverage(Average):
    """Its rows stay where they are."""

    def select(self, rows: Tensor) -> None:  # type: ignore[misc]
        """Cut to as many rows, in no order."""
        self.h = self.h[torch.arange(len(rows)) % len(self.h)]


class SharedAverage(Average):
    """A copy is the same thing."""

    def clone(self) -> SharedAverage:  # type: ignore[misc]
        """No copy."""
        return self


@final
class FaultyMixer(Mixer):
    """See the top."""

    causal = True

    def __init__(self, dim: int, fault: Fault) -> None:
        super().__init__()
        self.fault, self.calls = fault, 0
        self.into, self.out = nn.Linear(dim, 2 * dim), BranchOut(dim, dim)
        self.decay = nn.Parameter(torch.linspace(-1.0, 3.0, dim))
        self.dead = nn.Parameter(torch.ones(dim)) if fault == "dead parameter" else None
        self.table = torch.randn(dim) if fault == "unregistered tensor" else torch.ones(())

    def forward(self, x: Tensor, at: Span, state: State | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        if self.fault == "crashes":
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        if self.fault == "mixes the batch":
            x = x - x.mean(0, keepdim=True)
        v, gate = self.into(x).chunk(2, -1)
        keep = torch.sigmoid(self.decay.detach() if self.fault == "detached" else self.decay)
        h = x.new_zeros(len(x), x.shape[2])
        if state is not None:
            kept = expect_state(state, Average, "faulty")
            kept.admit(len(x), at, h=tuple(h.shape[1:]))
            h = kept.h.to(x.dtype)
        real, out = None if self.fault == "ignores padding" else at.real(), []
        for t in range(x.shape[1]):
            new = keep * h + (1.0 - keep) * v[:, t]
            h = new if real is None else torch.where(real[:, t, None], new, h)
            out.append(h)
        if state is not None and self.fault != "forgets its cache":
            kept.h = h
        y = torch.stack(out, 1) * gate.sigmoid()
        return self.out(self._spoilt(y, v) * self.table.to(y.dtype))

    def _spoilt(self, y: Tensor, v: Tensor) -> Tensor:
        match self.fault:
            case "sees the future":
                return y + 0.001 * v.mean(1, keepdim=True)
            case "sees one token ahead":
                return y + 1e-4 * torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], 1)
            case "random in eval":
                return nn.functional.dropout(y, 0.1, training=True)
            case "counts calls":
                self.calls += 1
                return y * (1.0 + 1e-6 * self.calls)
            case "dead parameter":
                return y + 0.0 * self.dead  # type: ignore[operator]
            case "overflows":
                return y * (v * 1e25).square() / (1e-9 + (v * 1e25).square())
            case "answers in float32":
                return y.float() if y.dtype is torch.bfloat16 else y
            case _:
                return y

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """h of zeros."""
        kinds = {"rows of its state stay": StubbornAverage, "its copy is no copy": SharedAverage}
        h = torch.zeros(batch, len(self.decay), device=device, dtype=dtype)
        return kinds.get(self.fault, Average)(h)


@spec("wide_window")
class WideWindow(MixerSpec):
    """Attention whose window is off by so many tokens."""

    mask: Mask
    off: int = 1

    def build(self, dim: int) -> Mixer:
        """The module."""
        assert self.mask.window is not None
        return Attention(2, mask=Mask(self.mask.causal, self.mask.window + self.off)).build(dim)


@spec("loud")
class Loud(NormSpec):
    """A norm that starts with a gain of 40: its model has strong opinions before it has seen anything."""

    def build(self, dim: int) -> nn.Module:
        """The module."""
        norm = nn.LayerNorm(dim)
        return LoudNorm(norm)


@final
class LoudNorm(nn.Module):
    """40 · LayerNorm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> the same."""
        return 40.0 * self.norm(x)


@spec("averaging")
class Averaging(FeedForwardSpec):
    """A feed-forward that is not of each vector alone: it looks at all tokens."""

    hidden: int = 64

    def build(self, dim: int) -> FeedForward:
        """The module."""
        return AveragingFeedForward(MLP(self.hidden).build(dim))


@final
class AveragingFeedForward(FeedForward):
    """f(x + mean of the tokens)."""

    def __init__(self, inner: FeedForward) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.inner(x + 0.1 * x.mean(1, keepdim=True))
