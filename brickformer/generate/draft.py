"""Drafts of speculative decoding: what guesses the next tokens, and how a model reads a row and goes back.

Shapes: T tokens, V vocabulary; one row at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from brickformer.generate.choose import Choice, Constraints, widen
from brickformer.generate.rows import Row
from brickformer.generate.writer import Writer, room
from brickformer.spec import Spec, spec
from brickformer.state import KV


@spec("prompt_lookup")
class PromptLookup(Spec):
    """A draft without a model: the tokens that followed the last earlier occurrence of the newest `ngram` tokens.

    When there is none, shorter runs are looked for, down to one token. Good where answers repeat their prompt.
    """

    ngram: int = 3

    def check(self) -> None:
        """At least one token to look for."""
        if self.ngram < 1:
            raise self.refuse("ngram", "at least 1")

    def find(self, tokens: Sequence[int], ahead: int) -> list[int]:
        """At most `ahead` guesses of what comes after `tokens`."""
        tokens = list(tokens)
        for n in range(min(self.ngram, len(tokens) - 1), 0, -1):
            tail = tokens[-n:]
            for at in range(len(tokens) - n - 1, -1, -1):
                if tokens[at : at + n] == tail:
                    return tokens[at + n : at + n + ahead]
        return []


@final
class Reader:
    """A model that reads one row and can go back."""

    def __init__(self, writer: Writer, row: Row, ahead: int) -> None:
        self.writer = writer
        self.memory = None if row.source is None else writer.read([row.source])
        self.seen: list[int] = []
        self._more = row.plan.stop.max_tokens + ahead + 1  # tokens to come, at most
        self._reserve(len(row.given))
        self._before = self.state, self.capacity

    def read(self, tokens: Sequence[int]) -> Float[Tensor, "T V"]:
        """Read on; logits after each token."""
        decoder, new = self.writer.decoder, len(tokens)
        if self.state.length + new > self.capacity:  # all again, into more slots
            self._reserve(len(self.seen) + new)
            tokens = [*self.seen, *tokens]
        ids = torch.tensor([list(tokens)], device=self.writer.device)
        h = decoder.hidden(ids, None, self.state, self.memory if self.state.length == 0 else None)
        self.seen = [*self.seen[: self.state.length - len(tokens)], *tokens]
        return decoder.logits(h[:, -new:])[0]

    def _reserve(self, tokens: int) -> None:
        """An empty state for so many tokens, and for some that may come."""
        self.capacity = room(self.writer, tokens, self._more)
        self.state = self.writer.init_state(1, self.capacity)

    def mark(self) -> None:
        """A round begins: it may have to go back to here."""
        if not self._can_rewind():
            self._before = self.state.clone(), self.capacity

    def keep(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        if length >= len(self.seen):
            return
        tokens = self.seen[:length]
        if self._can_rewind():
            self.state.rewind(length)
            self.seen = tokens
        else:
            self.state, self.capacity = self._before
            self.seen = tokens[: self.state.length]
            if len(tokens) > self.state.length:
                self.read(tokens[self.state.length :])

    def _can_rewind(self) -> bool:
        """Only a cache of every token can always go back. Others cannot, or a little and not always a whole round."""
        return all(type(layer.mixer) is KV for layer in self.state.layers)


class Draft(ABC):
    """A draft at work on one row."""

    @abstractmethod
    def guess(self, ahead: int) -> tuple[list[int], Float[Tensor, "T V"] | None]:
        """At most `ahead` tokens, and the logits each was drawn from (None: they were certain)."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes its state holds."""


@final
class NoDraft(Draft):
    """Guesses nothing: the draft cannot read this row."""

    def guess(self, ahead: int) -> tuple[list[int], Tensor | None]:
        return [], None

    @property
    def nbytes(self) -> int:
        return 0


@final
class LookupDraft(Draft):
    """Looks the guesses up in the row itself."""

    def __init__(self, spec: PromptLookup, row: Row) -> None:
        self.spec, self.row = spec, row

    def guess(self, ahead: int) -> tuple[list[int], Tensor | None]:
        return self.spec.find(self.row.all, ahead), None

    @property
    def nbytes(self) -> int:
        return 0


@final
class ModelDraft(Draft):
    """A small model: it reads what was accepted since its last round, then guesses on."""

    def __init__(self, writer: Writer, row: Row) -> None:
        self.writer, self.row = writer, row
        self.reader = Reader(writer, row, row.plan.stop.max_tokens)
        self.choice = Choice(
            Constraints(row.plan.sampling, row.plan.stop, writer.vocab, [row.given], writer.device), row.uniform
        )
        self.known = 0  # tokens of the answer that the constraints know

    def guess(self, ahead: int) -> tuple[list[int], Tensor | None]:
        tokens = self.row.all
        if self.writer.limit is not None:
            ahead = min(ahead, self.writer.limit + 1 - len(tokens))
        if ahead < 1:
            return [], None
        self.reader.keep(len(tokens) - 1)
        for token in self.row.result.tokens[self.known :]:
            self._add(token)
        self.known = len(self.row.result.tokens)
        before = self.choice.constraints
        self.choice.constraints = before.copy()
        self.reader.mark()
        logits = self.reader.read(tokens[len(self.reader.seen) :])[-1:]
        guesses: list[int] = []
        drawn: list[Tensor] = []
        while True:
            q = self.choice.next(logits)
            token = self.choice.token(q)
            if token < 0 or not widen(logits).logsumexp(-1).isfinite():
                break
            guesses.append(token)
            drawn.append(q)
            if len(guesses) == ahead or token in self.row.plan.stop_ids:
                break
            self._add(token)
            logits = self.reader.read([token])
        self.choice.constraints = before
        return guesses, None if self.choice.sampling.greedy or not drawn else torch.cat(drawn)

    @property
    def nbytes(self) -> int:
        return self.reader.state.nbytes

    def _add(self, token: int) -> None:
        self.choice.constraints.add(torch.tensor([token], device=self.writer.device), [token])
