"""What a model learns: a `Task` is the setting, `Data` is what it prepares.

No model, no training and no generation here. A training batch is a pure function of (seed, step): nothing is remembered
between calls, and no global random state is used.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from brickformer.errors import SpecError
from brickformer.spec import Spec
from brickformer.tasks.batch import Batch
from brickformer.tasks.order import Ints
from brickformer.tasks.tokenizer import Tokenizer


class Data(ABC):
    """Prepared data.

    source: what an encoder's text is cut with; None for a language model. target: the same for what the model says.
    max_source, max_target: the most tokens a row of src and of inputs can have, for sizing tables and caches.
    """

    def __init__(self, source: Tokenizer | None, target: Tokenizer, max_source: int, max_target: int) -> None:
        self.source, self.target = source, target
        self.max_source, self.max_target = max_source, max_target

    def batch(self, step: int, size: int) -> Batch:
        """The training batch of a step (from 0), `size` rows. Errors: SpecError: a negative step or an empty batch."""
        if step < 0:
            raise SpecError(f"batch: got step {step}, expected 0 or more.")
        return self._batch(step * _size(size), size)

    def validation(self, size: int, *, whole: bool = False) -> Iterator[Batch]:
        """Held-out batches of `size` rows (the last may be smaller), always the same ones in the same order.

        whole: all that is held out, instead of the evenly spaced sample whose size the task sets.
        """
        items = self._held_out(whole)
        return (self._held_out_batch(items[at : at + size]) for at in range(0, len(items), _size(size)))

    @abstractmethod
    def examples(self, *, whole: bool = False) -> list[tuple[str, str]]:
        """Held-out (source text, target text) for exact match, in the order of `validation`; none for running text."""

    @abstractmethod
    def describe(self) -> str:
        """One line: what is learnt, from how much, with how many tokens."""

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change when the data or its split change; a resumed run compares them."""
        digest = hashlib.blake2b(digest_size=8)
        for part in self._contents():
            digest.update(f"{part.dtype} {part.shape} ".encode())
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    @abstractmethod
    def _batch(self, first: int, size: int) -> Batch:
        """Training rows number first, ..., first+size-1."""

    @abstractmethod
    def _held_out(self, whole: bool) -> Ints:
        """The numbers of the held-out rows to use."""

    @abstractmethod
    def _held_out_batch(self, rows: Ints) -> Batch: ...

    @abstractmethod
    def _contents(self) -> tuple[Ints, ...]:
        """Everything the fingerprint covers."""


class Task(Spec, ABC):
    """A spec of what to learn; `prepare` reads or draws the data."""

    __slots__ = ()

    @abstractmethod
    def prepare(self, seed: int) -> Data:
        """The data for one run. Errors: DataError for a file that cannot be used, SpecError for a negative seed."""


def _size(size: int) -> int:
    if size < 1:
        raise SpecError(f"batch size: got {size}, expected 1 or more.")
    return size
