"""`--set path=value`, as often as one likes: all changes at once, so that rules which tie two fields see them together.

    train.steps=500    model.encoder.layers.0.mixer.heads=8    model.*.dim=64    train.optim=adamw    kv_heads=none

A path names fields by their names and layers by their numbers; `*` is every layer, or every part that has the rest of
the path. A value is JSON where it parses, else text; a bare name is that brick with its defaults.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from brickformer.errors import SpecError, nearest
from brickformer.spec import Spec, fields_of, kinds_of, read

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
    if not settings:
        return spec
    data = spec.to_dict()
    for path, value in settings:
        if not _set(data, path.split("."), value, ""):
            raise SpecError(f"--set {path}: * stands for nothing here; no part has such a field.")
    try:
        out: S = read(type(spec), data, spec.kind)
    except SpecError as e:
        raise SpecError(f"--set: {str(e).removeprefix(spec.kind + '.')}") from None
    return out


def _set(data: Any, parts: Sequence[str], value: Any, at: str) -> bool:
    """Put `value` at the end of the path into plain data; False when a `*` matched nothing."""
    head, rest = parts[0], parts[1:]
    here = f"{at}.{head}" if at else head
    if head == "*":
        inside = list(range(len(data)) if isinstance(data, list) else [k for k in data if k != "kind"])
        if isinstance(data, list):
            return all([_put(data, i, rest, value, f"{at}.{i}") for i in inside])
        return any([_reaches(data[k], rest) and _put(data, k, rest, value, f"{at}.{k}") for k in inside])
    if isinstance(data, list):
        if not head.isdecimal() or int(head) >= len(data):
            raise SpecError(f"--set {here}: expected a number from 0 to {len(data) - 1}, or *.")
        return _put(data, int(head), rest, value, here)
    if not isinstance(data, dict):
        raise SpecError(f"--set {here}: {at} is {data!r}, which has no fields.")
    fields = fields_of(kinds_of(Spec)[data["kind"]])
    if head not in fields:
        raise SpecError(f"--set {here}: {data['kind']!r} has no such field; {nearest(head, fields)}")
    return _put(data, head, rest, value, here)


def _put(data: Any, key: str | int, rest: Sequence[str], value: Any, here: str) -> bool:
    """Set an element, or go on into it; a brick named only by its kind becomes one with fields."""
    if not rest:
        data[key] = value
        return True
    inner = data.get(key) if isinstance(data, dict) else data[key]
    if isinstance(inner, str) and inner in kinds_of(Spec):
        inner = data[key] = {"kind": inner}
    return _set(inner, rest, value, here)


def _reaches(data: Any, parts: Sequence[str]) -> bool:
    """Whether a part of a spec has the field that the rest of a path begins with."""
    if not isinstance(data, dict | list) or not data:
        return False
    if not parts or parts[0] == "*":
        return bool(parts)
    if isinstance(data, list):
        return parts[0].isdecimal()
    return parts[0] in fields_of(kinds_of(Spec)[data["kind"]])
