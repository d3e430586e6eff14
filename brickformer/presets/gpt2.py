"""GPT-2: a decoder alone, with learned positions and the norm before each branch (Radford et al. 2019, "Language Models
are Unsupervised Multitask Learners").

    layer   x + attention(LayerNorm(x)),   x + MLP(LayerNorm(x)),   F = 4·D, GELU by its tanh formula

Sizes (dim, depth, heads): small 768 12 12, medium 1024 24 16, large 1280 36 20, XL 1600 48 25. Deviations: none in the
arithmetic; the published weights hold the transposes of our matrices.
"""

from __future__ import annotations

from brickformer.embed import Embed
from brickformer.feedforward import MLP
from brickformer.layers import Layer, pattern
from brickformer.mixers.attention import Attention
from brickformer.models import Decoder
from brickformer.norms import LayerNorm
from brickformer.positions import Learned


def gpt2(
    *,
    vocab: int = 50_257,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    hidden: int | None = None,
    max_len: int = 1024,
    dropout: float = 0.1,
) -> Decoder:
    """GPT-2, the small one by default: 124 M parameters, the head tied to the token table.

    hidden: F, default 4·dim. max_len: the longest text it can read. dropout: on the embedded tokens, on the attention
    weights and on what each branch adds.
    """
    mlp = MLP(4 * dim if hidden is None else hidden, activation="gelu_tanh")
    layer = Layer(Attention(heads, dropout=dropout, bias=True), mlp, norm=LayerNorm(), dropout=dropout)
    embed = Embed(position=Learned(max_len), dropout=dropout)
    return Decoder(vocab, dim, pattern([layer], depth), embed=embed)
