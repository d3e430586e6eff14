"""Turn one text into another: an encoder-decoder that learns the pairs of a two-column file."""

from __future__ import annotations

from brickformer.presets import vaswani_small
from brickformer.recipes.run import FROM_DATA, Run
from brickformer.recipes.standard import standard
from brickformer.tasks.pairs import Pairs
from brickformer.train.optim import AdamW, Muon
from brickformer.train.schedule import LinearDecay
from brickformer.train.settings import Training


def pairs(data: str, model: str | None = None) -> Run:
    """D = 128, 2 + 2 layers, 4 heads, character by character. data: path of a file, source TAB target on each line.

    model: "marian" (standard.py), which other libraries read. Errors: SpecError: an unknown model.
    """
    if model is not None:
        return pairs(data).but(model=standard("pairs", model)())
    return Run(
        task=Pairs(data=data),
        model=vaswani_small(vocab=FROM_DATA, target_vocab=FROM_DATA, dropout=0.1),
        train=Training(
            steps=1000,
            batch=64,
            optim=Muon(lr=0.02, rest=AdamW(lr=3e-3, weight_decay=0.0)),
            schedule=LinearDecay(warmup=50),
            validate_every=100,
        ),
        name="pairs",
        answers=100,
    )
