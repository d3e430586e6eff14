"""The engine against naive decoding: cache, batch, padding, leaving rows and limits change no token."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from generate.worlds import PROMPTS, VOCAB, WRITERS, Letters, decoder, encoder_decoder, naive_greedy, next_logits
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


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest) -> Writer:
    return WRITERS[request.param]()


def tokens(made: Generation) -> list[list[int]]:
    return [result.tokens for result in made.results]


def ends(writer: Writer, prompts: list[list[int]], most: int) -> tuple[int]:
    """A stop id with which the answers, greedy as they are, have the most different lengths."""
    free = [naive_greedy(writer, p, most)[0] for p in prompts]
    return (max(range(VOCAB), key=lambda stop: len({[*t, stop].index(stop) for t in free})),)


def spy(module: nn.Module) -> list[tuple[int, ...]]:
    """The shape of the first argument of every call."""
    calls: list[tuple[int, ...]] = []
    module.register_forward_pre_hook(lambda _, args: calls.append(tuple(args[0].shape)))
    return calls


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_ragged_batch_is_naive_decoding_of_each(writer: Writer, use_cache: bool) -> None:
    made = generate(writer, PROMPTS, GREEDY, Stop(max_tokens=9), use_cache=use_cache)
    for prompt, result in zip(PROMPTS, made.results, strict=True):
        expected, logprobs = naive_greedy(writer, prompt, 9)
        assert result.tokens == expected
        assert result.logprobs == pytest.approx(logprobs, abs=1e-9)
        assert result.finish == "length" and result.error is None
    assert len({tuple(t) for t in tokens(made)}) > 1, "the model says the same whatever it reads"


@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_that_finish_leave_the_batch(writer: Writer, use_cache: bool) -> None:
    stops = ends(writer, PROMPTS, 12)
    calls = spy(writer.decoder.embed)
    made = generate(writer, PROMPTS, GREEDY, Stop(max_tokens=12, ids=stops), use_cache=use_cache)
    rows = [shape[0] for shape in calls]
    for prompt, result in zip(PROMPTS, made.results, strict=True):
        assert result.tokens == naive_greedy(writer, prompt, 12, stops)[0]
        assert result.finish == ("stop" if result.tokens[-1] in stops else "length")
    lengths = [len(t) for t in tokens(made)]
    assert rows == [sum(n > step for n in lengths) for step in range(max(lengths))]
    assert rows[-1] < len(PROMPTS)


def test_few_finished_rows_of_a_large_batch_wait_for_more() -> None:
    """Leaving copies the cache: it is done for an eighth of the batch at once, and changes no token."""
    writer = Writer(decoder())
    prompts = [[3 + i % 7, i % VOCAB] for i in range(20)]
    stop = Stop(max_tokens=10, ids=ends(writer, prompts, 10))
    calls = spy(writer.decoder.embed)
    made = generate(writer, prompts, GREEDY, stop)
    rows = [shape[0] for shape in calls]
    assert tokens(made) == [naive_greedy(writer, p, 10, stop.ids)[0] for p in prompts]
    lengths = [len(t) for t in tokens(made)]
    live = [sum(n > step for n in lengths) for step in range(max(lengths))]
    assert all(n <= fed and (fed - n) * 8 < fed for n, fed in zip(live, rows, strict=True))
    assert rows != live and rows[-1] < 20


def test_prompts_are_read_once_for_all_samples() -> None:
    writer = Writer(decoder())
    calls = spy(writer.decoder.embed)
    made = generate(writer, PROMPTS[:2], DRAWN, Stop(max_tokens=4), samples=3)
    assert calls == [(2, 5), (6, 1), (6, 1), (6, 1)]
    assert [(r.prompt, r.sample) for r in made.results] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert len({tuple(t) for t in tokens(made)[:3]}) > 1


@pytest.mark.parametrize("use_cache", [True, False])
def test_sources_are_encoded_once(use_cache: bool) -> None:
    model = encoder_decoder()
    calls = spy(model.encoder.embed)
    projected = spy(model.decoder.stack.layers[0].cross.kv)
    generate(Writer(model, start=[1]), PROMPTS, GREEDY, Stop(max_tokens=5), use_cache=use_cache)
    assert calls == [(4, 12)]
    assert len(projected) == (1 if use_cache else 5)


def test_seeds_give_the_same_tokens_alone_and_in_a_batch(writer: Writer) -> None:
    stop, seeds = Stop(max_tokens=8), [11, 12, 13, 14]
    together = generate(writer, PROMPTS, DRAWN, stop, seeds=seeds, samples=2)
    alone = [generate(writer, [p], DRAWN, stop, seeds=[s], samples=2) for p, s in zip(PROMPTS, seeds, strict=True)]
    assert tokens(together) == [t for made in alone for t in tokens(made)]
    assert tokens(together) == tokens(generate(writer, PROMPTS, DRAWN, stop, seeds=seeds, samples=2, batch=3))
    assert tokens(together) == tokens(generate(writer, PROMPTS, DRAWN, stop, seeds=seeds, samples=2, use_cache=False))
    assert tokens(together) != tokens(generate(writer, PROMPTS, DRAWN, stop, seeds=[1, 2, 3, 4], samples=2))
    again = generate(writer, PROMPTS, DRAWN.but(seed=11), stop)
    assert tokens(again)[0] == tokens(together)[0], "the seed of the settings is that of every prompt"


def test_sampling_leaves_the_global_generator_alone() -> None:
    model, before = decoder(), torch.get_rng_state()
    generate(model, PROMPTS, DRAWN, Stop(max_tokens=4))
    assert torch.equal(before, torch.get_rng_state())


def test_drawn_tokens_report_the_models_own_probability() -> None:
    """Whatever temperature and filters did."""
    writer = Writer(decoder())
    made = generate(writer, PROMPTS[:1], Sampling(temperature=2.0, top_k=5, repetition=1.5), Stop(max_tokens=6))
    result = made.results[0]
    for n, (token, logprob) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
        log = next_logits(writer, PROMPTS[0], result.tokens[:n]).log_softmax(-1)
        assert logprob == pytest.approx(log[token].item(), abs=1e-9)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_table_of_positions_ends_an_answer_and_not_its_neighbours(use_cache: bool) -> None:
    """Padding takes slots but no positions: the short rows go on to their own limit, as they would alone."""
    writer = Writer(decoder(Attention(heads=4), embed=Embed(position=Learned(max_len=12))))
    prompts = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [8], [9, 9, 2], [5] * 12]
    made = generate(writer, prompts, GREEDY, Stop(max_tokens=20), use_cache=use_cache)
    for prompt, result in zip(prompts, made.results, strict=True):
        assert result.tokens == naive_greedy(writer, prompt, 13 - len(prompt))[0]
        assert result.finish == "length"


def test_max_len_is_a_limit_like_the_models_own() -> None:
    writer = Writer(decoder(), max_len=7)
    made = generate(writer, [[3, 4, 5, 6, 7], [8], [1] * 8], GREEDY, Stop(max_tokens=20))
    assert [len(t) for t in tokens(made)] == [3, 7, 0]
    assert "8 tokens" in str(made.results[2].error) and "at most 7" in str(made.results[2].error)
    assert tokens(made)[1] == naive_greedy(writer, [8], 7)[0]


def test_dropout_is_off_inside_and_as_it_was_afterwards() -> None:
    model = decoder()
    model.stack.layers[0].around_mixer.drop.p = 0.9
    expected = tokens(generate(model, PROMPTS, GREEDY, Stop(max_tokens=5)))
    model.train()
    model.stack.layers[1].eval()
    assert tokens(generate(model, PROMPTS, GREEDY, Stop(max_tokens=5))) == expected
    assert model.training and model.stack.layers[0].training and not model.stack.layers[1].ffn.training


def test_forced_tokens_begin_the_answer_and_banned_ones_are_not_in_it() -> None:
    writer = Writer(decoder())
    free = naive_greedy(writer, PROMPTS[0], 8)[0]
    made = generate(writer, PROMPTS, Sampling(forced=(2, 2, 6), banned=(free[0], free[1])), Stop(max_tokens=8))
    for result in made.results:
        assert result.tokens[:3] == [2, 2, 6] and not {free[0], free[1]} & set(result.tokens)


def test_min_tokens_puts_the_end_off() -> None:
    writer = Writer(decoder())
    first = naive_greedy(writer, PROMPTS[0], 1)[0][0]
    made = generate(writer, PROMPTS[:1], GREEDY, Stop(max_tokens=30, min_tokens=4, ids=tuple(range(VOCAB - 1))))
    assert len(made.results[0].tokens) == 5 and made.results[0].tokens[:4] == [VOCAB - 1] * 4
    assert generate(writer, PROMPTS[:1], GREEDY, Stop(ids=(first,))).results[0].tokens == [first]


def test_text_in_and_out() -> None:
    writer = Writer(decoder(), Letters())
    made = generate(writer, ["bcdef", "h"], GREEDY, Stop(max_tokens=6))
    for prompt, result in zip(["bcdef", "h"], made.results, strict=True):
        ids = naive_greedy(writer, Letters().encode(prompt), 6)[0]
        assert result.tokens == ids and result.text == Letters().decode(ids)
    whole = made.results[0].text
    assert whole is not None
    cut = generate(writer, ["bcdef"], GREEDY, Stop(max_tokens=6, texts=(whole[2:4],))).results[0]
    assert cut.text == whole[: whole.index(whole[2:4])] and cut.finish == "stop"
    stopped = generate(writer, ["bcdef"], GREEDY, Stop(max_tokens=6, ids=(made.results[0].tokens[3],))).results[0]
    assert stopped.text == Letters().decode(stopped.tokens[:-1]), "a stop id is no text"


def test_counts_and_bytes() -> None:
    """Heads 2 of width 4, keys and values, 2 layers, float64; positions int64 (or int32) a slot."""
    made = generate(decoder(), [[1, 2, 3], [4, 5, 6]], GREEDY, Stop(max_tokens=5))
    assert (made.stats.prompt_tokens, made.stats.decode_tokens, made.stats.steps) == (6, 8, 4)
    slots = 2 * 2 * 8
    assert made.stats.cache_bytes in (slots * (2 * 2 * 4 * 8 + 8), slots * (2 * 2 * 4 * 8 + 4))
    assert "8 tokens" in str(made.stats)


# ---- bad input: an error for the row, and the others go on


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
