"""Llama: a decoder with rotary positions, RMSNorm and a gated feed-forward, no biases (arXiv 2302.13971, 2307.09288).

    layer   x + attention(RMSNorm(x)),   x + SwiGLU(RMSNorm(x)),   F = 2/3 · 4·D rounded up to a multiple of 256

The default is the 7 B model. Deviations: the rotary pairs are (i, i + K/2) as in the published checkpoints of the
`transformers` library, where the paper's own code pairs (2i, 2i + 1): the same model up to the order of rows.
"""

from __future__ import annotations

from brickformer.embed import Head
from brickformer.feedforward import GLU
from brickformer.layers import Layer, pattern
from brickformer.mixers.attention import Attention
from brickformer.models import Decoder
from brickformer.norms import RMSNorm
from brickformer.positions import Rope


def llama(
    *,
    vocab: int = 32_000,
    dim: int = 4096,
    depth: int = 32,
    heads: int = 32,
    kv_heads: int | None = None,
    hidden: int | None = None,
    theta: float = 10_000.0,
    eps: float = 1e-5,
    tied: bool = False,
) -> Decoder:
    """Llama, 7 B by default. kv_heads: fewer key heads than heads, as in the larger and the later ones.

    hidden: F, default as above. theta: base of the rotary wavelengths (500 000 in Llama 3). eps: of the norms.
    tied: the head is the token table (the small ones of Llama 3.2).
    """
    width = -(-(8 * dim // 3) // 256) * 256 if hidden is None else hidden
    attention = Attention(heads, kv_heads=kv_heads, position=Rope(theta))
    layer = Layer(attention, GLU(width), norm=RMSNorm(eps))
    return Decoder(vocab, dim, pattern([layer], depth), head=Head(tied=tied))
