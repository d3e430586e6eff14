"""Scores against one call of the model for every token, and against what generation reports."""

from __future__ import annotations

import math

import pytest
import torch
from generate.worlds import PROMPTS, WRITERS, Letters, decoder, encoder_decoder, next_logits

from brickformer.errors import BrickError
from brickformer.generate import GREEDY, Stop, Writer, generate, score

ANSWERS = [[1, 2, 3, 4], [16], [0, 0, 5], [7] * 6]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("batch", [1, 3, 32])
def test_each_token_is_scored_after_those_before_it(kind: str, batch: int) -> None:
    writer = WRITERS[kind]()
    scores = score(writer, PROMPTS, ANSWERS, batch=batch)
    for prompt, answer, made in zip(PROMPTS, ANSWERS, scores, strict=True):
        expected = [next_logits(writer, prompt, answer[:i]).log_softmax(-1)[t].item() for i, t in enumerate(answer)]
        assert made.tokens == answer
        assert made.logprobs == pytest.approx(expected, abs=1e-9)
        assert made.logprob == pytest.approx(sum(expected)) and made.error is None
        assert made.perplexity == pytest.approx(math.exp(-sum(expected) / len(answer)))


def test_generated_answers_have_the_score_they_report() -> None:
    writer = Writer(encoder_decoder(), start=[1])
    made = generate(writer, PROMPTS, GREEDY, Stop(max_tokens=8, ids=(3,))).results
    for result, scored in zip(made, score(writer, PROMPTS, [r.tokens for r in made]), strict=True):
        assert scored.logprobs == pytest.approx(result.logprobs, abs=1e-9)


def test_a_text_alone_is_scored_from_its_second_token() -> None:
    writer = Writer(decoder(), Letters())
    whole = score(writer, ["bcdefg", "ha"])
    parts = score(writer, ["b", "h"], ["cdefg", "a"])
    assert [s.tokens for s in whole] == [[3, 4, 5, 6, 7], [1]]
    assert [s.logprobs for s in whole] == [pytest.approx(s.logprobs) for s in parts]


def test_what_cannot_be_scored_has_an_error_and_the_others_go_on() -> None:
    """The last token need not be read, so a text may be one token longer than the model's limit."""
    model = decoder()
    with torch.no_grad():
        model.embed.tokens.weight[16] = torch.nan
    writer = Writer(model, max_len=5)
    prompts = [[1, 2], [], [1], [1], [1, 2, 3], [1, 2, 3], [16]]
    answers = [[3], [3], [99], [], [4, 5, 6], [4, 5, 6, 7], [3]]
    scores = score(writer, prompts, answers)
    errors = [str(s.error) if s.error else None for s in scores]
    assert errors[0] is None and errors[4] is None
    for at, message in ((1, "empty"), (2, "got id 99"), (3, "no token to score"), (5, "7 tokens"), (6, "not finite")):
        assert message in str(errors[at]) and math.isnan(scores[at].perplexity)
    log = next_logits(Writer(decoder()), [1, 2], []).log_softmax(-1)[3].item()
    assert scores[0].logprobs == [pytest.approx(log)]
    assert "no token to score" in str(score(writer, [[1]])[0].error)


def test_prompts_and_answers_must_pair_up() -> None:
    with pytest.raises(BrickError, match="2 answers for 1 prompts"):
        score(decoder(), [[1]], [[1], [2]])
    with pytest.raises(BrickError, match="needs answers"):
        score(Writer(encoder_decoder(), start=[1]), [[1]])
