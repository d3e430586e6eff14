"""Every brick there is, imported: files, `--set` and `brick list` know a brick only once its own file has been read."""

from __future__ import annotations

import pkgutil
from functools import lru_cache
from importlib import import_module
from types import ModuleType

import brickformer.generate
import brickformer.mixers
import brickformer.moe
import brickformer.positions
import brickformer.quant
import brickformer.tasks
import brickformer.train

PACKAGES = (
    brickformer.mixers,
    brickformer.positions,
    brickformer.tasks,
    brickformer.train,
    brickformer.generate,
    brickformer.quant,
)


@lru_cache(maxsize=1)
def import_bricks() -> None:
    """Read every file of the packages that hold bricks."""
    for package in PACKAGES:
        _read(package)


def _read(package: ModuleType) -> None:
    for found in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{found.name}")
