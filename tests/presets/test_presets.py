"""Presets: sizes that the papers and the published checkpoints state, and arguments that reach what they name."""

from __future__ import annotations

import inspect

import pytest
import torch

from brickformer.errors import SpecError
from brickformer.mask import FULL
from brickformer.models import Decoder, Encoder, EncoderDecoder, ModelSpec
from brickformer.presets import PRESETS, bert, gpt2, llama, vaswani, vaswani_small
from brickformer.shapes import shapes_of
from brickformer.spec import read


def parameters(spec: ModelSpec) -> int:
    return sum(p.numel() for p in shapes_of(spec).parameters())


# Published: GPT-2 124 M to 1.5 B, Llama 2 7 B and 70 B, Llama 3 8 B, Llama 3.2 1 B (its head tied).
# BERT base 109,482,240 and large 335,141,888 with a pooler, here with the head for hidden words in its place.
PUBLISHED = [
    (gpt2(), 124_439_808),
    (gpt2(dim=1024, depth=24, heads=16), 354_823_168),
    (gpt2(dim=1600, depth=48, heads=25), 1_557_611_200),
    (llama(), 6_738_415_616),
    (llama(dim=5120, depth=40, heads=40), 13_015_864_320),
    (llama(dim=8192, depth=80, heads=64, kv_heads=8, hidden=28_672), 68_976_648_192),
    (llama(vocab=128_256, kv_heads=8, hidden=14_336, theta=500_000.0), 8_030_261_248),
    (llama(vocab=128_256, dim=2048, depth=16, heads=32, kv_heads=8, hidden=8192, tied=True), 1_235_814_400),
    (bert(), 109_482_240 + 2 * 768 + 30_522),  # pooler and transform are of one size; a norm and a bias more
    (bert(dim=1024, depth=24, heads=16), 335_141_888 + 2 * 1024 + 30_522),
]


@pytest.mark.parametrize(("spec", "expected"), PUBLISHED, ids=lambda v: v.kind if isinstance(v, ModelSpec) else f"{v}")
def test_parameters_are_those_published(spec: ModelSpec, expected: int) -> None:
    assert parameters(spec) == expected


def test_vaswani_has_the_parameters_of_the_paper() -> None:
    """Counted from the paper: per layer 4·D² of attention (8 in the decoder), 2·D·F + F + D, a norm of 2·D a branch."""
    dim, hidden, depth, vocab = 512, 2048, 6, 37_000
    mlp, norm = 2 * dim * hidden + hidden + dim, 2 * dim
    encoder = depth * (4 * dim**2 + mlp + 2 * norm)
    decoder = depth * (8 * dim**2 + mlp + 3 * norm)
    assert parameters(vaswani(vocab=vocab, shared=True, place="post")) == vocab * dim + encoder + decoder
    assert (
        parameters(vaswani(vocab=vocab, shared=True)) == vocab * dim + encoder + decoder + 2 * norm
    )  # a last norm each
    assert parameters(vaswani(vocab=10, target_vocab=20)) == 30 * dim + encoder + decoder + 2 * norm


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_keywords_only_and_reads_itself_back(name: str) -> None:
    make = PRESETS[name]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in inspect.signature(make).parameters.values())
    spec = make(vocab=50)
    assert read(ModelSpec, spec.to_dict(), "spec") == spec
    assert "Deviation" in (inspect.getmodule(make).__doc__ or "")


def test_what_is_asked_for_is_what_is_built() -> None:
    spec = vaswani_small(
        vocab=11, target_vocab=12, dim=24, depth=3, heads=6, hidden=40, max_len=9, dropout=0.5, place="post"
    )
    assert isinstance(spec, EncoderDecoder)
    assert (spec.encoder.vocab, spec.decoder.vocab, len(spec.encoder.layers), len(spec.decoder.layers)) == (
        11,
        12,
        3,
        3,
    )
    assert all(layer.place == "post" and layer.dropout == 0.5 for layer in (*spec.encoder.layers, *spec.decoder.layers))
    model = spec.build()
    assert model.decoder.embed.tokens.weight.shape == (12, 24)
    with pytest.raises(ValueError, match="9 positions"):
        model(torch.zeros(1, 10, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))


def test_the_hidden_width_of_llama_is_rounded_up_as_in_the_paper() -> None:
    """11008, 13824, 17920 and 22016 for the four sizes of the first paper."""
    for dim, hidden in ((4096, 11_008), (5120, 13_824), (6656, 17_920), (8192, 22_016)):
        assert llama(dim=dim, heads=dim // 128).layers[0].ffn.to_dict()["hidden"] == hidden


def test_encoders_see_both_ways_and_decoders_do_not() -> None:
    assert isinstance(bert(), Encoder) and bert().layers[0].mixer.to_dict()["mask"] == FULL.to_dict()
    assert isinstance(gpt2(), Decoder) and gpt2().layers[0].mixer.to_dict()["mask"]["causal"]
    assert bert(depth=1).layers[0].place == "post"


def test_heads_that_do_not_divide_are_refused_at_once() -> None:
    with pytest.raises(SpecError, match="heads: got 7, expected a divisor of dim=64"):
        gpt2(dim=64, heads=7, depth=1, vocab=10).build()
