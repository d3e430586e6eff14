"""The slot "move information along time": every mixer sees tokens, where they sit, and perhaps a state.

Shapes: x (B, T, D) -> (B, T, D). A decode step is the same call as a training step, with one token and a state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.errors import StateError
from brickformer.mask import Span
from brickformer.spec import Spec
from brickformer.state import State


class Mixer(nn.Module, ABC):
    """Slot: attention, latent attention, delta rule, Mamba, LSTM.

    causal: no output depends on a later input. Only causal mixers can keep a state.
    """

    causal: bool

    @abstractmethod
    def forward(self, x: Float[Tensor, "B T D"], at: Span, state: State | None = None) -> Float[Tensor, "B T D"]:
        """(B, T, D) tokens at `at` -> (B, T, D). With a state: they follow what it has seen, and it learns them."""

    @abstractmethod
    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """An empty state for `batch` rows of at most `max_len` tokens. Errors: StateError when not causal."""


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
