"""Continue a text, character by character: a small decoder of today's bricks (RoPE, SwiGLU, RMSNorm, QK-norm, Muon)."""

from __future__ import annotations

from brickformer.embed import Head
from brickformer.feedforward import GLU
from brickformer.layers import Layer, pattern
from brickformer.mixers.attention import Attention
from brickformer.models import Decoder
from brickformer.norms import RMSNorm
from brickformer.positions import Rope
from brickformer.recipes.run import FROM_DATA, Run
from brickformer.tasks.text import Text
from brickformer.train.optim import AdamW, Muon
from brickformer.train.schedule import LinearDecay
from brickformer.train.settings import Training


def text(data: str) -> Run:
    """D = 128, 4 layers, 4 heads, context 64. data: path of a UTF-8 text file."""
    layer = Layer(Attention(heads=4, position=Rope(), qk_norm=RMSNorm()), GLU(340))
    return Run(
        task=Text(data=data, context=64),
        model=Decoder(FROM_DATA, 128, pattern([layer], depth=4), head=Head(tied=True)),
        train=Training(
            steps=2000,
            batch=12,
            optim=Muon(lr=0.02, rest=AdamW(lr=3e-3, weight_decay=0.0)),
            schedule=LinearDecay(warmup=100),
            validate_every=250,
        ),
        name="text",
    )
