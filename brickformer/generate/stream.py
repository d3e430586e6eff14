"""Streaming: the answer as an iterator of text pieces, each as soon as it is certain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from brickformer.errors import BrickError
from brickformer.generate.engine import Decoding
from brickformer.generate.feed import Feed
from brickformer.generate.prefix import Prefix
from brickformer.generate.result import Result, Stats
from brickformer.generate.rows import Plan, Row, open_rows
from brickformer.generate.sampling import Uniform
from brickformer.generate.settings import GREEDY, UNTIL, Sampling, Stop
from brickformer.generate.writer import Prompt, Writer, evaluating


@final
class Stream(Iterator[str]):
    """Text pieces; their sum is the answer's text. result: the answer so far, whole after the last piece."""

    def __init__(self, writer: Writer, row: Row, stats: Stats, prefix: Prefix | None) -> None:
        self.result: Result = row.result
        self.stats = stats
        self._writer, self._row, self._prefix = writer, row, prefix
        self._evaluating = evaluating(writer.model)
        self._run: Decoding | None = None
        self._sent = 0

    def __next__(self) -> str:
        while True:
            written = "" if self._row.text is None else self._row.text.text
            if len(written) > self._sent:
                piece, self._sent = written[self._sent :], len(written)
                return piece
            if self._row.done:
                raise StopIteration
            with self._evaluating:
                if self._run is None:
                    self._run = Decoding([self._row], Feed(self._writer, self.stats))
                    self._run.start(prefix=self._prefix)
                else:
                    self._run.step()


def stream(
    model: Writer,
    prompt: Prompt,
    sampling: Sampling = GREEDY,
    stop: Stop = UNTIL,
    *,
    prefix: Prefix | None = None,
) -> Stream:
    """One answer, piece by piece; the same text as `generate` gives. A prompt that cannot be answered gives no piece,
    and a result with the error. Errors: BrickError without a tokenizer, and for settings that fit no prompt."""
    writer = Writer.of(model)
    if writer.tokenizer is None:
        raise BrickError("stream: there is no tokenizer to write text. Give Writer(model, tokenizer).")
    if prefix is not None:
        prefix.check(writer)
    plan = Plan.of(writer, sampling, stop)
    row = open_rows(writer, plan, 0, prompt, [Uniform(sampling.seed)], prefix)[0]
    return Stream(writer, row, Stats(), prefix)
