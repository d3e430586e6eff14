"""Score: how probable a text is under a model, token by token.

    ln p(y | x) = sum_t ln p(y_t | y_<t, x)              perplexity = exp(-ln p / |y|)

One call of the model for a batch of texts (teacher forcing), not one a token.
Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from brickformer.errors import BrickError, DataError, RunError
from brickformer.generate.choose import widen
from brickformer.generate.rows import check_count, check_prompts
from brickformer.generate.writer import Prompt, Writer, evaluating
from brickformer.models import AnyModel


@dataclass(slots=True)
class Score:
    """tokens: of the answer. logprobs: ln p of each, given what is before it. error: why there are none."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: BrickError | None = None

    @property
    def logprob(self) -> float:
        """ln p of the whole answer."""
        return sum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean surprise; nan without tokens."""
        return math.exp(-self.logprob / len(self.logprobs)) if self.logprobs else math.nan


def score(
    model: Writer | AnyModel,
    prompts: Sequence[Prompt],
    answers: Sequence[Prompt] | None = None,
    *,
    batch: int = 32,
) -> list[Score]:
    """ln p of each answer after its prompt; of a decoder without answers, of each prompt from its second token on.

    An answer is scored as it is given: end it with a stop id to score the ending too. A pair that cannot be scored has
    a Score with the error. Errors: BrickError when there are not as many answers as prompts.
    """
    writer = Writer.of(model)
    check_prompts(prompts)
    check_count("score", "batch", batch)
    if answers is None and writer.encoder is not None:
        raise BrickError("score: an encoder-decoder needs answers to score: score(writer, sources, answers).")
    if answers is not None and len(answers) != len(prompts):
        raise BrickError(f"score: got {len(answers)} answers for {len(prompts)} prompts, expected one each.")
    scores = [Score() for _ in prompts]
    ready: list[tuple[Score, list[int], list[int] | None]] = []
    for i, made in enumerate(scores):
        try:
            given, source = writer.given(prompts[i])
            if answers is None:
                given, made.tokens = given[:1], given[1:]
            else:
                made.tokens = writer.more_ids(answers[i], len(given), last_is_fed=False)
            if not made.tokens:
                raise DataError("score: there is no token to score. Give a longer text, or an answer.")
            ready.append((made, [*given, *made.tokens[:-1]], source))
        except BrickError as e:
            made.error = e
    with evaluating(writer.model):
        for i in range(0, len(ready), batch):
            _score(writer, ready[i : i + batch])
    return scores


@torch.inference_mode()
def _score(writer: Writer, pairs: list[tuple[Score, list[int], list[int] | None]]) -> None:
    sources = [source for _, _, source in pairs if source is not None]
    memory = writer.read(sources) if sources else None
    ids, at = writer.pack([fed for _, fed, _ in pairs])
    h = writer.decoder.hidden(ids, at, None, memory)
    longest = max(len(made.tokens) for made, _, _ in pairs)
    log = widen(writer.decoder.logits(h[:, -longest:])).log_softmax(-1)  # (B, longest, V)
    for row, (made, _, _) in zip(log, pairs, strict=True):
        tokens = torch.tensor(made.tokens, device=row.device)
        made.logprobs = row[-len(tokens) :].gather(1, tokens[:, None])[:, 0].tolist()
        if any(math.isnan(x) for x in made.logprobs):
            made.logprobs = []
            made.error = RunError("score: the logits are not finite. Are the weights NaN?")
