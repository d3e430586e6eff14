"""Filters against transformers' logits processors on random logits, and draws against the probabilities themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from generate.worlds import decoder
from torch import Tensor
from transformers.generation import logits_process as hf

from brickformer.generate import GREEDY, Sampling, Stop, generate
from brickformer.generate import sampling as f
from brickformer.generate.choose import Constraints, shape

B, V = 6, 40
CPU = torch.device("cpu")


def logits(seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(B, V, generator=torch.Generator().manual_seed(seed)) * scale


def history(seed: int, length: int = 12, vocab: int = 8) -> Tensor:
    """Few tokens, so that they repeat."""
    return torch.randint(vocab, (B, length), generator=torch.Generator().manual_seed(seed))


Filter = Callable[[Tensor], Tensor]
FILTERS: dict[str, tuple[Filter, hf.LogitsProcessor]] = {
    **{f"top_k {k}": (lambda x, k=k: f.top_k(x, k), hf.TopKLogitsWarper(k)) for k in (1, 5, 39, 40, 100)},
    **{f"top_p {p}": (lambda x, p=p: f.top_p(x, p), hf.TopPLogitsWarper(p)) for p in (0.01, 0.3, 0.9, 0.999)},
    **{f"min_p {p}": (lambda x, p=p: f.min_p(x, p), hf.MinPLogitsWarper(p)) for p in (0.0, 0.01, 0.3, 1.0)},
    **{f"typical {p}": (lambda x, p=p: f.typical(x, p), hf.TypicalLogitsWarper(p)) for p in (0.01, 0.2, 0.9, 0.999)},
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_a_filter_is_that_of_transformers(name: str, scale: float) -> None:
    ours, theirs = FILTERS[name]
    for seed in range(5):
        x = logits(seed, scale)
        assert torch.equal(ours(x), theirs(torch.empty(B, 0, dtype=torch.long), x.clone()))


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_goes_on_from_another(name: str) -> None:
    """-inf where an earlier filter or a ban put it."""
    ours, theirs = FILTERS[name]
    for seed in range(5):
        x = f.ban(logits(seed), [0, 1, 1, 2], [3, 4, 5, 39])
        assert torch.equal(ours(x), theirs(torch.empty(B, 0, dtype=torch.long), x.clone()))


@pytest.mark.parametrize("factor", [0.5, 1.3, 4.0])
def test_repetition_is_that_of_transformers(factor: float) -> None:
    ids, x = history(1), logits(1)
    seen = torch.zeros(B, V, dtype=torch.bool).scatter_(1, ids, True)
    assert torch.equal(f.repetition(x, seen, factor), hf.RepetitionPenaltyLogitsProcessor(factor)(ids, x.clone()))


@pytest.mark.parametrize("n", [1, 2, 3, 13])
def test_no_repeat_ngram_is_that_of_transformers(n: int) -> None:
    hit = 0
    for seed in range(20):
        ids, x = history(seed, vocab=3), logits(seed)
        pairs = [(row, token) for row in range(B) for token in f.ngram_bans(ids[row].tolist(), n)]
        ours = f.ban(x, [row for row, _ in pairs], [token for _, token in pairs])
        assert torch.equal(ours, hf.NoRepeatNGramLogitsProcessor(n)(ids, x.clone()))
        hit += len(pairs)
    assert (hit > 0) == (n < 13)


def test_banned_runs_are_those_of_transformers() -> None:
    """Whole beginnings only, the row itself as one among them, and one longer than the row."""
    runs, hit = ((0, 1), (1, 1), (2, 0, 1), (1, 2, 0, 2), (0,) * 13), set()
    for seed in range(20):
        ids, x = history(seed, vocab=3), logits(seed)
        everything = (*runs, (*ids[0].tolist(), 5))
        pairs = [(row, token) for row in range(B) for token in f.run_bans(ids[row].tolist(), everything)]
        ours = f.ban(x, [row for row, _ in pairs], [token for _, token in pairs])
        assert torch.equal(ours, hf.NoBadWordsLogitsProcessor(list(map(list, everything)))(ids, x.clone()))
        hit |= {token for _, token in pairs}
    assert hit == {1, 2, 5}
    assert f.run_bans([], runs) == [] and f.run_bans([7], ((7, 8), (1, 7, 8))) == [8]


def test_presence_and_frequency() -> None:
    """By the formula, one logit after another (transformers has none)."""
    ids, x = history(2), logits(2)
    counts = torch.zeros(B, V).scatter_add_(1, ids, torch.ones(B, 12))
    ours = f.presence_frequency(x, counts, 0.7, 0.2)
    for row in range(B):
        for token in range(V):
            times = ids[row].tolist().count(token)
            expected = x[row, token].item() - (0.7 if times else 0.0) - 0.2 * times
            assert ours[row, token].item() == pytest.approx(expected, abs=1e-5)


def theirs_in_their_order(config: dict[str, object], prompt: Tensor) -> hf.LogitsProcessorList:
    """The list that transformers' own generate() would make."""
    tiny = transformers.GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=1, n_positions=64)
    model = transformers.GPT2LMHeadModel(tiny)
    settings = transformers.GenerationConfig(do_sample=True, pad_token_id=0, **config)
    settings._eos_token_tensor = None if settings.eos_token_id is None else torch.tensor(settings.eos_token_id)
    return model._get_logits_processor(
        settings, input_ids_seq_length=prompt.shape[1], encoder_input_ids=prompt, device="cpu", logits_processor=[]
    )


ORDERS: dict[str, tuple[Sampling, Stop, dict[str, object]]] = {
    "all": (
        Sampling(
            temperature=0.7,
            top_k=30,
            top_p=0.95,
            min_p=0.01,
            typical=0.9,
            repetition=1.2,
            no_repeat_ngram=2,
            banned=(3, 9),
            banned_runs=((1, 4), (2, 8)),
        ),
        Stop(min_tokens=20, ids=(7, 11)),
        dict(
            temperature=0.7,
            top_k=30,
            top_p=0.95,
            min_p=0.01,
            typical_p=0.9,
            repetition_penalty=1.2,
            no_repeat_ngram_size=2,
            suppress_tokens=[3, 9],
            bad_words_ids=[[1, 4], [2, 8]],
            min_new_tokens=20,
            eos_token_id=[7, 11],
        ),
    ),
    "past min_tokens": (
        Sampling(temperature=1.5, top_p=0.8),
        Stop(min_tokens=3, ids=(7, 11)),
        dict(temperature=1.5, top_k=0, top_p=0.8, min_new_tokens=3, eos_token_id=[7, 11]),
    ),
    "penalties only": (
        Sampling(temperature=1.0, repetition=0.8, no_repeat_ngram=3),
        Stop(),
        dict(temperature=1.0, top_k=0, repetition_penalty=0.8, no_repeat_ngram_size=3),
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_is_that_of_transformers(case: str) -> None:
    """Prompt and five tokens of the answer, written one after another as the engine does."""
    sampling, stop, config = ORDERS[case]
    prompt, answer = history(3), history(4, length=5)
    constraints = Constraints(sampling, stop, V, prompt.tolist(), CPU)
    processors = theirs_in_their_order(config, prompt)
    changed = 0
    for t in range(5):
        x = logits(10 + t)
        ours = shape(constraints(x), sampling)
        theirs = processors(torch.cat([prompt, answer[:, :t]], 1), x.clone())
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        changed += int((ours == -torch.inf).sum())
        constraints.add(answer[:, t], answer[:, t].tolist())
    assert changed or case == "penalties only"


def test_constraints_follow_their_rows() -> None:
    """select() on the batch is the same as never having had the other rows."""
    sampling = Sampling(repetition=1.4, presence=0.3, frequency=0.2, no_repeat_ngram=2, forced=(1, 2, 3, 4, 5, 6, 7))
    sampling = sampling.but(forced=())
    prompt, answer = history(5), history(6, length=4)
    rows = [4, 4, 0]
    whole = Constraints(sampling, Stop(), V, prompt.tolist(), CPU)
    some = Constraints(sampling, Stop(), V, prompt[rows].tolist(), CPU)
    for t in range(4):
        whole.add(answer[:, t], answer[:, t].tolist())
        some.add(answer[rows, t], answer[rows, t].tolist())
    apart = whole.copy()
    whole.select(rows)
    x = logits(7)
    assert torch.equal(whole(x[rows]), some(x[rows]))
    whole.add(answer[rows, 0], answer[rows, 0].tolist())
    assert torch.equal(apart(x)[rows], some(x[rows])), "a copy does not follow"
    assert not torch.equal(whole(x[rows]), some(x[rows]))


def test_a_forced_token_is_the_only_one() -> None:
    constraints = Constraints(Sampling(forced=(5,), banned=(1,)), Stop(), V, [[0]] * B, CPU)
    first = constraints(logits(8))
    assert (first[:, 5] == 0).all() and (first.isfinite().sum(1) == 1).all()
    constraints.add(torch.full((B,), 5), [5] * B)
    assert (constraints(logits(8)).isfinite().sum(1) == V - 1).all()


@pytest.mark.parametrize("seed", range(3))
def test_draws_are_the_inverse_of_the_cumulative_probabilities(seed: int) -> None:
    """At n evenly spaced numbers a token of probability p comes up p·n times, give or take one."""
    n = 20_000
    x = f.top_k(logits(seed)[:1], 12)
    drawn = f.draw(x.expand(n, -1), (torch.arange(n, dtype=torch.float64) + 0.5) / n)
    counts = torch.bincount(drawn, minlength=V)
    expected = x[0].double().softmax(-1) * n
    assert ((counts - expected).abs() <= 1.0).all()
    assert counts[x[0] == -torch.inf].sum() == 0


def test_draws_at_the_ends_are_allowed_tokens() -> None:
    """The first and the last tokens of the vocabulary are banned."""
    x = f.ban(logits(1), [r for r in range(B) for _ in range(4)], [0, 1, V - 2, V - 1] * B)
    for u in (0.0, 1.0 - 2.0**-24, 1.0 - 2.0**-53):
        drawn = f.draw(x, torch.full((B,), u, dtype=torch.float64))
        assert ((drawn > 1) & (drawn < V - 2)).all()


def test_uniform_numbers_belong_to_seed_and_sample() -> None:
    def first(seed: int, sample: int) -> list[float]:
        uniform = f.Uniform(seed, sample)
        return [uniform.next() for _ in range(200)]

    assert first(3, 1) == first(3, 1)
    made = [tuple(first(seed, sample)) for seed in (0, 1, -1, 2**62) for sample in range(3)]
    assert len(set(made)) == 12
    assert all(0.0 <= u < 1.0 for numbers in made for u in numbers)
    assert len(set(made[0])) == 200


def test_greedy_is_the_limit_of_low_temperatures() -> None:
    model = decoder()
    cold = generate(model, [[3, 4]], Sampling(temperature=1e-4, seed=9), Stop(max_tokens=8)).results[0]
    assert cold.tokens == generate(model, [[3, 4]], GREEDY, Stop(max_tokens=8)).results[0].tokens
