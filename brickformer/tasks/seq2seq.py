"""Pairs of sequences, encoded: the data of every task that has an encoder and a decoder.

    src = s_1 .. s_S        inputs = BOS t_1 .. t_n        targets = t_1 .. t_n EOS        padded on the right

`Ragged` holds rows of different lengths end to end, so that a batch is one index gather and memory is one number a
token, whatever the longest row. Shapes: B batch, S source tokens, T target tokens (n + 1 of the longest row).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Literal, final

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from brickformer.tasks.batch import IGNORE, Batch
from brickformer.tasks.order import Bools, Ints, Order, spread
from brickformer.tasks.task import Data
from brickformer.tasks.tokenizer import BOS, EOS, PAD, SPECIALS, CharTokenizer, Tokenizer, WordTokenizer


@final
class Ragged:
    """Rows of ids end to end. ids: (total,) int32. starts: (rows + 1,); row i is ids[starts[i]:starts[i+1]]."""

    def __init__(self, ids: Ints, starts: Ints) -> None:
        self.ids, self.starts = ids, starts
        self.lengths = np.diff(starts)

    def row(self, i: int) -> list[int]:
        """One row as a list."""
        ids: list[int] = self.ids[self.starts[i] : self.starts[i + 1]].tolist()
        return ids

    def gather(self, rows: Ints) -> tuple[Ints, Bools | None]:
        """Some rows side by side (B, N), and where they have tokens (None: everywhere). Elsewhere lies some id."""
        lengths = self.lengths[rows]
        at = np.arange(lengths.max())
        ids = self.ids.take(self.starts[rows][:, None] + at, mode="clip")
        return ids, None if lengths.min() == len(at) else at < lengths[:, None]


@final
class Vocabulary:
    """Ids given out in the order tokens are met, made final by `tokenizer` once all are known."""

    def __init__(self, level: Literal["char", "word"]) -> None:
        self.level = level
        self._met: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Provisional ids of a text; tokens not met before get the next ones."""
        met, first = self._met, len(SPECIALS)
        units = text if self.level == "char" else text.split()
        return [met.setdefault(unit, first + len(met)) for unit in units]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of everything met, tokens in the order of their code points."""
        made = CharTokenizer if self.level == "char" else WordTokenizer
        return made(sorted(self._met), specials=True)

    def final(self, tokenizer: Tokenizer) -> Ints:
        """Provisional id -> final id, (V,)."""
        table = np.arange(tokenizer.vocab, dtype=np.int32)
        table[list(self._met.values())] = [tokenizer.encode(unit)[0] for unit in self._met]
        return table


@final
class Column:
    """One side of the pairs while they are read: rows of provisional ids."""

    def __init__(self, vocabulary: Vocabulary, *, target: bool) -> None:
        self.vocabulary, self._target = vocabulary, target
        self._ids, self._starts = array("i"), array("q", [0])

    def add(self, text: str) -> int:
        """Append a row (between BOS and EOS in a target); how many tokens the text has."""
        ids = self.vocabulary.encode(text)
        self._ids.extend([BOS, *ids, EOS] if self._target else ids)
        self._starts.append(len(self._ids))
        return len(ids)

    def ragged(self, tokenizer: Tokenizer) -> Ragged:
        """All rows, with final ids."""
        ids, starts = np.frombuffer(self._ids, dtype=np.int32), np.frombuffer(self._starts, dtype=np.int64)
        return Ragged(self.vocabulary.final(tokenizer)[ids], starts.copy())


@final
class Seq2SeqData(Data):
    """Encoded pairs and who is held out.

    train, held_out: row numbers. sample: how many held-out rows `validation` and `examples` use unless asked for all.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        source: Column,
        target: Column,
        *,
        train: Ints,
        held_out: Ints,
        sample: int,
    ) -> None:
        tokenizers = (source.vocabulary.tokenizer(), target.vocabulary.tokenizer())
        self._src, self._tgt = source.ragged(tokenizers[0]), target.ragged(tokenizers[1])
        self.train, self.held_out, self.name, self._sample = train, held_out, name, sample
        self._order = Order(seed, len(train))
        longest = int(self._src.lengths.max()), int(self._tgt.lengths.max()) - 1
        super().__init__(*tokenizers, *longest)

    def _batch(self, first: int, size: int) -> Batch:
        return self._rows(self.train[self._order.take(first, size)])

    def _held_out(self, whole: bool) -> Ints:
        return self.held_out if whole else self.held_out[spread(len(self.held_out), self._sample)]

    def _held_out_batch(self, rows: Ints) -> Batch:
        return self._rows(rows)

    def _rows(self, rows: Ints) -> Batch:
        src, src_valid = self._src.gather(rows)
        both, inside = self._tgt.gather(rows)  # BOS t_1 .. t_n EOS: inputs and targets are the same row, one apart
        valid = None if inside is None else inside[:, 1:]
        return Batch(
            _filled(both[:, :-1], valid, PAD),
            _filled(both[:, 1:], valid, IGNORE),
            _filled(src, src_valid, PAD),
            _tensor(src_valid),
            _tensor(valid),
            tokens=int(self._tgt.lengths[rows].sum()) - len(rows),
        )

    def examples(self, *, whole: bool = False) -> list[tuple[str, str]]:
        """Held-out pairs as text, cut and joined as the tokenizers do."""
        return self.texts(self._held_out(whole).tolist())

    def texts(self, rows: Iterable[int]) -> list[tuple[str, str]]:
        """Pairs as text, by row number."""
        assert self.source is not None
        return [(self.source.decode(self._src.row(i)), self.target.decode(self._tgt.row(i))) for i in rows]

    def describe(self) -> str:
        """One line: name, sizes, tokens."""
        assert self.source is not None
        return (
            f"{self.name}: {len(self.train):,} training and {len(self.held_out):,} validation pairs, "
            f"vocabulary {self.source.vocab} -> {self.target.vocab}, "
            f"at most {self.max_source} -> {self.max_target} tokens"
        )

    def _contents(self) -> tuple[Ints, ...]:
        return self._src.ids, self._src.starts, self._tgt.ids, self._tgt.starts, self.train, self.held_out


def _filled(ids: Ints, valid: Bools | None, value: int) -> Int[Tensor, "B N"]:
    return torch.from_numpy((ids if valid is None else np.where(valid, ids, value)).astype(np.int64))


def _tensor(valid: Bools | None) -> Bool[Tensor, "B N"] | None:
    return None if valid is None else torch.from_numpy(np.ascontiguousarray(valid))
