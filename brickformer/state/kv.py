"""Caches of attention: keys and values of earlier tokens, so that each is computed once.

    KV       every token, preallocated
    RingKV   the last tokens only, for masks with a window

Either may keep its vectors as int8 (`in_int8`, see int8.py): about a quarter of the bytes of float32.

`append` stores new tokens at the slots their `Span` names, and returns all keys, all values and where they are: padding
and unused slots are keys without a position, so the mask alone decides what is seen.

Shapes: B batch, G key heads, T new tokens, S slots, K head width, V width of a value.
"""

from __future__ import annotations

from typing import Self, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from brickformer.errors import StateError
from brickformer.mask import EMPTY, Mask, Span
from brickformer.state.base import State
from brickformer.state.int8 import expand, packed_width, shrink


class KV(State):
    """Keys and values of every token, preallocated for `max_len` tokens.

    k, v: (B, G, S, K), or packed int8. pos: (B, S) absolute positions; not written while `exact`, that is while slot i
    holds position i in every row. width, v_width: of a key, and of a value where that is another. written: slots of
    the buffers that hold a token; what is after them is never read, copied or saved.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        max_len: int,
        width: int,
        *,
        v_width: int | None = None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.max_len = max_len
        self.width, self.v_width = width, width if v_width is None else v_width
        kept, v_kept = self.width, self.v_width
        if dtype is torch.int8:
            kept, v_kept = packed_width(kept), packed_width(v_kept)
        self.k = torch.zeros(batch, heads, max_len, kept, device=device, dtype=dtype)
        self.v = torch.zeros(batch, heads, max_len, v_kept, device=device, dtype=dtype)
        self.pos = torch.full((batch, max_len), EMPTY, device=device)
        self.exact = True
        self.written = 0

    def append(
        self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T V"], at: Span
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S V"], Span]:
        """Store new tokens at their slots; return all keys, all values, and where they are."""
        self._admit(k, at)
        if at.end > self.max_len:
            raise StateError(
                f"KV holds {self.max_len} tokens; asked to store token {at.end}. Raise max_len in init_state()."
            )
        self.k[:, :, at.start : at.end] = self._pack(k)
        self.v[:, :, at.start : at.end] = self._pack(v)
        self._note(at, first=0)
        self.written = at.end
        return *self._unpack(self.k[:, :, : at.end], self.v[:, :, : at.end], k.dtype), self._span(0, at.end)

    def serve(self, mask: Mask) -> None:
        """Errors: StateError when a query of this mask sees tokens that are not kept."""

    def rewind(self, to: int) -> None:
        """Nothing to do: slots from `to` on are overwritten before they are read."""

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these rows."""
        self.k, self.v = _rows(self.k, rows, self.written), _rows(self.v, rows, self.written)
        self.pos = self.pos[rows]

    def clone(self) -> Self:
        """An independent copy."""
        other = object.__new__(type(self))
        other.__dict__.update({name: x.clone() if isinstance(x, Tensor) else x for name, x in self.__dict__.items()})
        return other

    def in_int8(self) -> KV:
        """An empty one of the same size with its vectors as int8."""
        batch, heads, slots, _ = self.k.shape
        return KV(batch, heads, slots, self.width, v_width=self.v_width, device=self.k.device, dtype=torch.int8)

    def _pack(self, x: Tensor) -> Tensor:
        """Vectors as they are kept."""
        return shrink(x) if self.k.dtype is torch.int8 else x

    def _unpack(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values as they are read."""
        if self.k.dtype is torch.int8:
            return expand(k, self.width, dtype), expand(v, self.v_width, dtype)
        return k, v

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and positions."""
        return self.k.nbytes + self.v.nbytes + self.pos.nbytes

    def _admit(self, k: Tensor, at: Span) -> None:
        if len(k) != len(self.k):
            raise StateError(
                f"KV holds {len(self.k)} rows; got {len(k)}. Make the state with init_state({len(k)}, ...)."
            )
        if k.shape[1] != self.k.shape[1] or k.shape[3] != self.width:
            raise StateError(
                f"KV holds {self.k.shape[1]} heads of width {self.width}; got {k.shape[1]} of {k.shape[3]}. "
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
        self,
        batch: int,
        heads: int,
        window: int,
        width: int,
        *,
        v_width: int | None = None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(batch, heads, 2 * window, width, v_width=v_width, device=device, dtype=dtype)
        self.window = window
        self.first = 0  # the slot kept at index 0 of the buffer

    def append(
        self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T V"], at: Span
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S V"], Span]:
        """Store new tokens; return the kept and the new keys and values, and where they are."""
        self._admit(k, at)
        if at.start < self.first:
            raise StateError(f"RingKV has let go of slots below {self.first}; asked to write slot {at.start}.")
        if at.end - self.first > self.max_len:
            self._sort(at.start - self.first)
            self._slide(max(at.start - self.window + 1, self.first), at.start)
        begin, end = at.start - self.first, at.end - self.first
        kept_k, kept_v = self._pack(k), self._pack(v)
        if end <= self.max_len:
            self.k[:, :, begin:end], self.v[:, :, begin:end] = kept_k, kept_v
            self._note(at, self.first)
            self.written = end
            all_k, all_v, where = self.k[:, :, :end], self.v[:, :, :end], self._span(self.first, at.end)
        else:
            all_k, all_v, where = self._append_long(kept_k, kept_v, at, begin)
        return *self._unpack(all_k, all_v, k.dtype), where

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
        self.written = self.window
        return all_k, all_v, where

    def serve(self, mask: Mask) -> None:
        """Errors: StateError when the mask looks further back than the ring."""
        if mask.window is None or mask.window > self.window:
            sees = "every token" if mask.window is None else f"a window of {mask.window}"
            raise StateError(
                f"RingKV keeps the last {self.window} tokens; the mask sees {sees}. The state belongs to another layer "
                "or model: make it with this model's init_state()."
            )

    def in_int8(self) -> RingKV:
        """An empty one of the same size with its vectors as int8."""
        batch, heads, _, _ = self.k.shape
        return RingKV(
            batch, heads, self.window, self.width, v_width=self.v_width, device=self.k.device, dtype=torch.int8
        )

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


def _rows(x: Tensor, rows: Tensor, written: int) -> Tensor:
    """Rows of a buffer, of which only the written slots are copied."""
    if x.requires_grad:
        return x[rows]
    out = x.new_empty(len(rows), *x.shape[1:])
    out[:, :, :written] = x[:, :, :written].index_select(0, rows)
    return out


def _padding_first(k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slots of each row with its padding first; the order of its tokens is kept."""
    order = (pos != EMPTY).int().argsort(dim=1, stable=True)  # (B, S)
    slots = order[:, None, :, None]
    return k.gather(2, slots.expand_as(k)), v.gather(2, slots.expand_as(v)), pos.gather(1, order)


def kv_for(
    mask: Mask,
    batch: int,
    heads: int,
    max_len: int,
    width: int,
    *,
    v_width: int | None = None,
    device: torch.device,
    dtype: torch.dtype,
) -> KV:
    """The smallest cache that serves the mask: a ring of the last tokens where it has a window, else every token."""
    if mask.window is not None and 2 * mask.window < max_len:
        return RingKV(batch, heads, mask.window, width, v_width=v_width, device=device, dtype=dtype)
    return KV(batch, heads, max_len, width, v_width=v_width, device=device, dtype=dtype)
