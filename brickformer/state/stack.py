"""The state of a whole decoder: one `LayerState` a layer, and the only clock in the system.

Where a token is written and where it sits are told by the `Span` of the call, so padding, chunks, beams and rewinding
need no second code path.

Shapes: B batch, G key heads, S source tokens, K head width, R rows kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, final, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from brickformer.errors import StateError
from brickformer.mask import EMPTY, Span
from brickformer.state.base import State

CacheType = Literal["float", "int8"]
"""How caches keep a token's vectors: in the model's type, or as int8 (see int8.py)."""


def check_cache(cache: CacheType) -> None:
    """Errors: StateError for a type that is not known."""
    if cache not in get_args(CacheType):
        known = " or ".join(map(repr, get_args(CacheType)))
        raise StateError(f"cache: got {cache!r}, expected {known}.")


@final
class CrossKV(State):
    """Keys and values of the encoder's memory, projected once: at the first call that brings the memory.

    k, v: (B, G, S, K); at: where the memory's tokens are.
    """

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.at: Span | None = None

    def put(self, k: Float[Tensor, "B G S K"], v: Float[Tensor, "B G S K"], at: Span) -> None:
        """Keep the projected memory."""
        self.k, self.v, self.at = k, v, at

    def get(self, batch: int) -> tuple[Tensor, Tensor, Span] | None:
        """What is kept, or None before the first call. Errors: StateError when the batch is another."""
        if self.k is None or self.v is None or self.at is None:
            return None
        if len(self.k) != batch:
            raise StateError(
                f"CrossKV holds the memory of {len(self.k)} rows; asked for {batch}. Select its rows first."
            )
        return self.k, self.v, self.at

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these rows."""
        if self.k is not None and self.v is not None and self.at is not None:
            self.k, self.v, self.at = self.k[rows], self.v[rows], self.at.select(rows)

    def clone(self) -> CrossKV:
        """A copy that shares the memory's keys and values: nothing ever writes into them."""
        other = CrossKV()
        other.k, other.v, other.at = self.k, self.v, self.at
        return other

    def rewind(self, to: int) -> None:
        """Nothing to do: the memory does not grow."""

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return 0 if self.k is None or self.v is None else self.k.nbytes + self.v.nbytes


@dataclass
class LayerState:
    """Memory of one layer: its mixer's, and its cross-attention's when it has one."""

    mixer: State
    cross: CrossKV | None = None

    def parts(self) -> list[State]:
        """The states inside."""
        return [self.mixer] if self.cross is None else [self.mixer, self.cross]


@dataclass
class StackState:
    """Memory of a stack. length: slots written so far, the only clock. padding: (B, 1) padding met so far, per row."""

    layers: list[LayerState]
    length: int = 0
    padding: Int[Tensor, "B 1"] | None = None

    def next(self, tokens: int) -> Span:
        """Where the next tokens sit: after everything written, each row going on from its own last position."""
        if self.padding is None:
            return Span(self.length, tokens)
        slots = torch.arange(self.length, self.length + tokens, device=self.padding.device)
        return Span(self.length, tokens, slots - self.padding)

    def check_next(self, at: Span) -> None:
        """Errors: StateError when the tokens at `at` do not follow on: a hole or an overwrite would go unnoticed."""
        if at.start != self.length:
            raise StateError(
                f"The state has {self.length} slots written; the call starts at slot {at.start}. "
                f"Use at=state.next(n), or state.rewind({at.start}) first."
            )
        if at.pos is None and self.padding is not None:
            raise StateError(
                "The state holds padded rows; the call claims there is no padding. Use at=state.next(n), which goes on "
                "from each row's own last position."
            )

    def advance(self, at: Span) -> None:
        """Note that the tokens at `at` have been written."""
        self.length = at.end
        if at.pos is not None:
            newest = at.pos.masked_fill(at.pos == EMPTY, -1).amax(1, keepdim=True)
            before = self.padding if self.padding is not None else torch.zeros_like(newest)
            self.padding = torch.where(newest < 0, before + at.length, at.end - 1 - newest)

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these rows of the batch, in this order, in every layer."""
        for part in self._parts():
            part.select(rows)
        self.padding = None if self.padding is None else self.padding[rows]

    def clone(self) -> StackState:
        """An independent copy."""
        layers = [LayerState(s.mixer.clone(), None if s.cross is None else s.cross.clone()) for s in self.layers]
        return replace(self, layers=layers)

    def rewind(self, to: int) -> None:
        """Forget every slot from `to` on (speculation that was refused). Padding must not lie behind `to`."""
        if not 0 <= to <= self.length:
            raise StateError(f"rewind({to}): the state has {self.length} slots; give a slot from 0 to {self.length}.")
        for part in self._parts():
            part.rewind(to)
        self.length = to
        if to == 0:
            self.padding = None

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers, and by what is known of padding: that of a memory is shared by the layers."""
        sources = [layer.cross.at for layer in self.layers if layer.cross is not None]
        known = (self.padding, *(at.pos for at in sources if at is not None))
        shared = {id(x): x.nbytes for x in known if x is not None}
        return sum(part.nbytes for part in self._parts()) + sum(shared.values())

    def _parts(self) -> list[State]:
        return [part for layer in self.layers for part in layer.parts()]
