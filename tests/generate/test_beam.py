"""Beam search against all answers there are, and against a plain search without state that never stops early."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from generate.worlds import (
    PROMPTS,
    VOCAB,
    WRITERS,
    Letters,
    decoder,
    encoder_decoder,
    lively,
    naive_greedy,
    next_logits,
)

from brickformer import Head
from brickformer.errors import BrickError, DataError
from brickformer.generate import GREEDY, Beam, Generation, Sampling, Stop, Writer, beam_search, generate
from brickformer.generate.beam import largest

pytestmark = pytest.mark.unchecked  # shapes are checked where the engine is tested; here are many short runs

PROMPTS_OF_6 = [[a, b] for a in range(6) for b in range(2)]
Scored = tuple[float, list[int]]


def scored(made: Generation) -> list[Scored]:
    return [(pytest.approx(result.score, abs=1e-9), result.tokens) for result in made.results]


def every_answer(writer: Writer, prompt: list[int], longest: int, stop: int, alpha: float) -> list[Scored]:
    """All answers there are, best first: those that end in the stop id, and those cut off."""
    found = []
    vocab = writer.vocab
    logs = {
        y: next_logits(writer, prompt, y).log_softmax(-1)
        for n in range(longest)
        for y in itertools.product(range(vocab), repeat=n)
        if stop not in y
    }
    for n in range(1, longest + 1):
        for y in itertools.product(range(vocab), repeat=n):
            if stop not in y[:-1] and (n == longest or y[-1] == stop):
                total = sum(logs[y[:i]][y[i]].item() for i in range(n))
                found.append((total / n**alpha, list(y)))
    return sorted(found, key=lambda f: -f[0])


def four(kind: str) -> Writer:
    """A writer of four tokens."""
    if kind == "decoder":
        return Writer(decoder(vocab=4, depth=1))
    small = {"encoder.vocab": 4, "decoder.vocab": 4}
    return Writer(lively(encoder_decoder().spec.but(**small).build(), 0), start=[0])


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("early", [True, False])
def test_a_wide_beam_finds_all_answers_in_order(kind: str, alpha: float, early: bool) -> None:
    """V = 4, T = 4: 121 answers, every one with its score; and the best few of them in one batch of ragged prompts."""
    writer, stop, prompts = four(kind), Stop(max_tokens=4, ids=(3,)), [[0, 1, 2], [1]]
    expected = [every_answer(writer, prompt, 4, 3, alpha) for prompt in prompts]
    for prompt, answers in zip(prompts, expected, strict=True):
        assert len(answers) == 121
        beam = Beam(width=121, length_penalty=alpha, early=early, best=121)
        assert scored(beam_search(writer, [prompt], beam, stop)) == answers
    few = beam_search(writer, prompts, Beam(width=121, length_penalty=alpha, early=early, best=9), stop, batch=242)
    assert scored(few) == [answer for answers in expected for answer in answers[:9]]


def plain_search(
    writer: Writer, prompt: list[int], width: int, longest: int, stops: tuple[int, ...], alpha: float, early: bool
) -> list[Scored]:
    """The search as it is told in words. early: until `width` answers are finished; else to the longest length."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[Scored] = []
    for n in range(1, longest + 1):
        ranked = sorted(
            (
                (total + log, [*y, token])
                for total, y in live
                for token, log in enumerate(next_logits(writer, prompt, y).log_softmax(-1).tolist())
            ),
            key=lambda c: -c[0],
        )
        done += [(total / n**alpha, y) for total, y in ranked[:width] if y[-1] in stops]
        live = [(total, y) for total, y in ranked if y[-1] not in stops][:width]
        if early and len(done) >= width:
            live = []
            break
    done += [(total / longest**alpha, y) for total, y in live]
    return sorted(done, key=lambda d: -d[0])[:width]


def stops_of(writer: Writer) -> tuple[int, int]:
    """Two tokens that good answers have, so that beams do finish."""
    made = beam_search(writer, PROMPTS, Beam(width=3, best=3), Stop(max_tokens=6)).results
    counts = torch.bincount(torch.tensor([t for r in made for t in r.tokens[1:]]), minlength=VOCAB)
    return tuple(counts.topk(2).indices.tolist())  # type: ignore[return-value]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("early", [True, False])
def test_a_narrow_beam_is_the_plain_search(kind: str, early: bool) -> None:
    """One prompt after another, all at once, and without a cache. early=False: to stop when no better answer can come
    finds what a search to the longest length finds."""
    writer = WRITERS[kind]()
    stop = Stop(max_tokens=6, ids=stops_of(writer))
    finishes = set()
    for alpha in (0.0, 1.5):
        beam = Beam(width=3, length_penalty=alpha, early=early, best=3)
        expected = [plain_search(writer, p, 3, 6, stop.ids, alpha, early) for p in PROMPTS]
        together = beam_search(writer, PROMPTS, beam, stop)
        assert scored(together) == [s for found in expected for s in found]
        assert scored(beam_search(writer, PROMPTS, beam, stop, use_cache=False)) == scored(together)
        assert scored(beam_search(writer, PROMPTS, beam, stop, batch=5)) == scored(together)
        assert [(r.prompt, r.sample) for r in together.results] == [(p, n) for p in range(4) for n in range(3)]
        finishes |= {r.finish for r in together.results}
        for r in together.results:
            assert r.finish == ("stop" if r.tokens[-1] in stop.ids else "length")
            assert not set(r.tokens[:-1]) & set(stop.ids), "a finished beam was extended"
            assert r.score == pytest.approx(r.logprob / len(r.tokens) ** alpha, abs=1e-9)
    assert "stop" in finishes


@pytest.mark.parametrize("alpha", [-1.0, 0.5, 3.0])
def test_long_answers_may_still_win(alpha: float) -> None:
    """The bound counts on the length that favours an unfinished answer most: the longest, or the next for α below 0."""
    writer, stop = Writer(decoder(vocab=6, depth=1, seed=2)), Stop(max_tokens=10, ids=(1, 4))
    made = beam_search(writer, PROMPTS_OF_6, Beam(width=2, length_penalty=alpha, early=False, best=2), stop)
    expected = [plain_search(writer, p, 2, 10, stop.ids, alpha, False) for p in PROMPTS_OF_6]
    assert scored(made) == [s for found in expected for s in found]


def test_a_proof_that_nothing_better_comes_saves_steps() -> None:
    """Otherwise the test above would hold for a search that never stops."""
    writer = Writer(decoder())
    stop = Stop(max_tokens=40, ids=tuple(range(6)))
    made = beam_search(writer, [PROMPTS[0]], Beam(width=2, length_penalty=0.0, early=False), stop)
    assert made.stats.steps < 39


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_one_beam_is_greedy(kind: str, alpha: float) -> None:
    writer = WRITERS[kind]()
    stop = Stop(max_tokens=8, ids=stops_of(writer))
    made = beam_search(writer, PROMPTS, Beam(width=1, length_penalty=alpha), stop)
    assert [r.tokens for r in made.results] == [naive_greedy(writer, p, 8, stop.ids)[0] for p in PROMPTS]


def test_a_wider_beam_finds_better_answers_than_greedy() -> None:
    writer, stop = Writer(decoder()), Stop(max_tokens=8)
    wide = beam_search(writer, PROMPTS, Beam(width=12, length_penalty=0.0), stop).results
    greedy = generate(writer, PROMPTS, GREEDY, stop).results
    assert any(w.logprob > g.logprob + 0.1 for w, g in zip(wide, greedy, strict=True))


def test_constraints_hold_in_every_beam() -> None:
    writer = Writer(decoder())
    free = naive_greedy(writer, PROMPTS[0], 3)[0]
    constraints = Sampling(banned=tuple(set(free)), forced=(16,), no_repeat_ngram=2)
    made = beam_search(writer, PROMPTS, Beam(width=3, best=3), Stop(max_tokens=7, min_tokens=5, ids=(2,)), constraints)
    for result in made.results:
        prompt = PROMPTS[result.prompt]
        assert result.tokens[0] == 16 and not set(result.tokens) & set(free)
        assert 2 not in result.tokens[:5]
        whole = [*prompt, *result.tokens]
        pairs = list(itertools.pairwise(whole))
        new = pairs[len(prompt) - 1 :]
        assert all(pairs.count(pair) == 1 for pair in new[1:])


def test_a_table_of_positions_ends_the_search_of_its_prompt_only() -> None:
    writer = Writer(decoder(), max_len=13)
    made = beam_search(writer, PROMPTS, Beam(width=2), Stop(max_tokens=8))
    for prompt, result in zip(PROMPTS, made.results, strict=True):
        expected = plain_search(writer, prompt, 2, min(8, 14 - len(prompt)), (), 1.0, True)[0]
        assert scored(Generation([result], made.stats)) == [expected]


def test_text_and_bad_prompts() -> None:
    writer = Writer(encoder_decoder(), Letters(), start=[1])
    with torch.no_grad():
        writer.model.encoder.embed.tokens.weight[16] = torch.nan
    made = beam_search(writer, ["bcd", "", "pb", "h"], Beam(width=3, best=2), Stop(max_tokens=4, ids=(5,)))
    assert [(r.prompt, r.sample, r.finish == "error") for r in made.results] == [
        (0, 0, False), (0, 1, False), (1, 0, True), (2, 0, True), (3, 0, False), (3, 1, False),
    ]  # fmt: skip
    assert isinstance(made.results[2].error, DataError) and "not finite" in str(made.results[3].error)
    for r in (made.results[0], made.results[5]):
        assert r.text == Letters().decode([t for t in r.tokens if t != 5])
    alone = beam_search(writer, ["h"], Beam(width=3, best=2), Stop(max_tokens=4, ids=(5,)))
    assert [r.tokens for r in alone.results] == [r.tokens for r in made.results[4:]]


def test_nothing_allowed_is_an_error_of_its_prompt() -> None:
    made = beam_search(
        decoder(), [list(range(17)), [1]], Beam(width=2), Stop(max_tokens=3), Sampling(no_repeat_ngram=1)
    )
    assert "no token is allowed" in str(made.results[0].error) and made.results[1].error is None


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "width": (lambda: Beam(width=0), "beam.width"),
    "best": (lambda: Beam(width=2, best=3), "from 1 to width (2)"),
    "drawn": (lambda: beam_search(decoder(), [[1]], constraints=Sampling(temperature=1.0)), "temperature=0"),
    "texts": (lambda: beam_search(Writer(decoder(), Letters()), ["b"], stop=Stop(texts=("a",))), "stop.texts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_search_is_refused(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(BrickError) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize("vocab", [7, 33, 200])
def test_of_equal_tokens_the_first(vocab: int) -> None:
    """As everywhere; no token is written twice, so that ties are met at every step."""
    spec = decoder(vocab=vocab).spec.but(**{"head": Head(tied=False, bias=True)})
    model = lively(spec.build(), 0)
    with torch.no_grad():
        model.head.project.weight.zero_()
        model.head.project.bias.copy_(torch.arange(vocab) % 3)
    once, stop = Sampling(no_repeat_ngram=1), Stop(max_tokens=5)
    greedy = generate(model, [[3], [1, 0, 2]], once, stop).results
    first = [token for token in range(vocab) if token % 3 == 2 and token != 3]
    assert greedy[0].tokens[: len(first)] == first[:5]
    for width in (1, 2):
        found = beam_search(model, [[3], [1, 0, 2]], Beam(width=width), stop, once).results
        assert [r.tokens for r in found if r.sample == 0] == [r.tokens for r in greedy]


def test_largest_is_a_stable_sort() -> None:
    drawn = torch.Generator().manual_seed(0)
    for n, k in ((1, 1), (3, 3), (7, 2), (40, 5), (3000, 12)):
        for kinds in (2, 5, 10**6):
            x = torch.randint(kinds, (6, n), generator=drawn).float().masked_fill(torch.rand(6, n) < 0.3, -torch.inf)
            x[0] = -torch.inf
            before = x.clone()
            values, at = largest(x, k)
            for row, value, where in zip(x.tolist(), values.tolist(), at.tolist(), strict=True):
                best = sorted(range(n), key=lambda i: -row[i])[:k]
                assert value == [row[i] for i in best] == [row[i] for i in where]
                assert [i for i in where if row[i] > -torch.inf] == [i for i in best if row[i] > -torch.inf]
            assert torch.equal(x, before)
