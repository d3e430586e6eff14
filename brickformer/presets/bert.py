"""BERT: an encoder that sees both ways and guesses hidden tokens (arXiv 1810.04805).

    layer   LayerNorm(x + attention(x)),   LayerNorm(x + MLP(x)),   F = 4·D, GELU

Sizes (dim, depth, heads): base 768 12 12, large 1024 24 16. Deviations: no segment embedding and no pooler (both serve
next-sentence prediction, which RoBERTa does better without: arXiv 1907.11692), and the head is the token table with
a bias, without the extra dense layer and norm before it.
"""

from __future__ import annotations

from brickformer.embed import Embed, Head
from brickformer.feedforward import MLP
from brickformer.layers import Layer, pattern
from brickformer.mask import FULL
from brickformer.mixers.attention import Attention
from brickformer.models import Encoder
from brickformer.norms import LayerNorm
from brickformer.positions import Learned


def bert(
    *,
    vocab: int = 30_522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    hidden: int | None = None,
    max_len: int = 512,
    dropout: float = 0.1,
) -> Encoder:
    """BERT base by default: 109 M parameters.

    hidden: F, default 4·dim. max_len: the longest text it can read. dropout: on the embedded tokens, on the attention
    weights and on what each branch adds.
    """
    norm = LayerNorm(eps=1e-12)
    mlp = MLP(4 * dim if hidden is None else hidden, activation="gelu")
    attention = Attention(heads, mask=FULL, dropout=dropout, bias=True)
    layer = Layer(attention, mlp, norm=norm, place="post", dropout=dropout)
    embed = Embed(position=Learned(max_len), norm=norm, dropout=dropout)
    return Encoder(vocab, dim, pattern([layer], depth), embed=embed, head=Head(bias=True))
