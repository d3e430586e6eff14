"""The engine against naive decoding: cache, batch, padding, leaving rows and limits change no token."""

from __future__ import annotations

import pytest
import torch
from generate.worlds import PROMPTS, VOCAB, WRITERS, Letters, decoder, encoder_decoder, naive_greedy, next_logits
from torch import nn

from brickformer.embed import Embed
from brickformer.generate import GREEDY, Generation, Sampling, Stop, Writer, generate
from brickformer.mixers.attention import Attention
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
