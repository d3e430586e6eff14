"""Masks: who may look at whom, said once, in positions.

    allowed(q, k) = k is a token  ∧  (k ≤ q if causal)  ∧  (|q - k| < window if there is one)

q and k are absolute positions, never indices of a tensor. A key without a position (`EMPTY`) is no token: padding, an
unused slot of a cache, a hole in a ring buffer. So causal, windowed, padded, cached, chunked and left-padded attention
are one predicate. Every kernel is told the same thing in its own words by `lower`, and every lowering is tested against
`Mask.allowed`.

Shapes: B batch, T query tokens, S key tokens, N tokens of a span, G key heads, K head width. Boolean masks are True
where a key may be seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Self, no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from brickformer.errors import StateError
from brickformer.spec import Spec, spec

EMPTY: Final = torch.iinfo(torch.int32).max
"""The position of a slot that holds no token: padding, unused cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Where a run of tokens sits.

    start: the slot of the first token (in a cache: the slot it is written to). length: number of tokens.
    pos: (B, N) absolute positions, EMPTY at padding; None is a promise: start, start+1, ... in every row, no padding.
    doc: (B, N) document of each token; packed documents never see each other; None is one document.
    place: (B or 1, N) what position bricks read instead of pos (`Randomized`); masks and caches never do.
    segment: (B, N) which of several texts a token is of (`Embed.segments`); None is the first; only embeddings read it.
    values: (B, G, N, K) what the first layer gives of each token, for mixers of later layers to mix into their own
    values (`Attention.value_residual`); a column that a stack adds for its layers.
    A real token's position is never above its slot: padding only lowers positions.
    """

    start: int
    length: int
    pos: Int[Tensor, "B N"] | None = None
    doc: Int[Tensor, "B N"] | None = None
    place: Int[Tensor, "#B N"] | None = None
    values: Float[Tensor, "B G N K"] | None = None
    segment: Int[Tensor, "B N"] | None = None

    @classmethod
    def of(
        cls,
        ids: Tensor,
        *,
        start: int = 0,
        valid: Bool[Tensor, "B N"] | None = None,
        doc: Int[Tensor, "B N"] | None = None,
    ) -> Self:
        """The span of ids (B, N, ...). valid: True at real tokens; padding may be on either side, or in the middle.

        Real tokens are numbered start, start+1, ... in each row; with `doc` each document starts again at `start`.
        """
        pos = None
        if valid is not None:
            _same_shape("valid", valid, ids)
            if valid.dtype is not torch.bool:
                raise StateError(f"Span.of(): valid is {valid.dtype}, expected torch.bool. Use valid.bool().")
            before = valid.cumsum(-1) - valid.long()  # real tokens before each slot
            pos = before + start
        if doc is not None:
            _same_shape("doc", doc, ids)
            if valid is None:
                before = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[:2])
            first = torch.ones_like(doc, dtype=torch.bool)
            first[:, 1:] = doc[:, 1:] != doc[:, :-1]
            pos = before - before.masked_fill(~first, 0).cummax(-1).values + start
        if pos is not None and valid is not None:
            pos = pos.masked_fill(~valid, EMPTY)
        return cls(start, ids.shape[1], pos, doc)

    def check(self, ids: Tensor) -> None:
        """Errors: StateError when this is not where ids (B, N, ...) may sit."""
        batch, tokens = ids.shape[:2]
        if self.length != tokens or self.start < 0:
            raise StateError(
                f"Span: got start {self.start} and length {self.length} for {tokens} tokens, expected a start of 0 or "
                f"more and the length {tokens}. Use Span.of(ids), or state.next({tokens})."
            )
        for name, column in (("pos", self.pos), ("doc", self.doc), ("segment", self.segment)):
            if column is not None and (column.shape[1:] != (tokens,) or len(column) not in (1, batch)):
                raise StateError(
                    f"Span: {name} has shape {tuple(column.shape)}, expected {(batch, tokens)} like the ids."
                )

    @property
    def end(self) -> int:
        """The slot after the last token."""
        return self.start + self.length

    def positions(self, device: torch.device) -> Int[Tensor, "B N"]:
        """Absolute positions, (B, N) or (1, N) when every row is alike."""
        return torch.arange(self.start, self.end, device=device)[None] if self.pos is None else self.pos

    def real(self) -> Bool[Tensor, "B N"] | None:
        """True at tokens, False at padding; None when there is no padding."""
        return None if self.pos is None else self.pos != EMPTY

    def select(self, rows: Int[Tensor, " R"]) -> Span:
        """The same span for some rows of the batch, in their order."""
        pos = None if self.pos is None else self.pos[rows]
        place = self.place if self.place is None or len(self.place) == 1 else self.place[rows]
        columns = (self.doc, self.values, self.segment)
        doc, values, segment = (None if column is None else column[rows] for column in columns)
        return replace(self, pos=pos, doc=doc, place=place, values=values, segment=segment)


@spec("mask")
class Mask(Spec):
    """Who may look at whom. Holds no tensor; hashable; one object serves training, prefill and decode.

    causal: a query sees itself and the past. window: a query sees itself and window-1 neighbours on each allowed side.
    """

    causal: bool = True
    window: int | None = None

    def check(self) -> None:
        """A window holds at least the query itself."""
        if self.window is not None and self.window < 1:
            raise self.refuse("window", "at least 1 (the token itself)", "Leave it out to see everything.")

    def __and__(self, other: Mask) -> Mask:
        """What both masks allow."""
        windows = [w for w in (self.window, other.window) if w is not None]
        return Mask(causal=self.causal or other.causal, window=min(windows, default=None))

    def allowed(self, q: Int[Tensor, "*#q"], k: Int[Tensor, "*#q"]) -> Tensor:
        """THE definition: broadcastable absolute positions in, True where the query may see the key."""
        ok = k != EMPTY
        if self.causal:
            ok = ok & (k <= q)
        if self.window is not None:
            ok = ok & (q - k < self.window)
            if not self.causal:
                ok = ok & (k - q < self.window)
        return ok


CAUSAL, FULL = Mask(), Mask(causal=False)


# How a kernel is told. A closed union: whoever matches on it ends in assert_never.


@dataclass(frozen=True, slots=True)
class Everything:
    """Every query sees every key; `last`: only the last so many keys (a window, at one query)."""

    last: int | None = None


@dataclass(frozen=True, slots=True)
class IsCausal:
    """Query i sees keys 0 ... i: what kernels call is_causal."""


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A boolean map, (B or 1, 1, T or 1, S)."""

    allowed: Bool[Tensor, "#B 1 #T S"]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """FlexAttention's block mask."""

    block_mask: Any


Lowered = Everything | IsCausal | Dense | Block


def lower(mask: Mask, q: Span, k: Span, *, device: torch.device, flex: bool = False) -> Lowered:
    """The cheapest exact form of `mask` between queries at `q` and keys at `k`.

    Decided from ints and None-ness only: it never waits for the device. flex: say what is not trivial as a block mask.
    """
    if (q.doc is None) != (k.doc is None):
        raise StateError("lower(): one of queries and keys says its documents, the other does not. Give `doc` to both.")
    positional = mask.causal or mask.window is not None
    if k.pos is None and k.doc is None and (q.pos is None or not positional):
        cheap = _from_ints(mask, q, k)
        if cheap is not None:
            return cheap
    if flex:
        return Block(_block_mask(mask, q, k, device))
    allowed = mask.allowed(q.positions(device)[:, :, None], k.positions(device)[:, None, :])
    if q.doc is not None and k.doc is not None:
        allowed = allowed & (q.doc[:, :, None] == k.doc[:, None, :])
    return Dense(allowed[:, None])


def _from_ints(mask: Mask, q: Span, k: Span) -> Everything | IsCausal | None:
    """Both sides are plain runs of positions: try to say the mask without a tensor."""
    window = mask.window
    first_q, last_q, first_k, last_k = q.start, q.end - 1, k.start, k.end - 1
    sees_newest = last_k <= first_q if mask.causal else window is None or last_k - first_q < window
    if sees_newest and (window is None or last_q - first_k < window):
        return Everything()
    if sees_newest and q.length == 1 and window is not None and last_k > last_q - window:
        return Everything(last=last_k - (last_q - window))
    if mask.causal and first_q == first_k and last_q == last_k and (window is None or window >= q.length):
        return IsCausal()
    return None


def _block_mask(mask: Mask, q: Span, k: Span, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    q_pos, k_pos = q.positions(device), k.positions(device)
    rows = max(len(q_pos), len(k_pos))

    @no_type_check  # torch traces it, which it cannot do through the shape checks of pytest
    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # b runs over the batch of the queries even when the block mask has one row: use row 0 of one-row positions
        ok = mask.allowed(q_pos[b if len(q_pos) > 1 else 0, i], k_pos[b if len(k_pos) > 1 else 0, j])
        if q.doc is not None and k.doc is not None:
            ok = ok & (q.doc[b, i] == k.doc[b, j])
        return ok

    with_docs = q.doc is not None and len(q.doc) > 1
    batch = rows if rows > 1 or with_docs else None
    return create_block_mask(rule, batch, None, q.length, k.length, device=device.type)


def _same_shape(name: str, got: Tensor, ids: Tensor) -> None:
    if got.shape != ids.shape[:2]:
        raise StateError(
            f"Span.of(): {name} has shape {tuple(got.shape)}, expected {tuple(ids.shape[:2])} like the ids."
        )
