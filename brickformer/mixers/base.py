"""The slot "move information along time": every mixer sees tokens, where they sit, and perhaps a state.

Shapes: x (B, T, D) -> (B, T, D). A decode step is the same call as a training step, with one token and a state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.errors import SpecError, StateError
from brickformer.mask import Mask, Span
from brickformer.spec import Spec
from brickformer.state import KV, State


class Mixer(nn.Module, ABC):
    """Slot: attention, latent attention, delta rule, Mamba, LSTM.

    causal: no output depends on a later input. Only causal mixers can keep a state.
    gives, takes: the (G, K) of the values that it has for later layers, and of those it wants from the first one.
    """

    causal: bool
    gives: tuple[int, int] | None = None
    takes: tuple[int, int] | None = None

    @abstractmethod
    def forward(self, x: Float[Tensor, "B T D"], at: Span, state: State | None = None) -> Float[Tensor, "B T D"]:
        """(B, T, D) tokens at `at` -> (B, T, D). With a state: they follow what it has seen, and it learns them."""

    @abstractmethod
    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """An empty state for `batch` rows of at most `max_len` tokens. Errors: StateError when not causal."""

    def values(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B G T K"] | None:
        """The values of (B, T, D) tokens, of size `gives`, for later layers; None where it has none."""
        return None


class MixerSpec(Spec):
    """Slot: specs of mixers."""

    __slots__ = ()

    @abstractmethod
    def build(self, dim: int) -> Mixer:
        """A module for vectors of width `dim`."""


AnyState = TypeVar("AnyState", bound=State)


def expect_state(state: State, kind: type[AnyState], brick: str) -> AnyState:
    """The state as its own type. Errors: StateError when it belongs to another brick."""
    if not isinstance(state, kind):
        raise StateError(
            f"{brick}: got a {type(state).__name__}, expected a {kind.__name__}. "
            "Make the state with this model's init_state()."
        )
    return state


def expect_cache(state: State, mask: Mask, brick: str) -> KV:
    """The cache of an attention with this mask. Errors: StateError when it is another brick's, or lets go too soon."""
    kept = expect_state(state, KV, brick)
    kept.serve(mask)
    return kept


def wants_values(mixers: Sequence[Mixer]) -> bool:
    """Whether any mixer takes values of the first one. Errors: SpecError where that has none of this size."""
    gives = mixers[0].gives
    for i, mixer in enumerate(mixers):
        if mixer.takes not in (None, gives):
            heads, width = mixer.takes or (0, 0)
            first = "gives no values" if gives is None else f"gives {gives[0]} heads of width {gives[1]}"
            raise SpecError(
                f"layers.{i}.mixer: takes values of {heads} heads of width {width}; the first layer {first}. Give the "
                "first layer such an attention, or leave value_residual out."
            )
    return any(mixer.takes is not None for mixer in mixers)
