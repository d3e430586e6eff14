"""Ranges: what a number in a spec may be, asked where it is written down and not where a model of it would say NaN.

Models compute in float32 and below. A number far outside of what any model uses (a softcap of 1e308, a width of 2⁶³)
becomes inf, NaN or an error of a kernel, far from its field. Each function refuses with a SpecError that names the
field, what was found and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from brickformer.errors import BrickError, SpecError
from brickformer.spec import Spec

LARGEST: Final = 2**31 - 1
"""Of a width or a count: positions are 32-bit numbers (`mask.EMPTY`)."""
LONGEST: Final = 2**24
"""Rows of a table that is computed, places that are drawn at every step."""
MOST: Final = 10_000
"""Layers, rounds and experts: each is a module of its own."""
STEEP: Final = 1e6
"""What may multiply or cap a number that is then squared or exponentiated."""

TOO_LARGE: Final = ("allocate memory", "out of memory", "overflow", "Overflow")
"""What torch says of a tensor that is too large."""


def check_width(of: Spec, field: str, width: int, most: int = LARGEST) -> None:
    """A width or a count is at least 1. Errors: SpecError."""
    if width < 1:
        raise of.refuse(field, "at least 1")
    if width > most:
        raise of.refuse(field, f"at most {most:,}")


def check_dropout(of: Spec, dropout: float) -> None:
    """A dropout is a probability below 1. Errors: SpecError."""
    if not 0.0 <= dropout < 1.0:
        raise of.refuse("dropout", "a probability from 0 to below 1")


def check_eps(of: Spec, eps: float) -> None:
    """What keeps a norm from dividing by 0 is above 0. Errors: SpecError."""
    if eps <= 0.0:
        raise of.refuse("eps", "above 0, such as 1e-6: a vector of zeros would be divided by 0")


def check_size(of: Spec, field: str, factor: float | None) -> None:
    """What scores or vectors are multiplied with; None is a default. Errors: SpecError."""
    if factor is not None and abs(factor) > STEEP:
        raise of.refuse(field, f"a size of at most {STEEP:,.0f}")


def check_positive(of: Spec, field: str, factor: float, do: str = "") -> None:
    """The same of what has to be above 0, and not so small that dividing by it overflows. Errors: SpecError."""
    if not 1.0 / STEEP <= factor <= STEEP:
        raise of.refuse(field, f"above 0, from {1.0 / STEEP:g} to {STEEP:,.0f}", do)


def check_cap(of: Spec, cap: float | None) -> None:
    """A softcap divides scores and multiplies them again. Errors: SpecError."""
    if cap is not None and not 1.0 / STEEP <= cap <= STEEP:
        raise of.refuse("softcap", f"a cap above 0, from {1.0 / STEEP:g} to {STEEP:,.0f}", "Leave it out for none.")


@contextmanager
def affordable(what: str, do: str, error: type[BrickError] = SpecError) -> Iterator[None]:
    """Around what makes tensors. Errors: `error` where one is larger than memory, or than any tensor may be."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, TypeError) as e:
        text = str(e)
        if isinstance(e, RuntimeError | TypeError) and not any(word in text for word in TOO_LARGE):
            raise
        raise error(f"{what}: got sizes for which there is not enough memory, expected what fits. {do}") from None


def divisors(n: int) -> list[int]:
    """Of n, in order; by pairs, since n may be in the billions."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]
