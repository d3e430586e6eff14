"""Tiny models and tokenizers for the tests of generation, and naive decoding to hold against it.

The naive loops know no state, no batch and no padding: one row, everything read again for every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from brickformer.embed import Embed, Head
from brickformer.errors import StateError
from brickformer.feedforward import GLU, MLP
from brickformer.generate import Writer
from brickformer.layers import Layer, pattern
from brickformer.mask import FULL, Mask, Span
from brickformer.mixers.attention import Attention
from brickformer.mixers.base import Mixer, MixerSpec, expect_state
from brickformer.mixers.cross import Cross
from brickformer.mixers.shortconv import ShortConv
from brickformer.models import Decoder, DecoderModel, Encoder, EncoderDecoder, EncoderDecoderModel
from brickformer.norms import LayerNorm
from brickformer.positions import Alibi, Learned, Rope, Sinusoid, T5Bias
from brickformer.spec import spec
from brickformer.state import State

VOCAB = 17
M = TypeVar("M", bound=torch.nn.Module)


@spec("test_decay")
class Decay(MixerSpec):
    """A recurrent mixer, h_t = h_{t-1} / 2 + x_t: nothing it has read can be taken back."""

    def build(self, dim: int) -> Mixer:
        return DecayMixer(dim)


class DecayMixer(Mixer):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(dim, dim)
        self.causal = True

    def forward(self, x: Tensor, at: Span, state: State | None = None) -> Tensor:
        kept = None if state is None else expect_state(state, DecayState, "decay")
        h = torch.zeros_like(x[:, 0]) if kept is None else kept.h
        real, out = at.real(), []
        for t in range(x.shape[1]):
            new = h / 2 + x[:, t]
            h = new if real is None else torch.where(real[:, t, None], new, h)
            out.append(h)
        if kept is not None:
            kept.h = h
        return self.out(torch.stack(out, 1))

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return DecayState(torch.zeros(batch, self.out.in_features, device=device, dtype=dtype))


class DecayState(State):
    def __init__(self, h: Tensor) -> None:
        self.h = h

    def select(self, rows: Tensor) -> None:
        self.h = self.h[rows]

    def clone(self) -> DecayState:
        return DecayState(self.h.clone())

    def rewind(self, to: int) -> None:
        raise StateError("decay: what has been read cannot be taken back.")

    @property
    def nbytes(self) -> int:
        return self.h.nbytes


def decoder(
    mixer: MixerSpec | None = None, *, vocab: int = VOCAB, depth: int = 2, embed: Embed | None = None, seed: int = 0
) -> DecoderModel:
    """A decoder whose choices are not all alike."""
    mixer = mixer or Attention(heads=4, kv_heads=2, position=Rope())
    made = Decoder(vocab, 16, pattern([Layer(mixer, GLU(24))], depth), embed or Embed(), Head(tied=False))
    return lively(made.build(), seed)


def encoder_decoder(*, limit: int = 64, seed: int = 0) -> EncoderDecoderModel:
    """The 2017 kind, with a learned table of positions in the decoder."""
    encoder = Encoder(VOCAB, 16, (Layer(Attention(heads=4, mask=FULL), MLP(24)),), Embed(position=Sinusoid(max_len=32)))
    layer = Layer(Attention(heads=4), MLP(24), cross=Cross(heads=4), norm=LayerNorm(), place="post")
    target = Decoder(VOCAB, 16, pattern([layer], 2), Embed(position=Learned(max_len=limit)), Head(tied=False))
    return lively(EncoderDecoder(encoder, target).build(), seed)


def lively(model: M, seed: int) -> M:
    """Weights large enough that the next token depends on the tokens before it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.5, generator=generator)
    return model.double().eval()


DECODERS = {
    "rope": lambda: decoder(),
    "alibi": lambda: decoder(Attention(heads=4, position=Alibi())),
    "t5": lambda: decoder(Attention(heads=4, position=T5Bias())),
    "learned": lambda: decoder(Attention(heads=4), embed=Embed(position=Learned(max_len=64))),
    "window": lambda: decoder(Attention(heads=4, position=Rope(), mask=Mask(window=3))),
    "shortconv": lambda: decoder(ShortConv(Attention(heads=4, position=Rope()))),
    "recurrent": lambda: decoder(Decay()),
}
WRITERS = {
    **{name: (lambda make=make: Writer(make())) for name, make in DECODERS.items()},
    "encoder-decoder": lambda: Writer(encoder_decoder(), start=[1]),
}
PROMPTS = [[3, 4, 5, 6, 7], [8], [9, 9, 2], list(range(12))]


@torch.no_grad()
def next_logits(writer: Writer, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """(V,) logits after an answer so far: no state, no padding, one row."""
    match writer.model:
        case DecoderModel() as model:
            return model(torch.tensor([[*prompt, *answer]]))[0, -1]
        case EncoderDecoderModel() as model:
            return model(torch.tensor([list(prompt)]), torch.tensor([[*writer.start, *answer]]))[0, -1]


def naive_greedy(
    writer: Writer, prompt: Sequence[int], most: int, stops: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """Tokens and their ln p."""
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < most and not (tokens and tokens[-1] in stops):
        log = next_logits(writer, prompt, tokens).log_softmax(-1)
        tokens.append(int(log.argmax()))
        logprobs.append(log.max().item())
    return tokens, logprobs


class Letters:
    """One id a letter of the alphabet; id 0 is special and has no text."""

    alphabet = "abcdefghijklmnop"
    vocab = VOCAB

    def encode(self, text: str) -> list[int]:
        return [self.alphabet.index(c) + 1 for c in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.alphabet[i - 1] for i in ids if i)
