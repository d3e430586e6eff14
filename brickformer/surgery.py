"""Surgery: find modules of a model, ours or a foreign one, and put others in their place.

    for place in list(places(model, nn.Linear)): replace(model, place.name, made_from(place.module))

A module that stands in several places (a layer met in a loop, a shared expert) is found once, under its first name, and
replaced everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from brickformer.errors import BrickError, nearest


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A module and the dotted name under which it is first met."""

    name: str
    module: nn.Module


def places(model: nn.Module, *kinds: type[nn.Module]) -> Iterator[Place]:
    """Every module of these types, each once, in the order in which the model registers them."""
    for name, module in model.named_modules():
        if issubclass(type(module), kinds):
            yield Place(name, module)


def get(model: nn.Module, name: str) -> nn.Module:
    """The module of that name. Errors: BrickError with the nearest one."""
    known = dict(model.named_modules())
    if name not in known:
        raise BrickError(f"{name!r}: the model has no such module; {nearest(name, known)}")
    return known[name]


def replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` wherever the module of that name stands. Errors: BrickError: no such module, or the model itself."""
    old = get(model, name)
    if old is model:
        raise BrickError("replace(): the model itself cannot be replaced inside itself. Name a module in it.")
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is old:
                parent._modules[key] = new


def tie(model: nn.Module) -> None:
    """Parameters whose numbers lie in one place become one parameter: loading by assignment has parted them."""
    first: dict[tuple[int, torch.Size], nn.Parameter] = {}
    for module in model.modules():
        for key, p in list(module._parameters.items()):
            if p is not None and p.numel():
                module._parameters[key] = first.setdefault((p.data_ptr(), p.shape), p)
