"""What pytest checks at run time: the shapes and dtypes that jaxtyping annotations promise, and nothing else.

Other types are mypy's business, and wrong values from users are the package's own (`BrickError`): were they checked
here too, a test could not see the error that a user would see. So every annotation without an array in it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray

CORE = (
    "plain files paths pages spec ranges schema mask kernels attend state positions norms product linear feedforward "
    "moe mixers layers embed init models shapes surgery presets"
).split()


def check(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The type checker given to jaxtyping's import hook, once for every function of the core."""
    fn.__annotations__ = {name: hint for name, hint in fn.__annotations__.items() if _has_array(hint)}
    return beartype(fn) if fn.__annotations__ else fn


def _has_array(hint: Any) -> bool:
    if isinstance(hint, list):  # the arguments of a Callable
        return any(map(_has_array, hint))
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(_has_array, get_args(hint)))
