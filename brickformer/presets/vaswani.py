"""The Transformer of 2017: an encoder that reads, a decoder that writes (arXiv 1706.03762).

    encoder layer   self-attention, ReLU feed-forward
    decoder layer   causal self-attention, cross-attention, ReLU feed-forward
    embedding       √D · table[id] + sinusoid(position); the logits use the table of the target again

base is D = 512, 6 + 6 layers, 8 heads, F = 2048 (table 3 of the paper). Deviations, each an argument: the norm comes
before the branch (`place="post"` is the paper's; that one needs a warm-up), and the two vocabularies are two tables
unless `shared=True`, which the paper uses.
"""

from __future__ import annotations

from brickformer.embed import Embed
from brickformer.feedforward import MLP
from brickformer.layers import Layer, Place, pattern
from brickformer.mask import FULL
from brickformer.mixers.attention import Attention
from brickformer.mixers.cross import Cross
from brickformer.models import Decoder, Encoder, EncoderDecoder
from brickformer.norms import LayerNorm
from brickformer.positions import Sinusoid


def vaswani(
    *,
    vocab: int,
    target_vocab: int | None = None,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    hidden: int | None = None,
    max_len: int = 1024,
    dropout: float = 0.1,
    place: Place = "pre",
    shared: bool = False,
) -> EncoderDecoder:
    """The base model of the paper. vocab: of the source, and of the target unless `target_vocab` says otherwise.

    depth: layers on each side. hidden: F, default 4·dim. max_len: rows of the position table. dropout: on what each
    branch adds and on the embedded tokens, as in section 5.4 of the paper.
    """
    mlp, norm = MLP(4 * dim if hidden is None else hidden), LayerNorm()
    embed = Embed(position=Sinusoid(max_len), scaled=True, dropout=dropout)
    reader = Layer(Attention(heads, mask=FULL), mlp, norm=norm, place=place, dropout=dropout)
    writer = Layer(Attention(heads), mlp, cross=Cross(heads), norm=norm, place=place, dropout=dropout)
    return EncoderDecoder(
        encoder=Encoder(vocab, dim, pattern([reader], depth), embed=embed),
        decoder=Decoder(vocab if target_vocab is None else target_vocab, dim, pattern([writer], depth), embed=embed),
        shared=shared,
    )


def vaswani_small(
    *,
    vocab: int,
    target_vocab: int | None = None,
    dim: int = 128,
    depth: int = 2,
    heads: int = 4,
    hidden: int | None = None,
    max_len: int = 1024,
    dropout: float = 0.0,
    place: Place = "pre",
    shared: bool = False,
) -> EncoderDecoder:
    """The same in a size that learns in seconds on a CPU: D = 128, 2 + 2 layers, 4 heads, F = 512, no dropout."""
    return vaswani(
        vocab=vocab,
        target_vocab=target_vocab,
        dim=dim,
        depth=depth,
        heads=heads,
        hidden=hidden,
        max_len=max_len,
        dropout=dropout,
        place=place,
        shared=shared,
    )
