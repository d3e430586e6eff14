"""`--set path=value`, as often as one likes: all changes at once, so that rules which tie two fields see them together.

    train.steps=500    model.encoder.layers.0.mixer.heads=8    model.*.dim=64    train.optim=adamw    kv_heads=none

A path is one of `brickformer/paths.py`. A value is JSON where it parses, else text; a bare name is that brick with its
defaults.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from brickformer.errors import SpecError
from brickformer.spec import Spec
from brickformer.spec import changed as but

Setting = tuple[str, Any]
S = TypeVar("S", bound=Spec)


def parsed(settings: Sequence[str]) -> list[Setting]:
    """Every path=value; none is JSON's null. Errors: SpecError: no `=`, no path."""
    pairs = map(parse_setting, settings)
    return [(path, None if value == "none" else value) for path, value in pairs]


def parse_setting(text: str) -> tuple[str, Any]:
    """A command-line override ``path=value``: the value is JSON where it parses, else text. Errors: SpecError."""
    path, sign, value = text.partition("=")
    if not sign or not path.strip():
        raise SpecError(f"--set {text!r}: expected path=value, for example layers.*.mixer.heads=4.")
    try:
        return path.strip(), json.loads(value)
    except json.JSONDecodeError:
        return path.strip(), value


def changed(spec: S, settings: Sequence[Setting]) -> S:
    """The spec with all settings. Errors: SpecError: a name that is not there, with the nearest; a wrong value."""
    try:
        return but(spec, settings) if settings else spec
    except SpecError as e:
        raise SpecError(f"--set {e}") from None
