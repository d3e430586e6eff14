"""Rows: the answers being written, and when each of them ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from brickformer.errors import BrickError, RunError, SpecError
from brickformer.generate.prefix import Prefix
from brickformer.generate.result import Finish, Result
from brickformer.generate.sampling import Uniform
from brickformer.generate.settings import Sampling, Stop
from brickformer.generate.text import Detokenizer
from brickformer.generate.writer import Prompt, Writer


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """What holds for every row of a call. limit: the most tokens the decoder is fed in a row."""

    sampling: Sampling
    stop: Stop
    limit: int | None
    stop_ids: frozenset[int]

    @classmethod
    def of(cls, writer: Writer, sampling: Sampling, stop: Stop) -> Plan:
        """The plan. Errors: BrickError for settings that fit no prompt."""
        sampling.check_vocab(writer.vocab)
        stop.check_vocab(writer.vocab)
        if stop.texts and writer.tokenizer is None:
            raise BrickError("stop.texts: got strings, but no tokenizer to write text. Give Writer(model, tokenizer).")
        _check_forced(sampling.forced, stop)
        return cls(sampling, stop, writer.limit, frozenset(stop.ids))

    def room(self, given: int) -> int:
        """The most tokens of an answer after `given` tokens: the last one need not be fed any more."""
        most = self.stop.max_tokens
        return most if self.limit is None else max(0, min(most, self.limit + 1 - given))


@final
@dataclass(slots=True, eq=False)
class Row:
    """One answer being written. given: tokens of the decoder before it; source: of the encoder."""

    result: Result
    plan: Plan
    uniform: Uniform
    given: list[int]
    source: list[int] | None = None
    text: Detokenizer | None = None
    done: bool = False

    @property
    def all(self) -> list[int]:
        """Every token of the decoder so far."""
        return [*self.given, *self.result.tokens]

    def record(self, token: int, logprob: float) -> None:
        """Note a token (-1: none is allowed) and its ln p, and whether the answer ends with it."""
        result, plan = self.result, self.plan
        forced = len(result.tokens) < len(plan.sampling.forced)  # even a token that the model calls impossible
        if not math.isfinite(logprob) and not (logprob == -math.inf and (forced or token < 0)):
            self.end("error", not_finite(result))
            return
        if token < 0:
            self.end("error", nothing_allowed(result))
            return
        result.tokens.append(token)
        result.logprobs.append(logprob)
        if token in plan.stop_ids or self._says_stop(token):
            self.end("stop")
        elif self.done:  # the tokenizer does not know the token
            return
        elif len(result.tokens) >= plan.room(len(self.given)):
            self.end("length")

    def end(self, finish: Finish, error: BrickError | None = None) -> None:
        """No more tokens."""
        self.done, self.result.finish, self.result.error = True, finish, error
        if self.text is not None:
            self.text.finish()
            self.result.text = self.text.text

    def _says_stop(self, token: int) -> bool:
        """Write the text of a token; True when it completes a stop string."""
        if self.text is None:
            return False
        try:
            self.text.push(token)
        except BrickError as e:
            self.result.text, self.text = self.text.text, None
            self.end("error", e)
            return False
        return self.text.stopped


def open_rows(
    writer: Writer, plan: Plan, index: int, prompt: Prompt, uniforms: Sequence[Uniform], prefix: Prefix | None = None
) -> list[Row]:
    """The rows of one prompt, one a generator of random numbers; already ended when the prompt cannot be answered."""
    rows = [Row(Result(index, n), plan, uniform, []) for n, uniform in enumerate(uniforms)]
    try:
        given, source = writer.given(prompt) if prefix is None else prefix.given(writer, prompt)
    except BrickError as e:
        for row in rows:
            row.end("error", e)
        return rows
    for row in rows:
        row.given, row.source = given, source
        row.text = None if writer.tokenizer is None else Detokenizer(writer.tokenizer, plan.stop.texts)
    return rows


def _check_forced(forced: Sequence[int], stop: Stop) -> None:
    """Errors: SpecError for forced tokens of which some could never be written."""
    if len(forced) > stop.max_tokens:
        raise SpecError(
            f"sampling.forced: got {len(forced)} tokens for an answer of at most {stop.max_tokens} (stop.max_tokens). "
            f"Raise it."
        )
    for at, token in enumerate(forced, 1):
        if token in stop.ids and at < max(len(forced), stop.min_tokens):
            raise SpecError(
                f"sampling.forced: token {at} is {token}, at which an answer ends, but there is more to come (forced "
                f"tokens, or stop.min_tokens). Put it last."
            )


def check_prompts(prompts: Sequence[Prompt], seeds: Sequence[int] | None = None) -> None:
    """Errors: BrickError for one text in place of a list of prompts, and for seeds that are not one each."""
    if isinstance(prompts, str):
        raise BrickError("generate: got one text, expected a list of prompts. Write [prompt].")
    if not isinstance(prompts, Iterable):
        raise BrickError(f"generate: got {prompts!r:.50}, expected a list of prompts, each a text or ids.")
    if isinstance(prompts, Sequence) and any(isinstance(prompt, int) for prompt in prompts):
        raise BrickError("generate: got ids, expected a list of prompts. Write [ids].")
    if seeds is not None and len(seeds) != len(prompts):
        raise BrickError(f"generate: got {len(seeds)} seeds for {len(prompts)} prompts, expected one each.")


def check_count(where: str, name: str, value: int, *, most: int | None = None) -> None:
    """Errors: BrickError for what is no count of at least 1, at most `most`."""
    if type(value) is not int or value < 1:
        raise BrickError(f"{where}: got {name}={value!r}, expected a whole number, at least 1.")
    if most is not None and value > most:
        raise BrickError(f"{where}: got {name}={value}, expected at most {most:,} in one call. Ask more than once.")


def not_finite(result: Result) -> RunError:
    """The error of a row whose logits hold NaN or infinity."""
    return RunError(
        f"prompt {result.prompt + 1}: the logits of token {len(result.tokens) + 1} are not finite, so nothing can be "
        f"chosen. Are the weights NaN, or the numbers too large for the model's type?"
    )


def nothing_allowed(result: Result) -> RunError:
    """The error of a row whose constraints contradict each other."""
    return RunError(
        f"prompt {result.prompt + 1}: no token is allowed as token {len(result.tokens) + 1}: bans and no_repeat_ngram "
        f"leave none. Loosen them."
    )
