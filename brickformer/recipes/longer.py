"""Say digits backwards, and sequences longer than any trained on: windows in place of positions.

An answer is found by its neighbours. What was just written, y_{t-4} ... y_{t-1}, is the source read backwards from some
place on; the next digit is the one before that place. Neither side can count: self-attention sees four neighbours on
each side it may look at, cross-attention has no positions, one layer on each side keeps the view that narrow. So what
is learnt from 5 and 6 digits holds for 12. Four digits in a row seldom occur twice in one sequence; where they do, the
answer is a guess, and that is the limit: about 0.4 % of sequences of 12 digits.
"""

from __future__ import annotations

from brickformer.embed import Embed, Head
from brickformer.feedforward import MLP
from brickformer.layers import Layer
from brickformer.mask import Mask
from brickformer.mixers.attention import Attention
from brickformer.mixers.cross import Cross
from brickformer.models import Decoder, Encoder, EncoderDecoder
from brickformer.norms import LayerNorm
from brickformer.positions import Rope
from brickformer.recipes.run import FROM_DATA, Run
from brickformer.tasks.reverse import Reverse
from brickformer.train.optim import AdamW, Muon
from brickformer.train.schedule import Cosine
from brickformer.train.settings import Training

WINDOW = 5
"""A token and its four neighbours."""


def reverse_longer() -> Run:
    """D = 128, 1 + 1 layers, 4 heads, 0.5 M parameters; 20 000 sequences of 3 to 6 digits."""
    near = Rope(theta=20.0)  # its slowest pair turns once in about 100 tokens: neighbours are told apart by all pairs
    reader = Attention(4, position=near, mask=Mask(causal=False, window=WINDOW), bias=True)
    writer = Attention(4, position=near, mask=Mask(window=WINDOW), bias=True)
    mlp, norm, embed = MLP(512), LayerNorm(), Embed(scaled=True)
    return Run(
        task=Reverse(train=20_000),
        model=EncoderDecoder(
            Encoder(FROM_DATA, 128, (Layer(reader, mlp, norm=norm),), embed),
            Decoder(FROM_DATA, 128, (Layer(writer, mlp, cross=Cross(2), norm=norm),), embed, Head(tied=False)),
            shared=True,
        ),
        train=Training(
            steps=2000,
            batch=64,
            optim=Muon(lr=0.015, rest=AdamW(lr=3e-3, weight_decay=0.0)),
            schedule=Cosine(warmup=10),
            validate_every=250,
            ema=0.97,
        ),
        name="reverse-longer",
    )
