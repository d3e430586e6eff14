"""Say digits backwards: 7 1 4 -> 4 1 7. The Transformer of 2017 in small, with the norm before each branch.

1000 sequences are enough, and a few hundred steps: the exact match on unseen sequences is complete within a minute.
"""

from __future__ import annotations

from brickformer.presets import vaswani_small
from brickformer.recipes.run import FROM_DATA, Run
from brickformer.recipes.standard import standard
from brickformer.tasks.reverse import Reverse
from brickformer.train.optim import AdamW, Muon
from brickformer.train.schedule import Cosine
from brickformer.train.settings import Training


def reverse(model: str | None = None) -> Run:
    """D = 128, 2 + 2 layers, 4 heads; Muon on the matrices, AdamW on the rest; the mean of the weights over 33 steps.

    The mean is what holds the last few sequences: single steps move between 497 and 500 of 500.
    model: "marian" (standard.py), which other libraries read. Errors: SpecError: an unknown model.
    """
    if model is not None:
        return reverse().but(model=standard("reverse", model)(shared=True, dropout=0.0))
    return Run(
        task=Reverse(),
        model=vaswani_small(vocab=FROM_DATA, shared=True).but(**{"decoder.head.tied": False}),
        train=Training(
            steps=300,
            batch=64,
            optim=Muon(lr=0.015, rest=AdamW(lr=7e-4, weight_decay=0.0)),
            schedule=Cosine(warmup=10),
            validate_every=25,
            ema=0.97,
        ),
        name="reverse",
    )
