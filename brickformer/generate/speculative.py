"""Speculative decoding: a cheap draft guesses some tokens, the model checks them all in one call (arXiv 2211.17192).

    accept d ~ q with probability min(1, p(d) / q(d));  at the first refusal draw from max(p - q, 0), normalised

so the tokens are distributed as if the model had drawn each one itself; greedy decoding gives the very same tokens.
After k accepted guesses one more token comes from the same call. The state is rewound to what was accepted; one that
cannot rewind (recurrent, a ring) is copied before each round, and reads the accepted tokens again after a refusal.

Drafts: a smaller model with the same tokens, or `PromptLookup`: what followed the last time the same words occurred.
Shapes: T tokens, V vocabulary; one row at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from brickformer.errors import BrickError
from brickformer.generate import sampling as f
from brickformer.generate.choose import Choice, Constraints, widen
from brickformer.generate.draft import Draft, LookupDraft, ModelDraft, NoDraft, PromptLookup, Reader
from brickformer.generate.result import Generation, Stats
from brickformer.generate.rows import Plan, Row, check_count, check_prompts, open_rows
from brickformer.generate.settings import GREEDY, UNTIL, Sampling, Stop
from brickformer.generate.writer import Prompt, Writer, evaluating
from brickformer.models import AnyModel


def speculate(
    model: Writer | AnyModel,
    prompts: Sequence[Prompt],
    draft: AnyModel | PromptLookup,
    sampling: Sampling = GREEDY,
    stop: Stop = UNTIL,
    *,
    ahead: int = 4,
    seeds: Sequence[int] | None = None,
) -> Generation:
    """Answers as `generate` gives them, one prompt after another: greedy the same tokens, drawn the same distribution.

    draft: a model of the same kind and vocabulary, or PromptLookup. ahead: guesses a round. Stats say how many were
    accepted. Errors: BrickError for a draft that does not fit, and for settings that fit no prompt.
    """
    writer = Writer.of(model)
    plan, stats = Plan.of(writer, sampling, stop), Stats()
    check_prompts(prompts, seeds)
    check_count("speculate", "ahead", ahead)
    helper = None if isinstance(draft, PromptLookup) else _same_kind(writer, draft)
    results = []
    with evaluating(writer.model), evaluating(writer.model if helper is None else helper.model):
        for i, prompt in enumerate(prompts):
            uniform = f.Uniform(sampling.seed if seeds is None else seeds[i])
            row = open_rows(writer, plan, i, prompt, [uniform])[0]
            if not row.done:
                guess: Draft
                if isinstance(draft, PromptLookup):
                    guess = LookupDraft(draft, row)
                else:
                    drafting = _same_kind(writer, draft)
                    guess = ModelDraft(drafting, row) if drafting.reads(row.source) else NoDraft()
                try:
                    _decode(writer, row, guess, ahead, stats)
                except BrickError as e:
                    row.end("error", e)
            results.append(row.result)
    return Generation(results, stats)


def _same_kind(writer: Writer, draft: AnyModel) -> Writer:
    if type(draft) is not type(writer.model):
        raise BrickError("speculate: model and draft must both be decoders, or both encoder-decoders.")
    made = Writer(draft, start=writer.start)
    if made.vocab != writer.vocab:
        raise BrickError(f"speculate: the draft knows {made.vocab} tokens, the model {writer.vocab}; expected as many.")
    if made.encoder is not None and writer.encoder is not None:
        known, needed = made.encoder.spec.vocab, writer.encoder.spec.vocab
        if known != needed:
            raise BrickError(f"speculate: the draft's encoder knows {known} tokens, the model's {needed}; not as many.")
    return made


@torch.inference_mode()
def _decode(writer: Writer, row: Row, guess: Draft, ahead: int, stats: Stats) -> None:
    began = time.perf_counter()
    reader = Reader(writer, row, ahead)
    choice = Choice(
        Constraints(row.plan.sampling, row.plan.stop, writer.vocab, [row.given], writer.device), row.uniform
    )
    logits = reader.read(row.given)[-1:]
    _take(row, choice, logits, choice.token(choice.next(logits)))
    stats.prompt_tokens += len(row.given if row.source is None else row.source)
    stats.prompt_s += time.perf_counter() - began
    began = time.perf_counter()
    while not row.done:
        tokens = row.all
        left = min(ahead, row.plan.room(len(row.given)) - len(row.result.tokens) - 1)
        guesses, q = guess.guess(left) if left > 0 else ([], None)
        reader.mark()
        logits = widen(reader.read([tokens[-1], *guesses]))  # (1 + guesses, V)
        taken = _verify(row, choice, logits, guesses, q)
        reader.keep(len(tokens) + taken)
        written = len(row.all) - len(tokens)
        stats.calls += 1
        stats.steps += written
        stats.decode_tokens += written
        stats.proposed += len(guesses)
        stats.accepted += taken
    stats.decode_s += time.perf_counter() - began
    stats.cache_bytes = max(stats.cache_bytes, reader.state.nbytes + guess.nbytes)


def _verify(row: Row, choice: Choice, logits: Tensor, guesses: list[int], q: Tensor | None) -> int:
    """Take guesses while they are accepted, then one more token; the number of accepted guesses."""
    for i, token in enumerate(guesses):
        p = choice.next(logits[i : i + 1])
        if not choice.accepts(p, None if q is None else q[i : i + 1], token):
            _take(row, choice, logits[i : i + 1], choice.instead(p, None if q is None else q[i : i + 1], token))
            return i
        _take(row, choice, logits[i : i + 1], token)
        if row.done:
            return i + 1
    _take(row, choice, logits[-1:], choice.token(choice.next(logits[-1:])))
    return len(guesses)


def _take(row: Row, choice: Choice, logits: Float[Tensor, "1 V"], token: int) -> None:
    """Write a token into the row, with its ln p."""
    wide = widen(logits)
    row.record(token, (wide[0, token] - wide[0].logsumexp(-1)).item())
    choice.constraints.add(torch.tensor([max(token, 0)], device=logits.device), [max(token, 0)])
