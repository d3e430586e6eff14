"""Made-up digits: reverse them (the task to start with), copy them, sort them.

    reverse: 7 1 4 -> 4 1 7        copy: 7 1 4 -> 7 1 4        sort: 7 1 4 -> 1 4 7

Training sequences are drawn once from the seed: a length, evenly from min_len to max_len, then each digit evenly.
Validation sequences are drawn the same way and kept only if they are in neither set yet: none was trained on, no two
are equal. Tokens: "0" to "9", PAD, BOS, EOS: 13, the same for both sides. With `kinds` below 10 a sequence has its own
choice of digits, from that many to all ten: more repetition, and so more places that are easily mistaken for another.
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
    """Say a sequence of digits backwards.

    train, valid: numbers of sequences. min_len, max_len: digits in one. kinds: of digits in one, at least.
    """

    train: int = 1000
    valid: int = 500
    min_len: int = 3
    max_len: int = 6
    kinds: int = 10

    def check(self) -> None:
        """At least one sequence on each side, of at least one digit, and enough different ones to hold out."""
        check_digits(self)

    def prepare(self, seed: int) -> Data:
        """Draw both sets from the seed."""
        return digit_data(self, lambda s: s[::-1], seed)


@final
@spec("copy")
class Copy(Task):
    """Say a sequence of digits as it is. Fields as in `Reverse`."""

    train: int = 1000
    valid: int = 500
    min_len: int = 3
    max_len: int = 6
    kinds: int = 10

    def check(self) -> None:
        """As `Reverse`."""
        check_digits(self)

    def prepare(self, seed: int) -> Data:
        """Draw both sets from the seed."""
        return digit_data(self, lambda s: s, seed)


@final
@spec("sort")
class Sort(Task):
    """Say a sequence of digits in ascending order. Fields as in `Reverse`."""

    train: int = 1000
    valid: int = 500
    min_len: int = 3
    max_len: int = 6
    kinds: int = 10

    def check(self) -> None:
        """As `Reverse`."""
        check_digits(self)

    def prepare(self, seed: int) -> Data:
        """Draw both sets from the seed."""
        return digit_data(self, lambda s: tuple(sorted(s)), seed)


DigitTask = Reverse | Copy | Sort


def check_digits(task: DigitTask) -> None:
    """The rules of the fields. Errors: SpecError."""
    if task.train < 1:
        raise task.refuse("train", "1 or more")
    if task.valid < 1:
        raise task.refuse("valid", "1 or more")
    if task.min_len < 1:
        raise task.refuse("min_len", "1 or more")
    if task.max_len < task.min_len:
        raise task.refuse("max_len", f"min_len ({task.min_len}) or more")
    if not 2 <= task.kinds <= 10:
        raise task.refuse("kinds", "from 2 to 10")


def digit_data(task: DigitTask, answer: Callable[[Digits], Digits], seed: int) -> Data:
    """Draw sequences, keep those for validation that are new. Errors: SpecError when there are not enough new ones."""
    train, valid, min_len, max_len = task.train, task.valid, task.min_len, task.max_len
    draws = _draws(seed, min_len, max_len, task.kinds)
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


def _draws(seed: int, min_len: int, max_len: int, kinds: int) -> Iterator[Digits]:
    """Endless sequences of digits from the seed."""
    random = generator(seed, DRAW)
    while True:
        lengths = random.integers(min_len, max_len + 1, 1024)
        digits = random.integers(0, 10, (1024, max_len), dtype=np.int8)
        if kinds < 10:  # each row has its own choice of digits: the first few of a shuffled ten
            several = random.integers(kinds, 11, (1024, 1))
            shuffled = random.permuted(np.tile(np.arange(10), (1024, 1)), axis=1)
            which = (random.random((1024, max_len)) * several).astype(np.int64)
            digits = np.take_along_axis(shuffled, which, axis=1)
        for length, row in zip(lengths.tolist(), digits.tolist(), strict=True):
            yield tuple(row[:length])
