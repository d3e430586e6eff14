"""Published checkpoints, both ways: a folder of the `transformers` library -> a model of bricks, and back.

    load(folder) -> Checkpoint        model, configuration, family
    save(model, folder) -> Saved      the family that computes the same; read back and compared before it is kept

One two-way table of names a family (table.py); see docs/huggingface.md.
"""

from brickformer.hf.families import FAMILIES
from brickformer.hf.fit import fit
from brickformer.hf.load import Checkpoint, load
from brickformer.hf.save import Saved, save

__all__ = ["FAMILIES", "Checkpoint", "Saved", "fit", "load", "save"]
