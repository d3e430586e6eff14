"""Made-up digits: reverse them (the task to start with), copy them, sort them.

    reverse: 7 1 4 -> 4 1 7        copy: 7 1 4 -> 7 1 4        sort: 7 1 4 -> 1 4 7

Training sequences are drawn once from the seed: a length, evenly from min_len to max_len, then each digit evenly.
Validation sequences are drawn the same way and kept only if they are in neither set yet: none was trained on, no two
are equal. Tokens: "0" to "9", PAD, BOS, EOS: 13, the same for both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

import numpy as np

from brickformer.errors import SpecError
from brickformer.spec import spec
from brickformer.tasks.order import DRAW, generator
from brickformer.tasks.seq2seq import Column, Seq2SeqData, Vocabulary
from brickformer.tasks.task import Data, Task

Digits = tuple[int, ...]


@final
@spec("reverse")
class Reverse(Task):
    """Say a sequence of digits backwards. train, valid: numbers of sequences. min_len, max_len: digits in one."""

    train: int = 1000
    valid: int = 500
    min_len: int = 3
    max_len: int = 6

    def check(self) -> None:
        """At least one sequence on each side, of at least one digit, and enough different ones to hold out."""
        check_digits(self, self.train, self.valid, self.min_len, self.max_len)

    def prepare(self, seed: int) -> Data:
        """Draw both sets from the seed."""
        return digit_data(self, lambda s: s[::-1], seed, self.train, self.valid, self.min_len, self.max_len)


@final
@spec("copy")
class Copy(Task):
    """Say a sequence of digits as it is. Fields as in `Reverse`."""

    train: int = 1000
    valid: int = 500
    min_len: int = 3
    max_len: int = 6

    def check(self) -> None:
        """As `Reverse`."""
        check_digits(self, self.train, self.valid, self.min_len, self.max_len)

    def prepare(self, seed: int) -> Data:
        """Draw both sets from the seed."""
        return digit_data(self, lambda s: s, seed, self.train, self.valid, self.min_len, self.max_len)


@final
@spec("sort")
class Sort(Task):
    """Say a sequence of digits in ascending order. Fields as in `Reverse`."""

    train: int = 1000
    valid: int = 500
    min_len: int = 3
    max_len: int = 6

    def check(self) -> None:
        """As `Reverse`."""
        check_digits(self, self.train, self.valid, self.min_len, self.max_len)

    def prepare(self, seed: int) -> Data:
        """Draw both sets from the seed."""
        return digit_data(self, lambda s: tuple(sorted(s)), seed, self.train, self.valid, self.min_len, self.max_len)


def check_digits(task: Task, train: int, valid: int, min_len: int, max_len: int) -> None:
    """The rules of the fields. Errors: SpecError."""
    if train < 1:
        raise task.refuse("train", "1 or more")
    if valid < 1:
        raise task.refuse("valid", "1 or more")
    if min_len < 1:
        raise task.refuse("min_len", "1 or more")
    if max_len < min_len:
        raise task.refuse("max_len", f"min_len ({min_len}) or more")


def digit_data(
    task: Task, answer: Callable[[Digits], Digits], seed: int, train: int, valid: int, min_len: int, max_len: int
) -> Data:
    """Draw sequences, keep those for validation that are new. Errors: SpecError when there are not enough new ones."""
    draws = _draws(seed, min_len, max_len)
    seen = [next(draws) for _ in range(train)]
    taken = set(seen)
    there_are = sum(10**n for n in range(min_len, max_len + 1))
    if there_are - len(taken) < valid:
        raise SpecError(
            f"{task.kind}.valid: got {valid}, expected at most {there_are - len(taken)}: of the {there_are} sequences "
            f"of {min_len} to {max_len} digits {len(taken)} are in training. Lower train or valid, or raise max_len."
        )
    held_out: list[Digits] = []
    while len(held_out) < valid:
        digits = next(draws)
        if digits not in taken:
            taken.add(digits)
            held_out.append(digits)
    vocabulary = Vocabulary("word")
    vocabulary.encode("0 1 2 3 4 5 6 7 8 9")  # all ten, even where few are drawn
    source, target = Column(vocabulary, target=False), Column(vocabulary, target=True)
    for digits in (*seen, *held_out):
        source.add(" ".join(map(str, digits)))
        target.add(" ".join(map(str, answer(digits))))
    rows = np.arange(train + valid)
    return Seq2SeqData(
        f"{task.kind} sequences of {min_len} to {max_len} digits",
        seed,
        source,
        target,
        train=rows[:train],
        held_out=rows[train:],
        sample=valid,
    )


def _draws(seed: int, min_len: int, max_len: int) -> Iterator[Digits]:
    """Endless sequences of digits from the seed."""
    random = generator(seed, DRAW)
    while True:
        lengths = random.integers(min_len, max_len + 1, 1024)
        digits = random.integers(0, 10, (1024, max_len), dtype=np.int8).tolist()
        for length, row in zip(lengths.tolist(), digits, strict=True):
            yield tuple(row[:length])
