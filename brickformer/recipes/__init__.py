"""Recipes: Python functions that return a frozen `Run`. What `brick train` knows, what trains runs and opens them."""

from collections.abc import Callable
from types import MappingProxyType

from brickformer.recipes.pairs import pairs
from brickformer.recipes.published import load, save
from brickformer.recipes.reverse import reverse
from brickformer.recipes.run import FROM_DATA, Run, completed, forward
from brickformer.recipes.session import Session
from brickformer.recipes.text import text
from brickformer.recipes.trained import Trained

RECIPES: MappingProxyType[str, Callable[..., Run]] = MappingProxyType(
    {"reverse": reverse, "text": text, "pairs": pairs}
)
"""Every recipe by name. Those that learn a file take its path as `data`."""

__all__ = [
    "FROM_DATA",
    "RECIPES",
    "Run",
    "Session",
    "Trained",
    "completed",
    "forward",
    "load",
    "pairs",
    "reverse",
    "save",
    "text",
]
