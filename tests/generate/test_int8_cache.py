"""Every way to decode, on a cache of int8: among themselves they agree as they do on an exact one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from generate.worlds import PROMPTS, VOCAB, Letters, decoder, encoder_decoder, lively

from brickformer.embed import Head
from brickformer.errors import StateError
from brickformer.feedforward import GLU
from brickformer.generate import (
    Beam,
    Generation,
    Prefix,
    PromptLookup,
    Sampling,
    Stop,
    Writer,
    beam_search,
    generate,
    read_prompt,
    speculate,
    stream,
)
from brickformer.layers import Layer
from brickformer.mask import Mask
from brickformer.mixers.attention import Attention
from brickformer.models import Decoder
from brickformer.positions import Rope

STOP = Stop(max_tokens=9)
WRITERS = {
    "rope": lambda: Writer(decoder(), Letters(), cache="int8"),
    "window": lambda: Writer(
        decoder(Attention(heads=4, position=Rope(), mask=Mask(window=3))), Letters(), cache="int8"
    ),
    "encoder-decoder": lambda: Writer(encoder_decoder(), Letters(), start=[1], cache="int8"),
}


def tokens(made: Generation) -> list[list[int]]:
    return [result.tokens for result in made.results]


@pytest.mark.parametrize("name", WRITERS)
def test_ways_to_decode_agree(name: str) -> None:
    writer = WRITERS[name]()
    together = generate(writer, PROMPTS, stop=STOP)
    alone = [generate(writer, [prompt], stop=STOP) for prompt in PROMPTS]
    assert tokens(together) == [tokens(made)[0] for made in alone]
    for ours, theirs in zip(together.results, alone, strict=True):
        assert ours.logprobs == pytest.approx(theirs.results[0].logprobs, abs=1e-9)
    exact = generate(Writer(writer.model, start=writer.start), PROMPTS, stop=STOP)
    assert together.results[0].logprobs[0] == pytest.approx(exact.results[0].logprobs[0], abs=0.1)
    assert together.results[0].logprobs[-1] != exact.results[0].logprobs[-1], "it was the exact cache that ran"
    assert tokens(beam_search(writer, PROMPTS, Beam(width=1), STOP)) == tokens(together)
    guessed = speculate(writer, PROMPTS, PromptLookup(), stop=STOP)
    assert tokens(guessed) == tokens(together)
    assert guessed.results[3].logprobs == pytest.approx(together.results[3].logprobs, abs=1e-9)
    assert "".join(stream(writer, PROMPTS[0], stop=STOP)) == together.results[0].text
    drawn = Sampling(temperature=1.0, seed=3)
    several = generate(writer, PROMPTS, drawn, STOP, samples=2)
    assert tokens(several)[::2] == tokens(generate(writer, PROMPTS, drawn, STOP))


def test_beams_carry_their_rows_along() -> None:
    """Each beam's ln p is what reading its tokens at once on an int8 cache gives."""
    writer = WRITERS["rope"]()
    made = beam_search(writer, PROMPTS[:1], Beam(width=4, best=4), STOP)
    assert len({tuple(t) for t in tokens(made)}) == 4
    for result in made.results:
        ids = torch.tensor([[*PROMPTS[0], *result.tokens]])
        log = writer.model(ids, state=writer.init_state(1, ids.shape[1])).log_softmax(-1)
        read = log[0, len(PROMPTS[0]) - 1 : -1].gather(1, ids[0, len(PROMPTS[0]) :, None])[:, 0]
        assert result.logprobs == pytest.approx(read.tolist(), abs=1e-9)


@pytest.mark.parametrize("name", ["rope", "window"])
def test_a_prompt_is_kept_in_a_file_as_it_was_read(name: str, tmp_path: Path) -> None:
    writer = WRITERS[name]()
    prefix = read_prompt(writer, PROMPTS[3], room=20)
    prefix.save(tmp_path / "prompt")
    loaded = Prefix.load(tmp_path / "prompt", Writer(writer.model))
    assert loaded.cache == "int8" and loaded.state.nbytes == prefix.state.nbytes
    expected = tokens(generate(writer, [[*PROMPTS[3], 4]], stop=STOP))
    for kept in (prefix, loaded):
        assert tokens(generate(writer, [[4]], stop=STOP, prefix=kept)) == expected


def test_the_stats_say_what_is_saved() -> None:
    spec = Decoder(VOCAB, 64, (Layer(Attention(heads=1), GLU(8)),), head=Head(tied=False))
    model = lively(spec.build(), 0).float()
    held = {
        cache: generate(Writer(model, cache=cache), [[1, 2]], stop=STOP).stats.cache_bytes  # type: ignore[arg-type]
        for cache in ("float", "int8")
    }
    assert 0.25 < held["int8"] / held["float"] <= 0.30


def test_an_unknown_cache_is_refused() -> None:
    with pytest.raises(StateError, match="cache: got 'int4'"):
        Writer(decoder(), cache="int4")  # type: ignore[arg-type]
