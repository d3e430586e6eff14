"""Errors meant for users. Every message says: where, what was found, what was expected, what to do.

Our own broken invariants are `assert`s; whatever a user can cause is a `BrickError`. The command line prints it in one
or two lines and leaves with exit code 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import accumulate
from typing import Final


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


ROOM: Final = 200
"""Characters of a list of names in a message."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that offers the nearest known name, or those there is room for when none is near.

    Of dotted names the short paths come first: they hold the others.
    """
    names = sorted((n for n in known if n), key=lambda n: (n.count("."), n))
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    shown = [n for n, end in zip(names, accumulate(len(n) + 2 for n in names), strict=True) if end <= ROOM] or names[:1]
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return f"known: {', '.join(shown) or 'none'}{more}."
