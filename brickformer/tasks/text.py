"""A character model of a text file.

    inputs = ids[i : i+C]        targets = ids[i+1 : i+C+1]        C the context, i the start of a window

The first part of the file trains, the rest validates. Training windows lie end to end from a random start, in random
order, and both are drawn anew every epoch: a window may start anywhere, yet (but for the edges) every character is
learnt from once an epoch, where windows drawn independently would leave 1/e of them out. Validation windows lie end to
end from the start of their part; `whole` predicts each of its characters but the first exactly once.
Shapes: B batch, T = C.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from brickformer.errors import DataError
from brickformer.spec import spec
from brickformer.tasks.batch import IGNORE, Batch
from brickformer.tasks.files import read_pieces
from brickformer.tasks.order import Ints, Order, spread
from brickformer.tasks.task import Data, Task
from brickformer.tasks.tokenizer import CharTokenizer, Tokenizer

_CODE_POINTS: Final = 0x110000


@final
@spec("text")
class Text(Task):
    """Continue a text, character by character.

    data: path of a UTF-8 file of any size. context: characters in a window. split: the part of the file that trains.
    valid_windows: how many evenly spaced windows are used for validation along the way.
    """

    data: str
    context: int = 64
    split: float = 0.9
    valid_windows: int = 512

    def check(self) -> None:
        """A path, at least one character of context, and something on each side of the split."""
        if not self.data:
            raise self.refuse("data", "the path of a text file")
        if self.context < 1:
            raise self.refuse("context", "1 or more")
        if not 0 < self.split < 1:
            raise self.refuse("split", "a number between 0 and 1", "0.9 trains on the first nine tenths.")
        if self.valid_windows < 1:
            raise self.refuse("valid_windows", "1 or more")

    def prepare(self, seed: int) -> Data:
        """Read the file. Errors: DataError: no text, or too little of it for one window on each side of the split."""
        ids, tokenizer = encode_file(self.data)
        cut = int(len(ids) * self.split)
        do = "Use a longer text, a shorter context or another split."
        _long_enough(self.data, "characters", len(ids), cut, self.context, do)
        return TextData(self.data, seed, ids, tokenizer, cut=cut, context=self.context, sample=self.valid_windows)


@final
class TextData(Data):
    """Encoded text. ids: (N,) in the smallest integer type that holds the vocabulary. cut: where validation starts."""

    def __init__(
        self,
        name: str,
        seed: int,
        ids: Integer[Tensor, " N"],
        tokenizer: Tokenizer,
        *,
        cut: int,
        context: int,
        sample: int,
    ) -> None:
        super().__init__(None, tokenizer, 0, context)
        self.name, self.context, self._sample, self.ids, self.cut = name, context, sample, ids, cut
        windows = max(1, (cut - 1) // context - 1)  # one fewer than fit, so that the start is free to move
        self._order = Order(seed, windows, stride=context, slack=cut - 1 - windows * context)
        self._offsets = torch.arange(context + 1)

    def _batch(self, first: int, size: int) -> Batch:
        return self._windows(self._order.take(first, size))

    def _held_out(self, whole: bool) -> Ints:
        """Starts of windows. Whole: the last window ends with the text, so it may overlap the one before."""
        inside = len(self.ids) - self.cut - 1  # characters to predict
        full = inside // self.context
        starts = np.arange(full) * self.context
        if not whole:
            starts = starts[spread(full, self._sample)]
        elif inside % self.context:
            starts = np.append(starts, inside - self.context)
        return self.cut + starts

    def _held_out_batch(self, rows: Ints) -> Batch:
        batch = self._windows(rows)
        overlap = -(int(rows[-1]) - self.cut) % self.context  # only the last window of all is off the grid
        if not overlap:
            return batch
        targets = batch.targets
        targets[-1, :overlap] = IGNORE  # these were predicted in the window before
        return Batch(batch.inputs, targets, tokens=batch.tokens - overlap)

    def _windows(self, starts: Ints) -> Batch:
        at = torch.from_numpy(starts)[:, None] + self._offsets
        both = self.ids[at]
        return Batch(both[:, :-1].long(), both[:, 1:].long(), tokens=len(starts) * self.context)

    def examples(self, *, whole: bool = False) -> list[tuple[str, str]]:
        """None: a language model has no one right answer."""
        return []

    def describe(self) -> str:
        """One line: file, sizes, tokens."""
        return (
            f"text of {self.name}: {self.cut:,} training and {len(self.ids) - self.cut:,} validation characters, "
            f"vocabulary {self.target.vocab}, windows of {self.context}"
        )

    def _contents(self) -> tuple[Ints, ...]:
        return self.ids.numpy(), np.array([self.cut, self.context])


def other_text(path: str, tokenizer: Tokenizer, *, context: int, sample: int) -> TextData:
    """A file as a model that is there already reads it: in the ids of its tokenizer, nine tenths to learn from.

    Errors: DataError: as `read_pieces`; what the tokenizer does not know; too little for a window on each side.
    """
    ids = torch.tensor(tokenizer.encode("".join(read_pieces(path)), path))
    cut = len(ids) * 9 // 10
    _long_enough(path, "tokens", len(ids), cut, context, "Use a longer text.")
    return TextData(path, 0, ids, tokenizer, cut=cut, context=context, sample=sample)


def _long_enough(name: str, unit: str, count: int, cut: int, context: int, do: str) -> None:
    for part, length in (("training", cut), ("validation", count - cut)):
        if length <= context:
            raise DataError(
                f"{name}: {count:,} {unit} leave {length:,} for {part}, expected at least {context + 1:,} "
                f"(context {context} and one to predict). {do}"
            )


def encode_file(path: str) -> tuple[Integer[Tensor, " N"], CharTokenizer]:
    """Ids of all characters of a file, and the tokenizer that knows them. One pass, one to four bytes a character.

    Characters get provisional ids as they are met and final ones, in the order of code points, at the end.
    Errors: DataError as `read_pieces`.
    """
    provisional = np.full(_CODE_POINTS, -1, dtype=np.int32)
    met = np.empty(0, dtype=np.int64)
    pieces: list[Ints] = []
    for piece in read_pieces(path):
        points = np.frombuffer(piece.encode("utf-32-le"), dtype="<u4")
        ids = provisional[points]
        new = np.unique(points[ids < 0])
        if len(new):
            provisional[new] = np.arange(len(met), len(met) + len(new))
            met = np.concatenate([met, new])
            ids = provisional[points]
        pieces.append(ids.astype(_smallest(len(met))))
    final_ids = np.empty(len(met), dtype=_smallest(len(met)))
    final_ids[np.argsort(met)] = np.arange(len(met))
    out = np.empty(sum(map(len, pieces)), dtype=final_ids.dtype)
    at = 0
    pieces.reverse()
    while pieces:  # each piece is freed as soon as it is copied
        ids = final_ids[pieces.pop()]
        out[at : at + len(ids)] = ids
        at += len(ids)
    return torch.from_numpy(out), CharTokenizer(map(chr, np.sort(met).tolist()), specials=False)


def _smallest(vocab: int) -> type[np.uint8] | type[np.int16] | type[np.int32]:
    """The smallest integer type, of those torch can index, for ids below `vocab`."""
    return np.uint8 if vocab <= 1 << 8 else np.int16 if vocab <= 1 << 15 else np.int32
