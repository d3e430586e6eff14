"""State: what a model remembers between calls. an argument, owned by the caller, changed in place by its mixer only.

A `StackState` holds one `LayerState` a layer and the only clock in the system, `length`: the number of slots written.
Where a token is written and where it sits are told by the `Span` of the call, so padding, chunks, beams and rewinding
need no second code path.

Shapes: B batch, G key heads, S slots, K head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from brickformer.errors import StateError
from brickformer.mask import EMPTY, Span


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

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held."""


class KV(State):
    """Keys and values of every token, preallocated for `max_len` tokens.

    k, v: (B, G, S, K). pos: (B, S) absolute positions; not written while `exact`, that is while slot i holds position i
    in every row.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        max_len: int,
        width: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.max_len = max_len
        self.k = torch.zeros(batch, heads, max_len, width, device=device, dtype=dtype)
        self.v = torch.zeros(batch, heads, max_len, width, device=device, dtype=dtype)
        self.pos = torch.full((batch, max_len), EMPTY, device=device)
        self.exact = True

    def append(
        self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T K"], at: Span
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S K"], Span]:
        """Store new tokens at their slots; return all keys, all values, and where they are."""
        self._admit(k, at)
        if at.end > self.max_len:
            raise StateError(
                f"KV holds {self.max_len} tokens; asked to store token {at.end}. Raise max_len in init_state()."
            )
        self.k[:, :, at.start : at.end] = k
        self.v[:, :, at.start : at.end] = v
        self._note(at, first=0)
        return self.k[:, :, : at.end], self.v[:, :, : at.end], self._span(0, at.end)

    def rewind(self, to: int) -> None:
        """Nothing to do: slots from `to` on are overwritten before they are read."""

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these rows."""
        self.k, self.v, self.pos = self.k[rows], self.v[rows], self.pos[rows]

    def clone(self) -> Self:
        """An independent copy."""
        other = object.__new__(type(self))
        other.__dict__.update({name: x.clone() if isinstance(x, Tensor) else x for name, x in self.__dict__.items()})
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and positions."""
        return self.k.nbytes + self.v.nbytes + self.pos.nbytes

    def _admit(self, k: Tensor, at: Span) -> None:
        if len(k) != len(self.k):
            raise StateError(
                f"KV holds {len(self.k)} rows; got {len(k)}. Make the state with init_state({len(k)}, ...)."
            )
        if k.shape[1] != self.k.shape[1] or k.shape[3] != self.k.shape[3]:
            raise StateError(
                f"KV holds {self.k.shape[1]} heads of width {self.k.shape[3]}; got {k.shape[1]} of {k.shape[3]}. "
                f"The state belongs to another layer or model."
            )
        if at.doc is not None:
            raise StateError("KV cannot keep packed documents apart. Decode each document in a row of its own.")

    def _note(self, at: Span, first: int) -> None:
        """Write positions of `at` into the slots of a buffer whose slot 0 is `first`."""
        self._leave_exact(at, first)
        if not self.exact:
            self.pos[:, at.start - first : at.end - first] = at.positions(self.pos.device)

    def _leave_exact(self, at: Span, first: int) -> None:
        if at.pos is not None and self.exact:
            self.exact = False
            self.pos[:, : at.start - first] = torch.arange(first, at.start, device=self.pos.device)

    def _span(self, first: int, end: int) -> Span:
        return Span(first, end - first, None if self.exact else self.pos[:, : end - first])


@final
class RingKV(KV):
    """Keys and values of the last tokens only: a window never needs more. Same signature, same masks as KV.

    The buffer holds two windows. Tokens are written in order; when it is full the last window moves to the front. So
    what is read is always one run of neighbours and never rotated, at a cost of one copied token a token.
    """

    def __init__(
        self, batch: int, heads: int, window: int, width: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(batch, heads, 2 * window, width, device=device, dtype=dtype)
        self.window = window
        self.first = 0  # the slot kept at index 0 of the buffer

    def append(
        self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T K"], at: Span
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S K"], Span]:
        """Store new tokens; return the kept and the new keys and values, and where they are."""
        self._admit(k, at)
        if at.start < self.first:
            raise StateError(f"RingKV has let go of slots below {self.first}; asked to write slot {at.start}.")
        if at.end - self.first > self.max_len:
            self._sort(at.start - self.first)
            self._slide(max(at.start - self.window + 1, self.first), at.start)
        begin, end = at.start - self.first, at.end - self.first
        if end <= self.max_len:
            self.k[:, :, begin:end], self.v[:, :, begin:end] = k, v
            self._note(at, self.first)
            return self.k[:, :, :end], self.v[:, :, :end], self._span(self.first, at.end)
        return self._append_long(k, v, at, begin)

    def _append_long(self, k: Tensor, v: Tensor, at: Span, begin: int) -> tuple[Tensor, Tensor, Span]:
        """More new tokens than the buffer holds: read from a copy, keep the last window."""
        all_k, all_v = torch.cat([self.k[:, :, :begin], k], 2), torch.cat([self.v[:, :, :begin], v], 2)
        self._leave_exact(at, self.first)
        pos = None
        if not self.exact:
            new = at.positions(self.pos.device).expand(len(k), -1)
            all_k, all_v, pos = _padding_first(all_k, all_v, torch.cat([self.pos[:, :begin], new], 1))
            self.pos[:, : self.window] = pos[:, -self.window :]
        self.k[:, :, : self.window] = all_k[:, :, -self.window :]
        self.v[:, :, : self.window] = all_v[:, :, -self.window :]
        where = Span(self.first, at.end - self.first, pos)
        self.first = at.end - self.window
        return all_k, all_v, where

    def _sort(self, end: int) -> None:
        """Padding goes in front, so that letting go of the oldest slots never lets go of a token in the window."""
        if not self.exact:
            kept = _padding_first(self.k[:, :, :end], self.v[:, :, :end], self.pos[:, :end])
            self.k[:, :, :end], self.v[:, :, :end], self.pos[:, :end] = kept

    def _slide(self, keep_from: int, keep_to: int) -> None:
        """Move the kept slots to the front of the buffer."""
        a, b = keep_from - self.first, keep_to - self.first
        for buffer in (self.k.transpose(1, 2), self.v.transpose(1, 2), self.pos):
            buffer[:, : b - a] = buffer[:, a:b].clone()
        self.first = keep_from

    def rewind(self, to: int) -> None:
        """Errors: StateError when tokens that the window needs again have been let go."""
        if self.first > max(0, to - self.window + 1):
            raise StateError(
                f"RingKV cannot rewind to slot {to}: it needs slots from {to - self.window + 1} on and keeps those "
                f"from {self.first} on. Clone the state before going that far ahead."
            )


def _padding_first(k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slots of each row with its padding first; the order of its tokens is kept."""
    order = (pos != EMPTY).int().argsort(dim=1, stable=True)  # (B, S)
    slots = order[:, None, :, None].expand_as(k)
    return k.gather(2, slots), v.gather(2, slots), pos.gather(1, order)


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
        """Bytes held by all layers."""
        return sum(part.nbytes for part in self._parts())

    def _parts(self) -> list[State]:
        return [part for layer in self.layers for part in layer.parts()]
