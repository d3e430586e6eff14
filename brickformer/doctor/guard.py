"""The patient is a copy; the caller's model, random numbers and standard output stay as they were."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import warnings
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Random numbers of Python and torch, the default type and grad mode are afterwards what they were."""
    state, dtype = random.getstate(), torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                yield
        finally:
            torch.set_default_dtype(dtype)
            random.setstate(state)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy on the CPU, every parameter asking for its gradient as before. Errors: whatever copying raises."""
    other = copy.deepcopy(model)
    return other.cpu()


def shake(model: nn.Module) -> None:
    """Noise on every parameter, the same each time: initial values are too regular to show what a model does.

    Rows of zeros in a table (padding) stay zero, so that a mask made from them still works.
    """
    noise = torch.Generator().manual_seed(1)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel():
                size = min(parameter.shape[-1] ** -0.5, 0.3) if parameter.ndim > 1 else 0.2
                drawn = torch.randn(parameter.shape, generator=noise, dtype=torch.float64) * size
                if id(parameter) in tables:
                    drawn = drawn * (parameter.abs().sum(-1, keepdim=True) > 0)
                parameter.add_(drawn.to(parameter))
