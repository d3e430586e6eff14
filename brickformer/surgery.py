"""Surgery: find modules of a model, ours or a foreign one, and put others in their place.

    for place in list(places(model, nn.Linear)): replace(model, place.name, made_from(place.module))

A module that stands in several places (a layer met in a loop, a shared expert) is found once, under its first name, and
replaced everywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from brickformer.errors import BrickError, nearest

_HOOKS: Final = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)
_MAKE_WEIGHTS: Final = (WeightNorm, SpectralNorm, BasePruningMethod)


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


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """Whoever watches or changes the calls of `old` does so with `new`; handles remove them from both.

    Left out are hooks of torch's that make a weight which is no parameter (weight norm, pruning): `new` has its own.
    """
    for name in _HOOKS:
        new.__dict__[name] = old.__dict__[name]
    kept = {i: h for i, h in old._forward_pre_hooks.items() if not isinstance(h, _MAKE_WEIGHTS)}
    if len(kept) < len(old._forward_pre_hooks):
        new._forward_pre_hooks = OrderedDict(kept)


def tie(model: nn.Module) -> None:
    """Parameters whose numbers lie in one place become one parameter: loading by assignment has parted them."""
    first: dict[tuple[int, torch.Size], nn.Parameter] = {}
    for module in model.modules():
        for key, p in list(module._parameters.items()):
            if p is not None and p.numel():
                module._parameters[key] = first.setdefault((p.data_ptr(), p.shape), p)
