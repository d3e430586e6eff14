"""Dotted paths, the one override language: what `Spec.but`, `--set` and sweeps mean by `layers.2.mixer.heads`.

    train.steps    layers.0.mixer.heads    layers.-1.place    layers.*.ffn.hidden    *.dim    mixer

A path goes down plain data (`Spec.to_dict`): a mapping by the names of its fields, a list by numbers from 0, or from -1
at its end. `*` is every element of a list, or every part of a mapping that has the rest of the path. What is put there
is judged afterwards, when the whole is read: rules that tie two fields see both as they will be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from brickformer.errors import SpecError, nearest

Fields = Callable[[str], Collection[str] | None]
"""The names of the fields of a kind; None where there is no such kind."""


def put(data: Any, path: str, value: Any, fields: Fields) -> None:
    """Change plain data in place. Errors: SpecError: a name, a number or a part that is not there, with its place."""
    if not _inside(data, path.split("."), value, "", fields):
        raise SpecError(f"{path}: * stands for nothing here; no part has such a field.")


def _inside(data: Any, steps: Sequence[str], value: Any, at: str, fields: Fields) -> bool:
    """Put the value at the end of the steps; False when a `*` among parts matched none."""
    head, rest = steps[0], steps[1:]
    dot = f"{at}." if at else ""
    if isinstance(data, list):
        found = [_at(data, i, rest, value, f"{at}.{i}", fields) for i in _numbers(head, len(data), at)]
        return all(found)
    if not isinstance(data, dict):
        raise SpecError(f"{dot}{head}: {at or 'spec'} is {data!r}, which has no fields.")
    if head == "*":
        parts = [k for k in data if k != "kind" and _reaches(data[k], rest, fields)]
        found = [_at(data, k, rest, value, dot + k, fields) for k in parts]
        return any(found)
    known = _names(data, fields)
    if known is not None and head not in known:
        raise SpecError(f"{dot}{head}: {data['kind']!r} has no such field; {nearest(head, known)}")
    return _at(data, head, rest, value, dot + head, fields)


def _at(data: Any, key: Any, rest: Sequence[str], value: Any, here: str, fields: Fields) -> bool:
    """Set an element, or go on into it; a brick named only by its kind becomes one with fields."""
    if not rest:
        data[key] = value
        return True
    inner = data.get(key) if isinstance(data, dict) else data[key]
    if isinstance(inner, str) and fields(inner) is not None:
        inner = data[key] = {"kind": inner}
    return _inside(inner, rest, value, here, fields)


def _numbers(head: str, length: int, at: str) -> range | tuple[int]:
    """Which elements of a list a step means."""
    if head == "*":
        return range(length)
    if not head.removeprefix("-").isdecimal() or not -length <= int(head) < length:
        raise SpecError(f"{at}.{head}: expected a number from 0 to {length - 1}, or *.")
    return (int(head) % length,)


def _reaches(data: Any, steps: Sequence[str], fields: Fields) -> bool:
    """Whether a part has the field that the rest of a path begins with."""
    if not isinstance(data, dict | list) or not data:
        return False
    if not steps or steps[0] == "*":
        return bool(steps)
    if isinstance(data, list):
        return steps[0].removeprefix("-").isdecimal()
    return steps[0] in (_names(data, fields) or data)


def _names(data: dict[str, Any], fields: Fields) -> Collection[str] | None:
    """The fields of a mapping; None where its kind is not said or not known, which is told when the whole is read."""
    kind = data.get("kind")
    return fields(kind) if isinstance(kind, str) else None
