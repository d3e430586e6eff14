"""Continue a text, character by character: a small decoder of today's bricks, trained with Muon.

Its own layers are in no published family: one that other libraries are to read is trained as `model="llama"`.

What matters at this size, on tinyshakespeare: Muon on the matrices (-0.3 in validation loss against AdamW), a short
convolution before attention and before each network (-0.05), a high learning rate for tables, gains and head (-0.02);
three wide layers learn as well as four and take less time. RoPE, SwiGLU and QK-norm are the ground they stand on.
"""

from __future__ import annotations

from brickformer.embed import Head
from brickformer.feedforward import GLU
from brickformer.layers import Layer, pattern
from brickformer.mask import Mask
from brickformer.mixers.attention import Attention
from brickformer.mixers.pointwise import Pointwise
from brickformer.mixers.shortconv import ShortConv
from brickformer.models import Decoder
from brickformer.norms import LayerNorm
from brickformer.positions import Rope
from brickformer.recipes.run import FROM_DATA, Run
from brickformer.recipes.standard import CONTEXT, standard
from brickformer.tasks.text import Text
from brickformer.train.optim import AdamW, Muon
from brickformer.train.schedule import LinearDecay
from brickformer.train.settings import Training


def text(data: str, model: str | None = None) -> Run:
    """D = 144, 3 layers, 4 heads, context 64: 0.80 M parameters. data: path of a UTF-8 text file.

    A token looks at the last 64, as many as there are in a training window: so what is written may be of any length.
    model: "llama", "gpt2" (standard.py), which look at all that was written and learn from longer windows, as many
    tokens a step. Errors: SpecError: an unknown model.
    """
    if model is not None:
        other = standard("text", model)()
        return text(data).but(model=other, **{"task.context": CONTEXT, "train.batch": 3})
    norm = LayerNorm(bias=False)
    attention = Attention(heads=4, position=Rope(theta=1000.0), mask=Mask(window=64), qk_norm=norm)
    layers = [
        Layer(ShortConv(attention, kernel=3), norm=norm),
        Layer(ShortConv(Pointwise(GLU(408)), kernel=3), norm=norm),
    ]
    return Run(
        task=Text(data=data, context=64),
        model=Decoder(FROM_DATA, 144, pattern(layers, depth=6), head=Head(tied=False)),
        train=Training(
            steps=2000,
            batch=12,
            optim=Muon(lr=0.02, momentum=0.9, iterations=3, weight_decay=0.05, rest=AdamW(lr=0.01, weight_decay=0.0)),
            schedule=LinearDecay(warmup=50),
            validate_every=500,
        ),
        name="text",
    )
