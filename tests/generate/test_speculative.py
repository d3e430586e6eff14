"""Speculation changes no greedy token and no distribution, whatever the draft guesses."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from generate.worlds import DECODERS, PROMPTS, VOCAB, Letters, decoder, encoder_decoder, naive_greedy, next_logits
from torch import Tensor

from brickformer.embed import Embed
from brickformer.errors import BrickError
from brickformer.generate import GREEDY, PromptLookup, Sampling, Stop, Writer, generate, speculate
from brickformer.generate.choose import Choice, Constraints
from brickformer.generate.sampling import Uniform
from brickformer.mixers.attention import Attention
from brickformer.mixers.shortconv import ShortConv
from brickformer.models import AnyModel, DecoderModel
from brickformer.positions import Learned, Rope

pytestmark = pytest.mark.unchecked  # shapes are checked where the engine is tested; here are many short runs

CONSTRAINED = Sampling(repetition=1.3, presence=0.2, no_repeat_ngram=2, banned=(3, 4), forced=(5,))


def near(model: torch.nn.Module, noise: float) -> AnyModel:
    """A draft that agrees with its model now and then."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in draft.parameters():
            p += torch.randn(p.shape, generator=generator, dtype=p.dtype) * noise
    return draft


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("draft", ["itself", "near", "other", "lookup"])
@pytest.mark.parametrize("sampling", [GREEDY, CONSTRAINED], ids=["greedy", "constrained"])
def test_greedy_tokens_are_the_same(kind: str, draft: str, sampling: Sampling) -> None:
    """Recurrent states and rings cannot rewind: they are copied."""
    writer, stop = Writer(DECODERS[kind]()), Stop(max_tokens=14, ids=(2,))
    helper: AnyModel | PromptLookup = {
        "itself": lambda: DECODERS[kind](),
        "near": lambda: near(writer.model, 0.08),
        "other": lambda: DECODERS["window" if kind == "rope" else "recurrent"](),
        "lookup": lambda: PromptLookup(ngram=2),
    }[draft]()
    prompts = [*PROMPTS, [], [3, 4, 3, 4, 3, 4]]
    expected = generate(writer, prompts, sampling, stop)
    for ahead in (1, 5):
        made = speculate(writer, prompts, helper, sampling, stop, ahead=ahead)
        for ours, theirs in zip(made.results, expected.results, strict=True):
            assert (ours.tokens, ours.finish) == (theirs.tokens, theirs.finish)
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-9)
        assert made.stats.decode_tokens == made.stats.steps == sum(max(len(r.tokens) - 1, 0) for r in made.results)
        if draft == "itself":
            assert made.stats.accepted == made.stats.proposed > 0
            assert ahead == 1 or made.stats.calls < made.stats.steps / 2
        if draft == "near" and sampling == GREEDY:
            assert 0 < made.stats.accepted < made.stats.proposed, "the draft is too good, or too bad, for this test"


@pytest.mark.parametrize("draft", ["itself", "near", "lookup"])
def test_an_encoder_decoder_speculates_too(draft: str) -> None:
    writer, stop = Writer(encoder_decoder(), start=[1]), Stop(max_tokens=12)
    helper = {"itself": encoder_decoder(), "near": near(encoder_decoder(), 0.05), "lookup": PromptLookup()}[draft]
    made = speculate(writer, PROMPTS, helper, GREEDY, stop)
    assert [r.tokens for r in made.results] == [naive_greedy(writer, p, 12)[0] for p in PROMPTS]


def test_the_draft_may_know_fewer_positions_and_the_model_ends_at_its_own() -> None:
    writer = Writer(decoder(Attention(heads=4), embed=Embed(position=Learned(max_len=16))))
    short = decoder(Attention(heads=4), embed=Embed(position=Learned(max_len=8)))
    for draft in (short, DECODERS["rope"](), PromptLookup()):
        made = speculate(writer, PROMPTS, draft, GREEDY, Stop(max_tokens=30), ahead=6)
        assert [r.tokens for r in made.results] == [naive_greedy(writer, p, 17 - len(p))[0] for p in PROMPTS]


@pytest.mark.parametrize("draft", ["near", "other"])
def test_a_state_that_goes_back_only_a_little_is_not_asked_to(draft: str) -> None:
    """The ring of a short convolution lets go of old inputs now and then, far into an answer."""

    def made_of(seed: int) -> DecoderModel:
        return decoder(ShortConv(Attention(heads=4, position=Rope())), depth=1, seed=seed)

    writer, stop = Writer(made_of(0)), Stop(max_tokens=90)
    helper = near(made_of(0), 0.05) if draft == "near" else made_of(1)
    made = speculate(writer, PROMPTS[:2], helper, GREEDY, stop, ahead=7)
    expected = generate(writer, PROMPTS[:2], GREEDY, stop)
    assert [r.tokens for r in made.results] == [r.tokens for r in expected.results]
    assert all(r.error is None for r in made.results)


def test_stop_strings_and_errors() -> None:
    model = decoder()
    writer = Writer(model, Letters())
    text = generate(writer, ["bcdef"], GREEDY, Stop(max_tokens=9)).results[0].text
    assert text is not None
    stop = Stop(max_tokens=9, texts=(text[3:5],))
    made = speculate(writer, ["bcdef", "", "pb", "h"], decoder(), GREEDY, stop)
    expected = generate(writer, ["bcdef"], GREEDY, stop).results[0]
    assert (made.results[0].tokens, made.results[0].text) == (expected.tokens, expected.text)
    assert made.results[0].finish == "stop"
    assert "empty" in str(made.results[1].error)
    with torch.no_grad():
        model.embed.tokens.weight[16] = torch.nan
    broken = speculate(writer, ["pb", "h"], decoder(), Sampling(banned=(16,)), stop).results
    assert "not finite" in str(broken[0].error) and broken[1].error is None and broken[1].tokens
    few = speculate(writer, [list(range(15)), [1]], decoder(), Sampling(no_repeat_ngram=1, banned=(16,)), stop).results
    assert few[0].tokens == [15] and "no token is allowed" in str(few[0].error) and few[1].error is None


def test_a_draft_that_is_broken_is_not_believed() -> None:
    writer, draft = Writer(decoder()), decoder()
    with torch.no_grad():
        draft.head.project.weight[:] = torch.nan
    for sampling in (GREEDY, Sampling(temperature=1.0)):
        made = speculate(writer, PROMPTS, draft, sampling, Stop(max_tokens=6))
        assert made.stats.proposed == 0 and all(len(r.tokens) == 6 and r.error is None for r in made.results)


# ---- the distribution

LIMIT = {3: 21.1, 15: 44.3}  # the upper 1e-4 of chi-square, by degrees of freedom


def chi_square(counts: Counter[object], expected: dict[object, float]) -> float:
    total = sum(counts.values())
    assert set(counts) <= {key for key, p in expected.items() if p > 0}
    return sum((counts[key] - p * total) ** 2 / (p * total) for key, p in expected.items() if p > 0)


def choice(sampling: Sampling, seed: int = 0) -> Choice:
    return Choice(Constraints(sampling, Stop(), 4, [[0]], torch.device("cpu")), Uniform(seed))


P, Q = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log(), torch.tensor([[0.6, 0.2, 0.1, 0.1]]).log()


def one_token(rule: Choice, q: Tensor | None, guess: int) -> int:
    return guess if rule.accepts(P, q, guess) else rule.instead(P, q, guess)


def test_logits_with_slopes_can_be_chosen_from() -> None:
    assert choice(Sampling()).token(P.clone().requires_grad_()) == 3


@pytest.mark.parametrize("certain", [False, True])
def test_one_guess_keeps_the_distribution(certain: bool) -> None:
    """A guess drawn from q, or one that is always the same; p and q are far apart."""
    rule, draft, n = choice(Sampling(temperature=1.0)), choice(Sampling(temperature=1.0), seed=1), 5000
    counts: Counter[object] = Counter()
    for _ in range(n):
        counts[one_token(rule, None, 2) if certain else one_token(rule, Q, draft.token(Q))] += 1
    expected = dict(enumerate(P.exp()[0].tolist()))
    assert chi_square(counts, dict(expected)) < LIMIT[3]


def test_the_chi_square_would_notice() -> None:
    """The same counts with the second draw from p instead of the rest; and with every guess accepted."""
    rule, draft, n = choice(Sampling(temperature=1.0)), choice(Sampling(temperature=1.0), seed=1), 5000
    expected = dict(enumerate(P.exp()[0].tolist()))
    wrong: Counter[object] = Counter()
    for _ in range(n):
        guess = draft.token(Q)
        wrong[guess if rule.accepts(P, Q, guess) else rule.token(P)] += 1
    assert chi_square(wrong, dict(expected)) > LIMIT[3]
    assert chi_square(Counter(draft.token(Q) for _ in range(n)), dict(expected)) > LIMIT[3]


@pytest.mark.parametrize(
    ("draft", "sampling"),
    [
        ("model", Sampling(temperature=1.0)),
        ("model", Sampling(temperature=1.5, top_k=3, presence=0.5)),
        ("lookup", Sampling(temperature=1.0)),
    ],
)
def test_two_guessed_tokens_have_the_models_joint_distribution(draft: str, sampling: Sampling) -> None:
    """Tokens 2 and 3 of a vocabulary of 4: both are guesses of one round, drawn again and again."""
    writer = Writer(decoder(vocab=4, depth=1, seed=3))
    helper = decoder(vocab=4, depth=1, seed=4) if draft == "model" else PromptLookup()
    prompt, n = [1, 2, 0, 1, 2, 0, 1], 400
    expected: dict[object, float] = dict.fromkeys(itertools.product(range(4), repeat=2), 0.0)
    for a, b, c in itertools.product(range(4), repeat=3):
        answer = [a, b, c]
        chain = [probability(writer, prompt, sampling, answer[:i], answer[i]) for i in range(3)]
        expected[b, c] += math.prod(chain)
    assert math.isclose(sum(expected.values()), 1.0, rel_tol=1e-6)
    made = speculate(writer, [prompt] * n, helper, sampling, Stop(max_tokens=4), ahead=2, seeds=range(n))
    counts: Counter[object] = Counter(tuple(r.tokens[1:3]) for r in made.results)
    assert chi_square(counts, expected) < LIMIT[15]
    assert 0 < made.stats.accepted < made.stats.proposed


def probability(writer: Writer, prompt: list[int], sampling: Sampling, answer: list[int], token: int) -> float:
    """Of one token, by the formulas written out."""
    logits = next_logits(writer, prompt, answer)
    logits = logits - sampling.presence * torch.tensor([float(t in answer) for t in range(4)])
    logits = logits / sampling.temperature
    if sampling.top_k:
        logits = torch.where(logits < logits.sort(descending=True).values[sampling.top_k - 1], -torch.inf, logits)
    return float(logits.softmax(-1)[token])


# ---- prompt look-up


@pytest.mark.parametrize(
    ("tokens", "ngram", "ahead", "found"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 3, 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 3, 10, [9, 1, 2, 3]),
        ([7, 2, 3, 9, 1, 2, 3], 3, 2, [9, 1]),  # shorter: 2 3
        ([5, 1, 2, 5, 3, 4, 5], 2, 2, [3, 4]),  # the newest of two
        ([1, 2, 3], 3, 4, []),
        ([1], 3, 4, []),
        ([1, 1], 3, 4, [1]),
    ],
)
def test_what_followed_the_last_time(tokens: list[int], ngram: int, ahead: int, found: list[int]) -> None:
    assert PromptLookup(ngram).find(tokens, ahead) == found


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "vocabulary": (lambda: speculate(decoder(), [[1]], decoder(vocab=5)), f"5 tokens, the model {VOCAB}"),
    "kind": (lambda: speculate(Writer(encoder_decoder(), start=[1]), [[1]], decoder()), "both"),
    "ahead": (lambda: speculate(decoder(), [[1]], decoder(), ahead=0), "ahead=0"),
    "ngram": (lambda: PromptLookup(ngram=0), "prompt_lookup.ngram"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_draft_that_does_not_fit_is_refused(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(BrickError) as error:
        call()
    assert message in str(error.value)
