"""The model of a run folder with its weights: nothing is drawn, copied or unpacked on the way.

The model is built without numbers and given the tensors of the file. A run that was quantized says so in an entry of
its `spec.json` (brickformer/quant/files.py): its coded matrices stay coded.
"""

from __future__ import annotations

from typing import Any, Final

from brickformer.models import AnyModel
from brickformer.quant import restore
from brickformer.recipes.run import Run
from brickformer.shapes import unfilled
from brickformer.surgery import tie
from brickformer.train import RunFolder
from brickformer.train.checkpoint import load_into

ENTRY: Final = "quantized"


def plain_spec(folder: RunFolder) -> dict[str, Any]:
    """The spec of the model as it was trained."""
    return {name: value for name, value in folder.spec().items() if name != ENTRY}


def is_quantized(folder: RunFolder) -> bool:
    """Whether its weights are coded."""
    return ENTRY in folder.spec()


def weighted(folder: RunFolder, run: Run) -> tuple[AnyModel, int]:
    """(the model, after how many steps), on the CPU. Errors: RunError: missing, broken, altered, not fitting."""
    model = unfilled(run.model)
    tensors, step = folder.weights()
    where = str(folder.path / "weights.safetensors")
    spec = folder.spec()
    if ENTRY in spec:
        restore(model, spec[ENTRY], tensors, where)
    else:
        load_into(model, tensors, where, assign=True)
        tie(model)
    return model, step
