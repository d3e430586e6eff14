"""Bad input to generation: an error for the row, and the others go on; what fits no row is refused at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from generate.worlds import PROMPTS, VOCAB, Letters, decoder, encoder_decoder, naive_greedy
from torch import nn

from brickformer.embed import Embed
from brickformer.errors import BrickError, DataError, RunError
from brickformer.feedforward import MLP
from brickformer.generate import GREEDY, Generation, Sampling, Stop, Writer, generate
from brickformer.layers import Layer
from brickformer.mask import FULL
from brickformer.mixers.attention import Attention
from brickformer.models import Encoder
from brickformer.positions import Learned

DRAWN = Sampling(temperature=1.0, seed=5)


def tokens(made: Generation) -> list[list[int]]:
    return [result.tokens for result in made.results]


BAD: dict[str, tuple[list[int], str]] = {
    "empty": ([], "empty"),
    "past the vocabulary": ([1, VOCAB], f"token 2: got id {VOCAB}, expected 0 to {VOCAB - 1}"),
    "negative": ([-1], "token 1: got id -1"),
    "too long": ([1] * 33, "33 tokens, expected at most 32"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_a_bad_prompt_has_an_error_and_the_others_go_on(case: str, kind: str) -> None:
    bad, message = BAD[case]
    if kind == "decoder":
        writer = Writer(decoder(Attention(heads=4), embed=Embed(position=Learned(max_len=32))))
    else:
        writer = Writer(encoder_decoder(), start=[1])
    made = generate(writer, [PROMPTS[0], bad, PROMPTS[1]], GREEDY, Stop(max_tokens=5))
    assert tokens(made) == [naive_greedy(writer, PROMPTS[0], 5)[0], [], naive_greedy(writer, PROMPTS[1], 5)[0]]
    result = made.results[1]
    assert result.finish == "error" and isinstance(result.error, DataError) and message in str(result.error)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, Sampling(temperature=1.0, top_p=0.9), Sampling(banned=(2,))])
def test_logits_that_are_not_finite_end_their_row_only(value: float, sampling: Sampling) -> None:
    """The vector of one token is broken, so that only the row which reads it is."""
    model = decoder()
    writer, stop = Writer(model), Stop(max_tokens=5)
    prompts = [[3, 4], [16, 5], [6]]
    sampling = sampling.but(banned=(*sampling.banned, 16))  # nobody writes it
    expected = tokens(generate(writer, prompts, sampling, stop))
    with torch.no_grad():
        model.embed.tokens.weight[16] = value
    made = generate(writer, prompts, sampling, stop)
    assert tokens(made) == [expected[0], [], expected[2]]
    assert isinstance(made.results[1].error, RunError) and "not finite" in str(made.results[1].error)
    assert [r.finish for r in made.results] == ["length", "error", "length"]


def test_an_infinite_logit_is_not_finite_even_where_its_token_is_banned() -> None:
    model = decoder()
    model.head.project.bias = nn.Parameter(torch.zeros(VOCAB, dtype=torch.float64))
    with torch.no_grad():
        model.head.project.bias[3] = torch.inf
    for sampling in (Sampling(banned=(3,)), Sampling(temperature=1.0, banned=(3,)), GREEDY):
        assert "not finite" in str(generate(model, [[1]], sampling, Stop(max_tokens=3)).results[0].error)


def test_a_row_without_an_allowed_token_ends_and_the_others_go_on() -> None:
    """No token may come twice: the row whose prompt has most of them runs out first."""
    writer = Writer(decoder())
    prompts = [list(range(14)), [0], [5, 6]]
    for sampling in (Sampling(no_repeat_ngram=1), Sampling(no_repeat_ngram=1, temperature=1.0)):
        made = generate(writer, prompts, sampling, Stop(max_tokens=10))
        assert [len(t) for t in tokens(made)] == [3, 10, 10]
        assert sorted(tokens(made)[0]) == [14, 15, 16]
        assert "no token is allowed as token 4" in str(made.results[0].error)
        assert made.results[1].error is None and len(set(tokens(made)[1])) == 10


def test_an_impossible_forced_token_is_written_all_the_same() -> None:
    """Its ln p says that the model would not have."""
    model = decoder()
    model.head.project.bias = nn.Parameter(torch.zeros(VOCAB, dtype=torch.float64))
    with torch.no_grad():
        model.head.project.bias[3] = -torch.inf
    result = generate(model, [[1]], Sampling(forced=(3,)), Stop(max_tokens=2)).results[0]
    assert result.tokens[0] == 3 and result.logprobs[0] == -torch.inf and result.error is None


def test_an_unknown_character_is_an_error_of_its_row() -> None:
    class Strict(Letters):
        def encode(self, text: str) -> list[int]:
            if "?" in text:
                raise DataError("text, character 1: got '?'.")
            return super().encode(text)

    made = generate(Writer(decoder(), Strict()), ["bc", "?", ""], GREEDY, Stop(max_tokens=3))
    assert [r.finish for r in made.results] == ["length", "error", "error"]
    assert "'?'" in str(made.results[1].error) and "empty" in str(made.results[2].error)


def test_a_token_that_the_tokenizer_does_not_know_ends_its_row() -> None:
    """A model may have more tokens than its tokenizer has words for."""

    class Small(Letters):
        def decode(self, ids: Iterable[int]) -> str:
            ids = list(ids)
            if 16 in ids:
                raise DataError("decode: got id 16.")
            return super().decode(ids)

    made = generate(Writer(decoder(), Small()), [[3], [4]], Sampling(forced=(5, 6)), Stop(max_tokens=4)).results
    assert all(r.error is None for r in made)
    made = generate(Writer(decoder(), Small()), [[3], [4]], Sampling(forced=(5, 16)), Stop(max_tokens=4)).results
    for result in made:
        assert (result.tokens, result.text, result.finish) == ([5, 16], Letters().decode([5]), "error")
        assert "id 16" in str(result.error)


def encoder() -> nn.Module:
    return Encoder(VOCAB, 16, (Layer(Attention(heads=4, mask=FULL), MLP(8)),)).build()


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "encoder": (lambda: generate(encoder(), [[1]]), "an encoder, which writes nothing"),
    "no start": (lambda: Writer(encoder_decoder()), "start=[bos]"),
    "start unknown": (lambda: Writer(encoder_decoder(), start=[99]), "got id 99"),
    "start too long": (lambda: Writer(encoder_decoder(limit=2), start=[1, 1, 1]), "at most 2"),
    "start of a decoder": (lambda: Writer(decoder(), start=[1]), "front of the prompts"),
    "max_len": (lambda: Writer(decoder(), max_len=0), "max_len=0"),
    "temperature": (lambda: Sampling(temperature=-0.1), "sampling.temperature: got -0.1"),
    "top_p 0": (lambda: Sampling(temperature=1.0, top_p=0.0), "sampling.top_p: got 0.0"),
    "top_p above 1": (lambda: Sampling(temperature=1.0, top_p=1.1), "sampling.top_p: got 1.1"),
    "top_k": (lambda: Sampling(temperature=1.0, top_k=0), "sampling.top_k: got 0"),
    "min_p": (lambda: Sampling(temperature=1.0, min_p=1.5), "sampling.min_p"),
    "typical": (lambda: Sampling(temperature=1.0, typical=1.0), "sampling.typical"),
    "a filter of nothing": (lambda: Sampling(top_k=5), "while temperature is 0"),
    "repetition": (lambda: Sampling(repetition=0.0), "sampling.repetition"),
    "ngram": (lambda: Sampling(no_repeat_ngram=0), "sampling.no_repeat_ngram"),
    "banned and forced": (lambda: Sampling(banned=(1, 2), forced=(2,)), "token 2 is both banned and forced"),
    "all banned": (lambda: generate(decoder(), [[1]], Sampling(banned=tuple(range(VOCAB)))), "no token is allowed"),
    "banned unknown": (lambda: generate(decoder(), [[1]], Sampling(banned=(99,))), "sampling.banned: got token 99"),
    "a run of one": (lambda: Sampling(banned_runs=((1,),)), "runs of at least 2 tokens. Put single ones into banned"),
    "a run below 0": (lambda: Sampling(banned_runs=((1, -1),)), "sampling.banned_runs"),
    "a run unknown": (
        lambda: generate(decoder(), [[1]], Sampling(banned_runs=((1, 2), (1, 99)))),
        "sampling.banned_runs: got token 99",
    ),
    "forced unknown": (lambda: generate(decoder(), [[1]], Sampling(forced=(99,))), "sampling.forced: got token 99"),
    "stop unknown": (lambda: generate(decoder(), [[1]], GREEDY, Stop(ids=(99,))), "stop.ids: got token 99"),
    "stop text": (lambda: generate(decoder(), [[1]], GREEDY, Stop(texts=("a",))), "no tokenizer"),
    "stop empty": (lambda: Stop(texts=("",)), "at least one character"),
    "no tokens": (lambda: Stop(max_tokens=0), "stop.max_tokens"),
    "min above max": (lambda: Stop(max_tokens=3, min_tokens=4), "from 0 to max_tokens (3)"),
    "one text": (lambda: generate(Writer(decoder(), Letters()), "abc"), "Write [prompt]"),
    "samples": (lambda: generate(decoder(), [[1]], samples=0), "samples=0"),
    "seeds": (lambda: generate(decoder(), [[1]], seeds=[1, 2]), "2 seeds for 1 prompts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_fits_no_prompt_is_refused_at_once(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(BrickError) as error:
        call()
    assert message in str(error.value)
    assert str(error.value).count("\n") <= 1


def test_text_without_a_tokenizer_is_an_error_of_its_row() -> None:
    assert "without a tokenizer" in str(generate(decoder(), ["abc"]).results[0].error)
