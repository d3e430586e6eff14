"""The slot of state: memory of one mixer, an argument of its forward, changed in place by that mixer only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from jaxtyping import Int
from torch import Tensor


class State(ABC):
    """Memory of one mixer."""

    @abstractmethod
    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these rows of the batch, in this order (beams follow their parents; finished rows leave)."""

    @abstractmethod
    def clone(self) -> Self:
        """An independent copy."""

    @abstractmethod
    def rewind(self, to: int) -> None:
        """Forget every slot from `to` on. Errors: StateError where the brick cannot (a recurrent state)."""

    def in_int8(self) -> State:
        """An empty state of the same kind that keeps a vector for each token as int8; itself where it keeps none."""
        return self

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held."""
