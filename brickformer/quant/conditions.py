"""Conditions: how a model reads calibration data, whatever mode it and its caller are in.

    with by_data(model, names): ...      evaluating, eager, coded products exact, our own arithmetic in full; full
                                         weights away (away.py)
    as_called(readings)                  the same readings under the autocast of the caller, for they are his

In training, reading is not free of consequences: dropout draws, batch norms and routers keep what they have seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import torch
from torch import nn

from brickformer.quant.away import put_away
from brickformer.quant.hessian import Reading
from brickformer.quant.products import exactly

_DEVICES: Final = ("cpu", "cuda", "mps", "xpu")
"""That autocast knows of."""


@contextmanager
def by_data(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """While these maps are coded. Eager: a graph that was compiled before sees neither hooks nor what is replaced."""
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(put_away(model, names))
        stack.enter_context(exactly())
        for device, dtype in _casting():
            stack.enter_context(torch.autocast(device, dtype, enabled=False))
        if "torch._dynamo" in sys.modules:  # else nothing was compiled, and it takes a second and 30 MB to ask
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Not training. Afterwards, what stands in the place of a module is in the mode in which that was."""
    were = [(model, {name: module.training for name, module in model.named_modules()}) for model in models]
    try:
        for model in models:
            for module in model.modules():
                module.training = False
        yield
    finally:
        for model, training in were:
            for name, module in model.named_modules():
                module.training = training.get(name, module.training)


def as_called(readings: Sequence[Reading]) -> Sequence[Reading]:
    """Under the autocast that is on now, wherever they take place."""
    casting = _casting()

    def under(reading: Reading) -> Reading:
        def read(model: nn.Module) -> object:
            with ExitStack() as stack:
                for device, dtype in casting:
                    stack.enter_context(torch.autocast(device, dtype))
                return reading(model)

        return read

    return [under(reading) for reading in readings] if casting else readings


def _casting() -> list[tuple[str, torch.dtype]]:
    return [(device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device)]
