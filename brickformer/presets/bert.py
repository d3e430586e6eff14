"""BERT: an encoder that sees both ways and guesses hidden tokens (arXiv 1810.04805).

    layer   LayerNorm(x + attention(x)),   LayerNorm(x + MLP(x)),   F = 4·D, GELU
    embed   LayerNorm(token + segment + position);   head   LayerNorm(gelu(W h + b)), the token table again, a bias

Sizes (dim, depth, heads): base 768 12 12, large 1024 24 16. It is the published model with a head for hidden words, and
exports as one. Deviation: no pooler, which serves next-sentence prediction (RoBERTa does without: arXiv 1907.11692).
"""

from __future__ import annotations

from brickformer.embed import Embed, Head, Transform
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
    segments: int = 2,
    dropout: float = 0.1,
) -> Encoder:
    """BERT base by default: 110 M parameters.

    hidden: F, default 4·dim. max_len: the longest text it can read. segments: how many parts of a text it tells apart;
    all tokens are of the first unless it is told. dropout: on the embedded tokens, on the attention weights and on
    what each branch adds.
    """
    norm = LayerNorm(eps=1e-12)
    mlp = MLP(4 * dim if hidden is None else hidden, activation="gelu")
    attention = Attention(heads, mask=FULL, dropout=dropout, bias=True)
    layer = Layer(attention, mlp, norm=norm, place="post", dropout=dropout)
    embed = Embed(position=Learned(max_len), norm=norm, dropout=dropout, segments=segments)
    head = Head(bias=True, transform=Transform("gelu", norm))
    return Encoder(vocab, dim, pattern([layer], depth), embed=embed, head=head)
