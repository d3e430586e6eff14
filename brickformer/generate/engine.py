"""Engine: prompts in, answers out; one step is one call of the model for all rows that still write.

    start   every prompt is read once, left padded; its state is copied to the samples asked for
    step    the tokens chosen last are fed, a token is chosen for each row, and rows that finish leave the batch

Without the cache (`use_cache=False`) the decoder reads everything again at every step: the same tokens, for comparison.
The memory of an encoder is computed once either way.
Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, final

import torch
from jaxtyping import Float
from torch import Tensor

from brickformer.errors import BrickError
from brickformer.generate.choose import Chooser, Constraints
from brickformer.generate.compile import CompileError
from brickformer.generate.feed import Feed, Feeding, Rows
from brickformer.generate.prefix import Prefix
from brickformer.generate.result import Generation, Stats
from brickformer.generate.rows import Plan, Row, check_count, check_prompts, open_rows
from brickformer.generate.sampling import Uniform
from brickformer.generate.settings import GREEDY, UNTIL, Sampling, Stop
from brickformer.generate.writer import Prompt, Writer, evaluating
from brickformer.models import AnyModel

SAMPLES: Final = 2**20  # answers to a prompt in one call: all are kept until it returns
_LEAVE: Final = 8  # finished rows leave once they are an eighth of the batch: to leave is a copy of the whole cache


def generate(
    model: Writer | AnyModel,
    prompts: Sequence[Prompt],
    sampling: Sampling = GREEDY,
    stop: Stop = UNTIL,
    *,
    samples: int = 1,
    seeds: Sequence[int] | None = None,
    batch: int = 32,
    prefix: Prefix | None = None,
    use_cache: bool = True,
) -> Generation:
    """Answers to prompts: `samples` of each, in order.

    prompts: ids, or texts for the writer's tokenizer; of a decoder the text so far, of an encoder-decoder the source.
    seeds: one a prompt, instead of sampling.seed for all. batch: rows at once; a prompt with more samples than that is
    read again for every so many. prefix: a prompt read before, which every prompt goes on from. A prompt that cannot be
    answered has a Result with the error; the others go on.
    Errors: BrickError for settings that fit no prompt.
    """
    writer = Writer.of(model)
    plan, stats = Plan.of(writer, sampling, stop), Stats()
    check_prompts(prompts, seeds)
    check_count("generate", "samples", samples, most=SAMPLES)
    check_count("generate", "batch", batch)
    if prefix is not None:
        prefix.check(writer)
    rows: list[list[Row]] = []
    for i, prompt in enumerate(prompts):
        seed = sampling.seed if seeds is None else seeds[i]
        uniforms = [Uniform(seed, n) for n in range(samples)]
        rows.append(open_rows(writer, plan, i, prompt, uniforms, prefix))
    ready = [made for made in rows if not made[0].done]
    ready.sort(key=lambda made: len(made[0].source or made[0].given))  # prompts of like length need little padding
    at_once = max(1, batch // samples)
    with evaluating(writer.model):
        for i in range(0, len(ready), at_once):
            for first in range(0, samples, batch):  # more than once only for a prompt of more samples than fit
                part = [made[first : first + batch] for made in ready[i : i + at_once]]
                run = Decoding([row for made in part for row in made], Feed(writer, stats, use_cache=use_cache))
                run.start(len(part[0]), prefix)
                while run.lanes:
                    run.step()
    return Generation([row.result for made in rows for row in made], stats)


@final
class Decoding:
    """A batch in progress: `start` once, then `step` while there are `lanes`."""

    def __init__(self, rows: list[Row], feed: Feeding) -> None:
        self.lanes, self.feed, self.stats = rows, feed, feed.stats
        plan, self.device = rows[0].plan, feed.writer.device
        given = [row.given for row in rows]
        constraints = Constraints(plan.sampling, plan.stop, feed.writer.vocab, given, self.device)
        self.chooser = Chooser(constraints, [row.uniform for row in rows])
        self.left = plan.stop.max_tokens  # tokens still to come, at most
        self.ids = torch.empty(0)  # (B, 1) tokens chosen last

    @torch.inference_mode()
    def start(self, samples: int = 1, prefix: Prefix | None = None) -> None:
        """Read the prompts and choose every row's first token. Rows come in groups of `samples` with one prompt."""
        began = time.perf_counter()
        firsts = self.lanes[::samples]
        given, sources = [row.given for row in firsts], _sources(firsts)
        known = 0  # tokens of a row that the prefix has read
        try:
            if prefix is not None and self.feed.use_cache and max(map(len, given)) <= prefix.max_len:
                known = len(prefix.tokens)
                logits = self.feed.begin_at(prefix, [tokens[known:] for tokens in given])
            else:
                logits = self.feed.begin(given, sources, self.left)
        except BrickError as e:
            self._fail(e)
            return
        if samples > 1:
            rows = torch.arange(len(firsts), device=self.device).repeat_interleave(samples)
            logits = logits[rows]
            self.feed.select(rows)
        self._choose(logits)
        read = given if sources is None or known else sources
        self.stats.prompt_tokens += sum(map(len, read)) - known * len(given)
        self.stats.prompt_s += time.perf_counter() - began
        self._leave()

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for every row."""
        began, compiling = time.perf_counter(), self.feed.compile_s
        writing = sum(not row.done for row in self.lanes)
        try:
            logits = self.feed.next(self.ids, self._rows, self.left)
        except CompileError:
            raise
        except BrickError as e:
            self._fail(e)
            return
        self._choose(logits)
        self.stats.steps += 1
        self.stats.calls += 1
        self.stats.decode_tokens += writing
        compiling = self.feed.compile_s - compiling
        self.stats.compile_s += compiling
        self.stats.decode_s += time.perf_counter() - began - compiling
        self._leave()

    def _rows(self) -> tuple[Rows, Rows | None]:
        return [row.all for row in self.lanes], _sources(self.lanes)

    def _choose(self, logits: Float[Tensor, "B V"]) -> None:
        tokens, listed, logprobs = self.chooser(logits)
        self.ids = tokens[:, None]
        self.left -= 1
        for row, token, logprob in zip(self.lanes, listed, logprobs, strict=True):
            if not row.done:
                row.record(token, logprob)

    def _leave(self) -> None:
        """Finished rows leave the batch when they are enough to be worth the copy, or when all is read again anyway."""
        live = [i for i, row in enumerate(self.lanes) if not row.done]
        gone = len(self.lanes) - len(live)
        if gone == 0 or (live and gone * _LEAVE < len(self.lanes) and not self.feed.full):
            return
        self.lanes = [self.lanes[i] for i in live]
        if live:
            index = torch.tensor(live, device=self.device)
            self.feed.select(index)
            self.ids = self.ids[index]
            self.chooser.select(live)

    def _fail(self, error: BrickError) -> None:
        for row in self.lanes:
            if not row.done:
                row.end("error", error)
        self.lanes = []


def _sources(rows: list[Row]) -> Rows | None:
    """The sources of rows that have one (all or none do)."""
    sources = [row.source for row in rows if row.source is not None]
    return sources or None
