"""Huge and small amounts: answers without end, many samples, what the statistics say is held, forced tokens that cannot
all be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from generate.worlds import DECODERS, PROMPTS, VOCAB, WRITERS, decoder, encoder_decoder, naive_greedy, next_logits
from torch import Tensor

from brickformer.errors import BrickError
from brickformer.generate import (
    GREEDY,
    Beam,
    PromptLookup,
    Sampling,
    Stop,
    Writer,
    beam_search,
    generate,
    read_prompt,
    speculate,
)
from brickformer.generate.sampling import Uniform
from brickformer.models import AnyModel
from brickformer.state import StackState

pytestmark = pytest.mark.unchecked  # shapes are checked where the engine is tested
LONG = Stop(max_tokens=19)


@pytest.mark.parametrize("kind", ["rope", "window", "recurrent", "encoder-decoder"])
def test_a_cache_that_grows_gives_the_same_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = WRITERS[kind]()
    expected = [naive_greedy(writer, prompt, 19)[0] for prompt in PROMPTS]
    beams = [r.tokens for r in beam_search(writer, PROMPTS, Beam(width=3), LONG).results]
    helper: AnyModel = encoder_decoder(seed=1) if kind == "encoder-decoder" else DECODERS["window"]()
    monkeypatch.setattr("brickformer.generate.writer.SLOTS", 2)
    rooms: list[int] = []
    made = writer.decoder.init_state

    def noted(batch: int, max_len: int, **options: Any) -> StackState:
        rooms.append(max_len)
        return made(batch, max_len, **options)

    monkeypatch.setattr(writer.decoder, "init_state", noted)
    assert [r.tokens for r in generate(writer, PROMPTS, GREEDY, LONG).results] == expected
    assert rooms == sorted(set(rooms)) and len(rooms) > 1, "the cache did not grow"
    assert [r.tokens for r in beam_search(writer, PROMPTS, Beam(width=3), LONG).results] == beams
    for draft in (PromptLookup(), helper):
        rooms.clear()
        assert [r.tokens for r in speculate(writer, PROMPTS, draft, GREEDY, LONG, ahead=3).results] == expected
        assert len(rooms) > len(PROMPTS), "the cache did not grow"


@pytest.mark.parametrize("most", [10**9, 2**62])
def test_an_answer_may_be_of_any_length(most: int) -> None:
    """Nothing is set aside for tokens that never come."""
    model, stop = decoder().float(), Stop(max_tokens=most, ids=tuple(range(VOCAB)))
    for made in (
        generate(model, [[1, 2]], GREEDY, stop),
        beam_search(model, [[1, 2]], Beam(width=2), stop),
        speculate(model, [[1, 2]], PromptLookup(), GREEDY, stop),
        speculate(model, [[1, 2]], model, GREEDY, stop),
    ):
        assert len(made.results[0].tokens) == 1 and made.results[0].error is None
        assert made.stats.cache_bytes < 2**22
    with pytest.raises(BrickError, match="more than memory holds"):
        read_prompt(model, [1, 2], room=most * 10**6)


def naive_drawn(writer: Writer, prompt: list[int], uniform: Uniform, most: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(most):
        shares = next_logits(writer, prompt, tokens).softmax(-1).cumsum(-1)
        tokens.append(int((shares <= uniform.next() * shares[-1]).sum()))
    return tokens


@pytest.mark.parametrize("batch", [2, 3, 32])
def test_more_samples_than_rows_at_once(batch: int) -> None:
    """Sample n draws from generator n of its seed, however many there are at once."""
    writer, prompts = Writer(decoder()), PROMPTS[:2]
    made = generate(writer, prompts, Sampling(temperature=1.0, seed=4), Stop(max_tokens=4), samples=5, batch=batch)
    assert [(r.prompt, r.sample) for r in made.results] == [(p, n) for p in range(2) for n in range(5)]
    for r in made.results:
        assert r.tokens == naive_drawn(writer, prompts[r.prompt], Uniform(4, r.sample), 4)
    widest: list[int] = []
    writer.decoder.embed.register_forward_hook(lambda _, args, out: widest.append(len(args[0])))
    generate(writer, prompts, Sampling(temperature=1.0), Stop(max_tokens=3), samples=5, batch=batch)
    assert max(widest) <= batch


def held(found: object) -> dict[int, int]:
    """Bytes of every tensor there is in a state, by where it lies."""
    if isinstance(found, Tensor):
        memory = found.untyped_storage()
        return {memory.data_ptr(): memory.nbytes()}
    inside: list[object] = list(found) if isinstance(found, list | tuple) else []
    if not inside and hasattr(found, "__dict__"):
        inside = list(vars(found).values())
    elif not inside and hasattr(found, "__slots__"):
        inside = [getattr(found, name) for name in found.__slots__]
    return {where: n for x in inside for where, n in held(x).items()}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("samples", [1, 3])
def test_the_statistics_count_every_tensor_of_the_states(
    kind: str, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, seen = WRITERS[kind](), [0]
    step = writer.decoder.hidden

    def weighed(ids: Tensor, at: Any = None, state: Any = None, memory: Any = None) -> Tensor:
        out = step(ids, at, state, memory)
        seen.append(sum(held(state).values()))
        return out

    monkeypatch.setattr(writer.decoder, "hidden", weighed)
    stats = generate(writer, PROMPTS[:2], GREEDY, Stop(max_tokens=5), samples=samples).stats
    assert stats.cache_bytes == max(seen)
    beam = beam_search(writer, PROMPTS[:2], Beam(width=3), Stop(max_tokens=5)).stats
    assert beam.cache_bytes == max(seen) if samples == 3 else beam.cache_bytes > stats.cache_bytes


def test_the_state_of_a_draft_counts() -> None:
    model = decoder()
    alone = speculate(model, PROMPTS[:1], PromptLookup(), GREEDY, Stop(max_tokens=5)).stats.cache_bytes
    assert speculate(model, PROMPTS[:1], decoder(seed=1), GREEDY, Stop(max_tokens=5)).stats.cache_bytes > 1.9 * alone


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "more forced than written": (
        lambda: generate(decoder(), [[1]], Sampling(forced=(3, 4, 5)), Stop(max_tokens=2)),
        "got 3 tokens for an answer of at most 2",
    ),
    "forced after the end": (
        lambda: generate(decoder(), [[1]], Sampling(forced=(2, 4)), Stop(max_tokens=9, ids=(2,))),
        "token 1 is 2, at which an answer ends",
    ),
    "forced to end too soon": (
        lambda: beam_search(decoder(), [[1]], Beam(), Stop(9, min_tokens=3, ids=(2,)), Sampling(forced=(4, 2))),
        "token 2 is 2, at which an answer ends",
    ),
    "a penalty beyond float32": (lambda: Sampling(presence=1e39), "presence"),
    "a reward beyond float32": (lambda: Sampling(frequency=-1e300), "frequency"),
    "a factor beyond float32": (lambda: Sampling(repetition=1e39), "repetition"),
    "a factor below it": (lambda: Sampling(repetition=1e-60), "repetition"),
    "too many samples": (lambda: generate(decoder(), [[1]], samples=10**9), "at most 1,048,576 in one call"),
    "a number of 400 digits": (lambda: Sampling(temperature=10**400), "sampling.temperature"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(case: str) -> None:
    call, says = REFUSED[case]
    with pytest.raises(BrickError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_forced_end_is_fine_in_its_place() -> None:
    stop = Stop(max_tokens=9, min_tokens=2, ids=(2,))
    for made in (
        generate(decoder(), [[1]], Sampling(forced=(4, 2)), stop),
        beam_search(decoder(), [[1]], Beam(), stop, Sampling(forced=(4, 2))),
    ):
        assert made.results[0].tokens == [4, 2] and made.results[0].finish == "stop"


def test_the_largest_penalties_are_bans_that_leave_the_rest() -> None:
    sampling = Sampling(presence=1e30, frequency=1e30, repetition=1e30)
    tokens = generate(decoder().float(), [[1]], sampling, Stop(max_tokens=8)).results[0].tokens
    assert len(set(tokens)) == 8


def test_an_error_of_a_search_keeps_what_was_written() -> None:
    """The prompt has 15 of 17 tokens: after two more none may come, and the message says which one failed."""
    made = beam_search(decoder(), [list(range(15))], Beam(width=2), Stop(max_tokens=5), Sampling(no_repeat_ngram=1))
    result = made.results[0]
    assert "no token is allowed as token 3" in str(result.error) and sorted(result.tokens) == [15, 16]
    assert len(result.logprobs) == 2 and result.finish == "error"
    model = decoder()
    with torch.no_grad():
        model.embed.tokens.weight[5] = torch.nan
    result = beam_search(model, [[1]], Beam(width=1), Stop(max_tokens=5), Sampling(forced=(3, 5))).results[0]
    assert "token 3 are not finite" in str(result.error) and result.tokens == [3, 5]
