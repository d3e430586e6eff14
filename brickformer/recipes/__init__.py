"""Recipes: Python functions that return a frozen `Run`. What `brick train` knows, what trains runs and opens them.

What few commands need is imported from where it is: published.py (checkpoints of others), gguf.py, onnx.py.
"""

from collections.abc import Callable
from types import MappingProxyType

from brickformer.recipes.pairs import pairs
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
    "pairs",
    "reverse",
    "text",
]
