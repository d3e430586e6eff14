"""Models of published families, in the sizes of our recipes: what `brick train RECIPE --model NAME` trains.

A recipe's own model is the one that learns best, and its bricks may be in no published family, so that nobody else can
read it. One of these can be exported: `brick export RUN --to hf`, and the decoders `--to gguf`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from brickformer.embed import Head
from brickformer.errors import SpecError, nearest
from brickformer.feedforward import MLP
from brickformer.layers import Layer, pattern
from brickformer.mask import FULL
from brickformer.mixers.attention import Attention
from brickformer.mixers.cross import Cross
from brickformer.models import Decoder, Encoder, EncoderDecoder, ModelSpec
from brickformer.norms import LayerNorm
from brickformer.positions import Sinusoid
from brickformer.presets import gpt2, llama, vaswani_small
from brickformer.recipes.run import FROM_DATA, Run

CONTEXT: Final = 256
"""Tokens that a decoder learns from at once: none of them looks back over a window, so it writes that many well."""


def text_llama() -> Decoder:
    """Llama with D = 128, 4 layers, 4 heads, F = 352: 0.82 M parameters. GGUF packs blocks of 32 numbers."""
    return llama(vocab=FROM_DATA, dim=128, depth=4, heads=4, hidden=352)


def text_gpt2() -> Decoder:
    """GPT-2 in the same size; it reads no more than `CONTEXT` tokens."""
    return gpt2(vocab=FROM_DATA, dim=128, depth=4, heads=4, max_len=CONTEXT, dropout=0.0)


def pairs_marian(*, shared: bool = False, dropout: float = 0.1) -> EncoderDecoder:
    """Marian with D = 128, 2 + 2 layers, 4 heads: the Transformer of 2017 with biases, norms after the branches."""
    small = vaswani_small(vocab=FROM_DATA, target_vocab=FROM_DATA)
    dim, depth, norm = small.encoder.dim, len(small.encoder.layers), LayerNorm()
    embed = small.encoder.embed.but(position=Sinusoid(layout="halves"), dropout=dropout)
    reader = Layer(Attention(4, mask=FULL, bias=True), MLP(4 * dim), norm=norm, place="post", dropout=dropout)
    writer = reader.but(mixer=Attention(4, bias=True), cross=Cross(4, bias=True))
    return EncoderDecoder(
        Encoder(FROM_DATA, dim, pattern([reader], depth), embed),
        Decoder(FROM_DATA, dim, pattern([writer], depth), embed, Head(bias=True)),
        shared=shared,
    )


STANDARD: Final[Mapping[str, Mapping[str, Callable[..., ModelSpec]]]] = MappingProxyType(
    {
        "text": MappingProxyType({"llama": text_llama, "gpt2": text_gpt2}),
        "pairs": MappingProxyType({"marian": pairs_marian}),
        "reverse": MappingProxyType({"marian": pairs_marian}),
    }
)
"""By recipe, then by the name of the family; the first is what is recommended."""


def standard(recipe: str, name: str) -> Callable[..., ModelSpec]:
    """The maker of a recipe's standard model. Errors: SpecError: it has none of that name."""
    if name not in STANDARD[recipe]:
        raise SpecError(f"--model {name}: {recipe} has no such model; {nearest(name, STANDARD[recipe])}")
    return STANDARD[recipe][name]


@contextmanager
def advising(run: Run) -> Iterator[None]:
    """Says with the error that no family computes what a run does which command trains a model of one."""
    from brickformer.hf.fit import FamilyError  # the tables of names are for those who ask for them

    try:
        yield
    except FamilyError as e:
        told = command(run)
        if told is None:
            raise
        raise FamilyError(f"no published family computes this model. One that fits: {told}\n{e.why}.") from None


def command(run: Run) -> str | None:
    """What to type for a model of the same task that can be exported; None where no recipe has the task."""
    models = STANDARD.get(run.task.kind)
    if models is None:
        return None
    data = run.task.to_dict().get("data")
    given = "" if data is None else f" --data {shlex.quote(str(data))}"
    return f"brick train {run.task.kind}{given} --model {next(iter(models))}"
