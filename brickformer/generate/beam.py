"""Beam search: the best answers by their probability, found side by side.

    score(y) = sum_t ln p(y_t | y_<t, x) / |y|^α    |y|: tokens of the answer, its stop id included; α: length_penalty

At every step the `width` best unfinished answers of a prompt are each continued by every token, and the best of these
stay. One that ends in a stop id and is among the `width` best is finished: it is put aside with its score and is not
extended. Cache rows follow their beams (`State.select`). With as many beams as there are answers the search is
exhaustive; with one it is greedy decoding.

A prompt is done when `width` answers are finished (early=True), or when no unfinished one can still come in among them
(early=False): its sum can only fall, and |y|^α can only grow to its value at the longest length.
Shapes: P prompts, W beams, V vocabulary; rows are (P·W).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from brickformer.errors import BrickError
from brickformer.generate.choose import Constraints, widen
from brickformer.generate.compile import CompileError
from brickformer.generate.feed import Feed, Rows
from brickformer.generate.result import Finish, Generation, Result, Stats
from brickformer.generate.rows import Plan, Row, check_count, check_prompts, not_finite, nothing_allowed, open_rows
from brickformer.generate.sampling import Uniform
from brickformer.generate.settings import GREEDY, UNTIL, Sampling, Stop
from brickformer.generate.writer import Prompt, Writer, evaluating
from brickformer.models import AnyModel
from brickformer.spec import Spec, spec

_STEEPEST: Final = 16  # of α: |y|^α stays a number up to a length of 10^19


@spec("beam")
class Beam(Spec):
    """Beam search.

    width: answers kept side by side. length_penalty: α; 0 is the plain sum, larger favours long answers. early: a
    prompt is done with `width` finished answers; otherwise when no better one can come. best: answers returned.
    """

    width: int = 4
    length_penalty: float = 1.0
    early: bool = True
    best: int = 1

    def check(self) -> None:
        """At least one beam; no more answers than beams."""
        if self.width < 1:
            raise self.refuse("width", "at least 1")
        if not 1 <= self.best <= self.width:
            raise self.refuse("best", f"from 1 to width ({self.width})")
        if abs(self.length_penalty) > _STEEPEST:
            raise self.refuse("length_penalty", f"from -{_STEEPEST} to {_STEEPEST}; 0 to 2 is usual")


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0

    def score(self, penalty: float) -> float:
        return float(self.total / len(self.tokens) ** penalty)


@dataclass(slots=True, eq=False)
class _Search:
    """The search of one prompt. longest: tokens an answer may have."""

    row: Row
    beam: Beam
    longest: int
    live: list[_Hypothesis] = field(default_factory=lambda: [_Hypothesis()])
    finished: list[tuple[float, Finish, _Hypothesis]] = field(default_factory=list)

    def advance(self, candidates: list[tuple[int, _Hypothesis]]) -> list[tuple[int, _Hypothesis]]:
        """Take ranked (parent beam, continuation) pairs; return those that stay."""
        width = self.beam.width
        if not candidates and not self.finished:
            self.fail(nothing_allowed(self.kept()))
        stay: list[tuple[int, _Hypothesis]] = []
        for rank, (parent, hyp) in enumerate(candidates):
            if hyp.tokens[-1] in self.row.plan.stop_ids:
                if rank < width:
                    self._finish("stop", hyp)
            elif len(stay) < width:
                stay.append((parent, hyp))
        self.live = [hyp for _, hyp in stay]
        if self._settled():
            self.live = []
        if self.live and len(self.live[0].tokens) >= self.longest:
            for hyp in self.live:
                self._finish("length", hyp)
            self.live = []
        return stay if self.live else []

    def kept(self) -> Result:
        """The row's result with what the best unfinished answer has."""
        result, best = self.row.result, self.live[0]
        result.tokens, result.logprobs = list(best.tokens), list(best.logprobs)
        return result

    def fail(self, error: BrickError) -> None:
        """End with an error; what was `kept` stays."""
        self.row.end("error", error)
        if self.row.text is not None:
            self.row.result.text = self.row.text.tokenizer.decode(self.row.result.tokens)

    def _finish(self, finish: Finish, hyp: _Hypothesis) -> None:
        self.finished.append((hyp.score(self.beam.length_penalty), finish, hyp))
        self.finished.sort(key=lambda f: -f[0])
        del self.finished[self.beam.width :]

    def _settled(self) -> bool:
        if len(self.finished) < self.beam.width or not self.live:
            return False
        if self.beam.early:
            return True
        alpha = self.beam.length_penalty
        now = len(self.live[0].tokens)
        lengths = (min(now + 1, self.longest), self.longest)
        bound = max(h.total / n**alpha for h in self.live for n in lengths)
        return bound <= self.finished[-1][0]

    def results(self, writer: Writer) -> list[Result]:
        """The best answers, best first; or the error."""
        prompt, out = self.row.result.prompt, []
        for n, (score, finish, hyp) in enumerate(self.finished[: self.beam.best]):
            tokens = list(hyp.tokens)
            told = tokens[:-1] if finish == "stop" else tokens
            text = None if writer.tokenizer is None else writer.tokenizer.decode(told)
            out.append(Result(prompt, n, tokens, list(hyp.logprobs), text, finish, score=score))
        return [self.row.result] if self.row.done else out


def beam_search(
    model: Writer | AnyModel,
    prompts: Sequence[Prompt],
    beam: Beam = Beam(),  # noqa: B008  (a frozen spec)
    stop: Stop = UNTIL,
    constraints: Sampling = GREEDY,
    *,
    batch: int = 32,
    use_cache: bool = True,
) -> Generation:
    """The `beam.best` best answers to each prompt, best first, with their scores.

    constraints: penalties, bans and forced tokens of a greedy Sampling; they change what beams are ranked by.
    batch: rows at once. Errors: BrickError for settings that fit no prompt; a prompt's own error is in its one Result.
    """
    writer = Writer.of(model)
    if not constraints.greedy:
        raise BrickError("beam_search: draws nothing, so it takes temperature=0. Use generate() to sample.")
    if stop.texts:
        raise BrickError("beam_search: answers end with stop.ids; stop.texts are for generate(). Leave them out.")
    plan, stats = Plan.of(writer, constraints, stop), Stats()
    check_prompts(prompts)
    check_count("beam_search", "batch", batch)
    rows = [open_rows(writer, plan, i, prompt, [Uniform(0)])[0] for i, prompt in enumerate(prompts)]
    searches = [_Search(row, beam, plan.room(len(row.given))) for row in rows]
    ready = [search for search in searches if not search.row.done]
    ready.sort(key=lambda search: len(search.row.source or search.row.given))
    at_once = max(1, batch // beam.width)
    with evaluating(writer.model):
        for i in range(0, len(ready), at_once):
            run = _Beams(ready[i : i + at_once], Feed(writer, stats, use_cache=use_cache))
            try:
                run.start()
                while run.searches:
                    run.step()
            except CompileError:
                raise
            except BrickError as e:
                for search in run.searches:
                    search.kept()
                    search.fail(e)
    return Generation([result for search in searches for result in search.results(writer)], stats)


@final
class _Beams:
    """A batch of searches; every search has `width` rows, the unused ones with a score of -inf."""

    def __init__(self, searches: list[_Search], feed: Feed) -> None:
        self.searches, self.feed = searches, feed
        self.plan, self.width, self.device = searches[0].row.plan, searches[0].beam.width, feed.writer.device
        given = [s.row.given for s in searches for _ in range(self.width)]
        self.constraints = Constraints(self.plan.sampling, self.plan.stop, feed.writer.vocab, given, self.device)
        self.ids = torch.empty(0)
        self.left = self.plan.stop.max_tokens

    @torch.inference_mode()
    def start(self) -> None:
        """Read the prompts and take the first step."""
        began, stats = time.perf_counter(), self.feed.stats
        given, sources = self._rows(1)
        logits = self.feed.begin(given, sources, self.left)
        rows = torch.arange(len(given), device=self.device).repeat_interleave(self.width)
        if self.width > 1:
            self.feed.select(rows)
        self._advance(logits[rows])
        stats.prompt_tokens += sum(map(len, given if sources is None else sources))
        stats.prompt_s += time.perf_counter() - began

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for every beam."""
        began, compiling, stats = time.perf_counter(), self.feed.compile_s, self.feed.stats
        stats.decode_tokens += len(self.searches)
        self._advance(self.feed.next(self.ids, lambda: self._rows(self.width), self.left))
        compiling = self.feed.compile_s - compiling
        stats.steps += 1
        stats.calls += 1
        stats.compile_s += compiling
        stats.decode_s += time.perf_counter() - began - compiling

    def _rows(self, width: int) -> tuple[Rows, Rows | None]:
        """What every beam has read so far, and its source."""
        rows = [
            [*s.row.given, *(s.live[i].tokens if i < len(s.live) else s.live[0].tokens)]
            for s in self.searches
            for i in range(width)
        ]
        sources = [s.row.source for s in self.searches for _ in range(width) if s.row.source is not None]
        return rows, sources or None

    def _advance(self, logits: Float[Tensor, "PW V"]) -> None:
        """Continue every beam by every token, and keep the best."""
        W, V = self.width, logits.shape[-1]
        logits = widen(logits)
        norm = logits.logsumexp(-1, keepdim=True)
        logprobs = logits - norm
        unused = [-torch.inf] * W
        totals = [[h.total for h in s.live] + unused[len(s.live) :] for s in self.searches]
        ranked = logits.new_tensor(totals).view(-1, 1) + self.constraints(logprobs)
        broken = ~norm.isfinite()
        ranked = ranked.masked_fill(broken, -torch.inf)
        most = min(W * (1 + len(self.plan.stop_ids)), W * V)
        values, at = largest(ranked.view(-1, W * V), most)
        raw = logprobs.view(-1, W * V).gather(1, at).tolist()
        ids, best, bad = at.tolist(), values.tolist(), broken.view(-1, W).tolist()
        parents: list[int] = []
        staying: list[_Search] = []
        for p, search in enumerate(self.searches):
            if any(bad[p][: len(search.live)]):
                search.fail(not_finite(search.kept()))
                continue
            candidates = []
            for value, index, logprob in zip(best[p], ids[p], raw[p], strict=True):
                if value > -torch.inf:
                    h = search.live[index // V]
                    made = _Hypothesis((*h.tokens, index % V), (*h.logprobs, logprob), value)
                    candidates.append((index // V, made))
            stay = search.advance(candidates)
            if stay:
                staying.append(search)
                parents += [p * W + parent for parent, _ in stay] + [p * W] * (W - len(stay))
        self._follow(staying, parents)

    def _follow(self, searches: list[_Search], parents: list[int]) -> None:
        """Rows follow their beams; rows of searches that are done leave."""
        unmoved = parents == list(range(len(self.searches) * self.width))
        self.searches = searches
        self.left -= 1
        if not searches:
            return
        if not unmoved:
            self.feed.select(torch.tensor(parents, device=self.device))
            self.constraints.select(parents)
        last = [s.live[i if i < len(s.live) else 0].tokens[-1] for s in searches for i in range(self.width)]
        tokens = torch.tensor(last, device=self.device)
        self.constraints.add(tokens, last)
        self.ids = tokens[:, None]


def largest(x: Float[Tensor, "P N"], k: int) -> tuple[Float[Tensor, "P k"], Int[Tensor, "P k"]]:
    """The k largest of each row and where they are; of equal ones the first, as `best` has it: topk says not which."""
    values, at = x.topk(min(k + 1, x.shape[-1]))
    tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -torch.inf)).any(-1)
    values, at = values[:, :k], at[:, :k]
    for row in tied.nonzero()[:, 0].tolist():
        among = (x[row] >= values[row, -1]).nonzero()[:, 0]  # in their order
        values[row], order = (part[:k] for part in x[row, among].sort(descending=True, stable=True))
        at[row] = among[order]
    return values, at
