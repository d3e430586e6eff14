"""Pairs of texts from a two-column file: source TAB target, one pair a line.

Blank lines are skipped. Which pairs are held out is drawn from the seed by source text: all pairs with one source are
on one side, so no validation source was ever trained on; the order of the lines does not matter. The vocabulary is
that of the whole file; each side has its own unless asked otherwise.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Literal, final

import numpy as np

from brickformer.errors import DataError
from brickformer.spec import spec
from brickformer.tasks.files import read_lines
from brickformer.tasks.order import SPLIT, Ints, generator
from brickformer.tasks.seq2seq import Column, Seq2SeqData, Vocabulary
from brickformer.tasks.task import Data, Task


@final
@spec("pairs")
class Pairs(Task):
    """Turn one text into another.

    data: path of a UTF-8 file, source TAB target, one pair a line. level: what a token is. vocabulary: one for each
    side or one for both. split: the part of the different sources that trains. longest: the most tokens one side of a
    pair may have. valid_pairs: how many evenly spaced held-out pairs are used for validation along the way.
    """

    data: str
    level: Literal["char", "word"] = "char"
    vocabulary: Literal["separate", "shared"] = "separate"
    split: float = 0.9
    longest: int = 512
    valid_pairs: int = 512

    def check(self) -> None:
        """A path, and something on each side of the split."""
        if not self.data:
            raise self.refuse("data", "the path of a file with source TAB target on each line")
        if not 0 < self.split < 1:
            raise self.refuse("split", "a number between 0 and 1", "0.9 trains on nine tenths of the sources.")
        if self.longest < 1:
            raise self.refuse("longest", "1 or more")
        if self.valid_pairs < 1:
            raise self.refuse("valid_pairs", "1 or more")

    def prepare(self, seed: int) -> Data:
        """Read the file. Errors: DataError with the line for one column, three, an empty side or one too long."""
        vocabulary = Vocabulary(self.level)
        other = vocabulary if self.vocabulary == "shared" else Vocabulary(self.level)
        source, target = Column(vocabulary, target=False), Column(other, target=True)
        groups = array("Q")  # one number for each source text
        key = generator(seed, SPLIT).bytes(16)
        for number, line in read_lines(self.data):
            if not line.strip():
                if "\t" in line:
                    raise DataError(f"{self.data}, line {number}: both sides are empty. Fill them or delete the line.")
                continue
            left, right = self._sides(line, number)
            for side, tokens in (("source", source.add(left)), ("target", target.add(right))):
                if tokens > self.longest:
                    raise DataError(
                        f"{self.data}, line {number}: the {side} has {tokens:,} tokens, expected at most "
                        f"{self.longest:,}. Shorten it, or set longest={tokens}."
                    )
            unit = left if self.level == "char" else " ".join(left.split())  # what the model sees of it
            groups.append(int.from_bytes(blake2b(unit.encode(), digest_size=8, key=key).digest(), "little"))
        if not groups:
            raise DataError(f"{self.data}: only blank lines, expected source TAB target on each line.")
        train, held_out = self._split(np.frombuffer(groups, dtype=np.uint64))
        return Seq2SeqData(
            f"pairs of {self.data}", seed, source, target, train=train, held_out=held_out, sample=self.valid_pairs
        )

    def _sides(self, line: str, number: int) -> tuple[str, str]:
        columns = line.split("\t")
        if len(columns) != 2:
            shown = line if len(line) <= 40 else line[:37] + "..."
            got = "one column" if len(columns) == 1 else f"{len(columns)} columns"
            do = "Put one tab between the two." if len(columns) == 1 else "Keep two of them."
            raise DataError(f"{self.data}, line {number}: got {got} in {shown!r}, expected source TAB target. {do}")
        for side, text in zip(("source", "target"), columns, strict=True):
            if not text.strip():
                raise DataError(f"{self.data}, line {number}: the {side} is empty. Fill it or delete the line.")
        return columns[0], columns[1]

    def _split(self, groups: Ints) -> tuple[Ints, Ints]:
        """Row numbers for training and for validation. Keyed hashes are random, so the smallest are a random draw."""
        different = np.unique(groups)
        if len(different) < 2:
            raise DataError(
                f"{self.data}: got {len(groups):,} pair(s) with one and the same source, expected at least 2 different "
                "sources: one to train on and one to hold out."
            )
        held = min(max(1, round(len(different) * (1 - self.split))), len(different) - 1)
        out = groups < different[held]
        return np.flatnonzero(~out), np.flatnonzero(out)
