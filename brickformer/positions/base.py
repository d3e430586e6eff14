"""The slot of positions inside attention.

Shapes: B batch, H heads, N tokens, T queries, S keys, K head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Self, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.mask import Span
from brickformer.spec import Spec


class Position(nn.Module, ABC):
    """Slot inside attention."""

    def rotate(self, x: Float[Tensor, "B H N K"], at: Span) -> Float[Tensor, "B H N K"]:
        """Queries or keys, made to know where they are."""
        return x

    def bias(self, q: Span, k: Span, device: torch.device) -> Float[Tensor, "#B H T S"] | None:
        """What to add to the scores of queries at `q` and keys at `k`; None adds nothing."""
        return None


_MADE: Final[ContextVar[dict[Hashable, Position] | None]] = ContextVar("made", default=None)


@contextmanager
def one_stack() -> Iterator[None]:
    """While the layers of one stack are built: what is `shared` among them is made once."""
    before = _MADE.set({})
    try:
        yield
    finally:
        _MADE.reset(before)


def shared(key: Hashable, make: Callable[[], Position]) -> Position:
    """The module that this stack has for `key`; outside of a stack a new one."""
    made = _MADE.get()
    if made is None:
        return make()
    if key not in made:
        made[key] = make()
    return made[key]


class Computed(nn.Module, ABC):
    """A module with a table that follows from its settings: a buffer that is not saved, since nobody has to be told it.

    So no file can give it back where it was emptied (`to_empty`), or left on the meta device by a file whose tensors
    are assigned: it is computed again whenever the module is moved or loaded.
    """

    name: str

    @abstractmethod
    def computed(self) -> Tensor:
        """The numbers of the table."""

    def hold(self, name: str) -> None:
        """Register the table as the buffer `name`."""
        self.name = name
        self.register_buffer(name, self._on_cpu(), persistent=False)
        self.register_load_state_dict_pre_hook(_filled)  # type: ignore[no-untyped-call]

    def _on_cpu(self) -> Tensor:
        with torch.device("cpu"):  # also where a model is built on the meta device
            return self.computed()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """torch's one door to every move and every change of type."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        table = self.get_buffer(self.name)
        if not table.is_meta:
            table.copy_(self._on_cpu())
        return self


def _filled(module: Computed, *args: Any) -> None:
    """Before weights are put in: a table on the meta device becomes one with numbers."""
    if module.get_buffer(module.name).is_meta:
        setattr(module, module.name, module._on_cpu().to(module.get_buffer(module.name).dtype))


class PositionSpec(Spec):
    """Slot: specs of positions inside attention."""

    __slots__ = ()

    @abstractmethod
    def build(self, heads: int, width: int, causal: bool) -> Position:
        """A module for `heads` query heads of `width`."""


@final
class NoPosition(Position):
    """Attention that sees its keys as a bag (in a causal model the mask alone gives some order)."""
