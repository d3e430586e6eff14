"""Errors meant for users. Every message says: where, what was found, what was expected, what to do.

Our own broken invariants are `assert`s; whatever a user can cause is a `BrickError`. The command line prints it in one
or two lines and leaves with exit code 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class BrickError(ValueError):
    """Something a user asked for cannot be done; the message says what to do instead."""


class SpecError(BrickError):
    """A spec that cannot be read or built: unknown field, wrong type, parts that do not fit."""


class StateError(BrickError):
    """A state that does not belong to this call: wrong brick, wrong batch, full, or not able to rewind."""


class DataError(BrickError):
    """Data that cannot be used: missing, empty, binary, a character the tokenizer has never seen."""


class RunError(BrickError):
    """A run that cannot start or go on: a broken run folder, a full disk, a loss that is not finite."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that offers the nearest known name, or all of them when none is near."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"
