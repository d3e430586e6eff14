"""Feed: a batch of rows, fed to a model with its state. The only place where generation calls the decoder for batches.

    begin   whole rows, left padded -> logits after the last token of each
    next    one more token a row    -> logits after it
    select  rows leave, are copied, or follow their beam

Without a cache every call reads everything again. When the slots are full although no row is at its limit, the rows are
packed again without the padding, which takes slots too, and into more slots: no more than `writer.SLOTS` are set aside
for tokens that may never come.
Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from brickformer.generate.prefix import Prefix
from brickformer.generate.result import Stats
from brickformer.generate.writer import Writer, room
from brickformer.mixers.cross import Memory
from brickformer.state import StackState

Rows = list[list[int]]


class Feeding(Protocol):
    """What decoding asks of that which reads: see `Feed`, the one for models of ours."""

    writer: Writer
    stats: Stats
    use_cache: bool

    @property
    def full(self) -> bool:
        """The next token has no slot."""

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling."""

    def begin(self, rows: Rows, sources: Rows | None, more: int) -> Tensor:
        """Read whole rows."""

    def begin_at(self, prefix: Prefix, rest: Rows) -> Tensor:
        """Go on from a prompt that has been read."""

    def next(self, ids: Tensor, rows: Callable[[], tuple[Rows, Rows | None]], more: int) -> Tensor:
        """One more token a row."""

    def select(self, rows: Tensor) -> None:
        """Keep these rows."""


@final
class Feed:
    """rows: what the decoder has been given. sources: what the encoder is given. more: tokens to come, at most."""

    def __init__(self, writer: Writer, stats: Stats, *, use_cache: bool = True) -> None:
        self.writer, self.stats, self.use_cache = writer, stats, use_cache
        self.state: StackState | None = None
        self.memory: Memory | None = None
        self.capacity = 0

    @property
    def full(self) -> bool:
        """The next token has no slot: everything is read again."""
        return self.state is None or self.state.length >= self.capacity

    @property
    def compile_s(self) -> float:
        """Seconds the writer has spent compiling so far."""
        return 0.0 if self.writer.compiled is None else self.writer.compiled.seconds

    def begin(self, rows: Rows, sources: Rows | None, more: int) -> Float[Tensor, "B V"]:
        """Read whole rows; the logits after the last token of each."""
        decoder = self.writer.decoder
        if sources is not None and self.memory is None:
            self.memory = self.writer.read(sources)
        ids, at = self.writer.pack(rows)
        if self.use_cache:
            self.capacity = room(self.writer, ids.shape[1], more)
            self.state = self.writer.init_state(len(rows), self.capacity + self.writer.spare)
        h = decoder.hidden(ids, at, self.state, self.memory)
        self._weigh()
        return decoder.logits(h[:, -1:])[:, 0]

    def begin_at(self, prefix: Prefix, rest: Rows) -> Float[Tensor, "B V"]:
        """Go on from a prompt that has been read, with the `rest` of each row (which may be empty)."""
        decoder, device = self.writer.decoder, self.writer.device
        self.writer.repack()
        self.state, self.capacity = prefix.state.clone(), prefix.max_len
        self.state.select(torch.zeros(len(rest), dtype=torch.long, device=device))
        logits = prefix.logits.expand(len(rest), -1)
        if any(rest):
            ids, at = self.writer.pack(rest, self.state.length)
            read = decoder.logits(decoder.hidden(ids, at, self.state)[:, -1:])[:, 0]
            logits = torch.where(torch.tensor([bool(r) for r in rest], device=device)[:, None], read, logits)
        self._weigh()
        return logits

    def next(
        self, ids: Int[Tensor, "B 1"], rows: Callable[[], tuple[Rows, Rows | None]], more: int
    ) -> Float[Tensor, "B V"]:
        """Logits after one more token a row. rows: everything read so far with these tokens, asked for when needed."""
        if self.state is None or self.full:
            return self.begin(*rows(), more)
        return self.writer.step(ids, self.state)

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these rows, in this order."""
        if self.state is not None:
            self.state.select(rows)
        if self.memory is not None:
            self.memory = self.memory.select(rows)
        self._weigh()

    def _weigh(self) -> None:
        if self.state is not None:
            self.stats.cache_bytes = max(self.stats.cache_bytes, self.state.nbytes)
