"""What careless callers give, in one line each; and temperatures at the ends of the numbers there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from generate.worlds import decoder, encoder_decoder

from brickformer.errors import BrickError
from brickformer.generate import Beam, PromptLookup, Sampling, Stop, Writer, beam_search, generate, score, speculate
from brickformer.generate.choose import shape
from brickformer.generate.sampling import draw

SHORT = Stop(max_tokens=3)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "ids for prompts": (lambda: generate(decoder(), [1, 2]), "Write \\[ids\\]"),  # type: ignore[list-item]
    "a number for prompts": (lambda: generate(decoder(), 5), "list of prompts"),  # type: ignore[arg-type]
    "ids to score": (lambda: score(decoder(), [1, 2]), "Write \\[ids\\]"),  # type: ignore[list-item]
    "samples in a string": (lambda: generate(decoder(), [[1]], samples="3"), "samples='3'"),  # type: ignore[arg-type]
    "no batch to score": (lambda: score(decoder(), [[1, 2]], batch=0), "batch=0"),
    "no batch of beams": (lambda: beam_search(decoder(), [[1]], batch=0), "batch=0"),
    "half a guess": (lambda: speculate(decoder(), [[1]], PromptLookup(), ahead=1.5), "ahead"),  # type: ignore[arg-type]
    "half a token": (lambda: Writer(decoder(), max_len=2.5), "max_len=2.5"),  # type: ignore[arg-type]
    "a steep penalty": (lambda: Beam(length_penalty=1e6), "length_penalty"),
    "a steep reward": (lambda: Beam(length_penalty=-1e6), "length_penalty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_fits_nothing_is_refused_in_one_line(case: str) -> None:
    call, says = REFUSED[case]
    with pytest.raises(BrickError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", [None, 2.0, [1.5, 2], [None], [[1, 2]]], ids=repr)
def test_a_prompt_that_is_none_ends_its_row_only(prompt: object) -> None:
    bad, good = generate(decoder(), [prompt, [3]], stop=SHORT).results  # type: ignore[list-item]
    assert bad.finish == "error" and "expected a text or a list of ids" in str(bad.error)
    assert good.tokens == generate(decoder(), [[3]], stop=SHORT).results[0].tokens


@pytest.mark.parametrize("temperature", [1e-8, 1e-20, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lowest_temperatures_are_greedy(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.5, 3.0, -2.0, 1.0], [-7.0, -9.0, -torch.inf, -8.0]], dtype=dtype)
    shaped = shape(logits, Sampling(temperature=temperature))
    assert draw(shaped, torch.tensor([0.9, 0.1])).tolist() == [1, 0]


def test_the_highest_temperatures_keep_what_is_banned_out() -> None:
    logits = torch.tensor([[0.5, 3.0, -torch.inf, 1.0]])
    for temperature in (1e8, 1e20, 1e30):
        p = shape(logits, Sampling(temperature=temperature)).softmax(-1)
        assert torch.allclose(p, torch.tensor([[1 / 3, 1 / 3, 0.0, 1 / 3]]))


def test_a_draft_that_cannot_read_a_source_guesses_nothing() -> None:
    """Its encoder knows fewer positions: the answer is the model's all the same. Fewer tokens: it does not fit."""
    from brickformer.positions import Learned

    def short(vocab: int, places: int) -> object:
        spec = encoder_decoder().spec
        fewer = {"encoder.vocab": vocab, "encoder.embed.position": Learned(max_len=places)}
        return spec.but(**fewer).build().double().eval()

    model = encoder_decoder()
    writer = Writer(model, start=[1])
    prompts = [[3, 4, 5, 6, 7, 8], [3, 4]]
    plain = generate(writer, prompts, stop=SHORT).results
    known = model.encoder.spec.vocab
    made = speculate(writer, prompts, short(known, 3), stop=SHORT)  # type: ignore[arg-type]
    assert [r.tokens for r in made.results] == [r.tokens for r in plain] and made.stats.proposed > 0
    with pytest.raises(BrickError, match="encoder knows"):
        speculate(writer, prompts, short(known - 2, 9), stop=SHORT)  # type: ignore[arg-type]
