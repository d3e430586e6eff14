"""A feed-forward network in the mixer slot: it moves nothing along time by itself, but what wraps it may.

    ShortConv(Pointwise(GLU(336)))      each channel sees the last few tokens, then the network: a Canon layer of place
                                        C (arXiv 2512.17351); with kernel=2 much like RWKV's channel mixing (2305.13048)

Its layer has no other network: `Layer(ShortConv(Pointwise(GLU(336))))`. Shapes: x (B, T, D) -> (B, T, D).
"""

from __future__ import annotations

from typing import Self, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from brickformer.feedforward import FeedForward, FeedForwardSpec
from brickformer.mask import Span
from brickformer.mixers.base import Mixer, MixerSpec, expect_state
from brickformer.spec import spec
from brickformer.state import State


@spec("pointwise")
class Pointwise(MixerSpec):
    """Each vector alone through `ffn`, where a mixer is expected (arXiv 1706.03762, section 3.3)."""

    ffn: FeedForwardSpec

    def build(self, dim: int) -> Mixer:
        """The module."""
        return PointwiseMixer(self.ffn.build(dim))


@final
class NoState(State):
    """The state of a mixer that remembers nothing."""

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Nothing to keep."""

    def clone(self) -> Self:
        """It may be shared: there is nothing to change."""
        return self

    def rewind(self, to: int) -> None:
        """Nothing to forget."""

    @property
    def nbytes(self) -> int:
        """None."""
        return 0


@final
class PointwiseMixer(Mixer):
    """A feed-forward network that is called as a mixer."""

    def __init__(self, ffn: FeedForward) -> None:
        super().__init__()
        self.ffn, self.causal = ffn, True

    def forward(self, x: Float[Tensor, "B T D"], at: Span, state: State | None = None) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""
        if state is not None:
            expect_state(state, NoState, "pointwise")
        out: Tensor = self.ffn(x)
        return out

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """Nothing."""
        return NoState()
