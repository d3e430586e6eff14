"""Specs: frozen data that describes a model and builds it.

A spec is a standard-library dataclass opened by one decorator::

    @spec("mlp")
    class MLP(FeedForwardSpec):
        hidden: int
        activation: Activation = "relu"

`@spec` makes it frozen and registers it under its kind, so that a brick in a user's own file joins the union of its
slot. One strict reader, `read`, turns plain data (JSON, YAML, the command line) into specs and checks specs written in
Python: an unknown field, a wrong type or an unknown kind is a `SpecError` with the path, what was found, what was
expected and the nearest name. Nothing is coerced: "4" is not 4. An int may stand for a float.

The one override language is a dotted path: ``spec.but(**{"layers.2.mixer.heads": 4})``; ``*`` stands for every element.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints
from typing import dataclass_transform as transform

from brickformer.errors import SpecError, nearest
from brickformer.paths import put
from brickformer.plain import json_data, yaml_data

_REGISTRY: dict[str, type[Spec]] = {}


class Spec(ABC):  # noqa: B024  (slots add their own abstract build)
    """Base of every spec. Slots are abstract subclasses (`MixerSpec`); bricks are final ones made by `@spec`."""

    __slots__ = ()
    kind: ClassVar[str] = ""
    reads_places: ClassVar[bool] = False
    """Whether what it builds reads `Span.place`: rotary positions and tables."""

    def __post_init__(self) -> None:
        """Check every field against its annotation, then the rules of the brick itself."""
        for name, expected in fields_of(type(self)).items():
            value = read(expected, getattr(self, name), f"{self.kind}.{name}")
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:  # noqa: B027  (optional hook: most bricks have nothing to add)
        """Rules about values; raises SpecError. Overridden by bricks that have any."""

    def refuse(self, field: str, expected: str, do: str = "") -> SpecError:
        """The error for a value that breaks a rule of `check`: where, got, expected, what to do."""
        got = getattr(self, field)
        return SpecError(f"{self.kind}.{field}: got {got!r}, expected {expected}." + (f" {do}" if do else ""))

    def parts(self) -> Iterator[Spec]:
        """This spec and every spec inside it."""
        yield self
        for name in fields_of(type(self)):
            value = getattr(self, name)
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Spec):
                    yield from part.parts()

    def to_dict(self) -> dict[str, Any]:
        """Every field, defaults included, as plain data; what checkpoints store."""
        return {"kind": self.kind, **{name: plain(getattr(self, name)) for name in fields_of(type(self))}}

    def to_json(self) -> str:
        """`to_dict` as JSON text; equal specs give equal text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "spec") -> Self:
        """Read a spec of this slot (or of this kind) from JSON text. Errors: SpecError with the path."""
        out: Self = read(cls, json_data(text, where), where)
        return out

    @classmethod
    def from_yaml(cls, text: str, where: str = "spec") -> Self:
        """Read a spec of this slot from YAML text. Errors: SpecError with the path."""
        out: Self = read(cls, yaml_data(text, where), where)
        return out

    def to_yaml(self) -> str:
        """`to_dict` as YAML text."""
        import yaml

        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))

    def but(self, **changes: Any) -> Self:
        """This spec with some fields changed, named by dotted paths: ``but(**{"layers.2.mixer": LSTM()})``.

        Changes that meet go in their order; rules are checked when all are made.
        """
        return changed(self, list(changes.items()))

    def __repr__(self) -> str:
        """The human view: Python that builds the spec, defaults left out, repeated layers folded."""
        shown = []
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            if default is dataclasses.MISSING or value != default:
                shown.append(f"{f.name}={_shown(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"


S = TypeVar("S", bound=Spec)
SMALLEST, LARGEST = 1e-30, 1e30
"""Sizes of numbers other than 0: models compute in float32 and below, which has to hold products of them too."""


@transform(frozen_default=True)
def spec(kind: str) -> Callable[[type[S]], type[S]]:
    """Class decorator: freeze the dataclass and register it under `kind`. Errors: SpecError when the name is taken."""

    def register(cls: type[S]) -> type[S]:
        # Slots re-create the class: register after it.
        made = dataclasses.dataclass(frozen=True, slots=True, repr=False)(cls)
        made.kind = kind
        taken = _REGISTRY.get(kind)
        if taken is not None and (taken.__module__, taken.__qualname__) != (made.__module__, made.__qualname__):
            raise SpecError(
                f"@spec({kind!r}) on {made.__module__}.{made.__qualname__}: the name already belongs to "
                f"{taken.__module__}.{taken.__qualname__}. Choose another name."
            )
        _REGISTRY[kind] = made
        return made

    return register


def kinds_of(slot: type[S]) -> dict[str, type[S]]:
    """Every registered brick of a slot, by kind, in the order of registration."""
    return {kind: made for kind, made in _REGISTRY.items() if issubclass(made, slot)}


@cache
def fields_of(cls: type[Spec]) -> dict[str, Any]:
    """The fields of a spec class and their resolved types."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}  # type: ignore[arg-type]


def read(expected: Any, data: Any, path: str = "spec") -> Any:
    """Plain data (or a value already of the right type) as `expected`. Errors: SpecError: path, got, expected, nearest.

    `expected` is a spec class or slot, a scalar type, a Literal, a tuple, or a union of these.
    """
    origin = get_origin(expected)
    if origin in (Union, types.UnionType):
        return _read_union(get_args(expected), data, path)
    if origin is Literal:
        choices = get_args(expected)
        if any(type(data) is type(c) and data == c for c in choices):
            return data
        hint = f" {nearest(data, map(str, choices))}" if isinstance(data, str) else ""
        raise _wrong(path, data, " | ".join(map(repr, choices)), hint)
    if origin is tuple:
        return _read_tuple(get_args(expected), data, path)
    if isinstance(expected, type) and issubclass(expected, Spec):
        return _read_spec(expected, data, path)
    return _read_scalar(expected, data, path)


def _read_scalar(expected: Any, data: Any, path: str) -> Any:
    if expected is None or expected is type(None):
        if data is None:
            return None
        raise _wrong(path, data, "null")
    if expected is float and type(data) is int and abs(data) <= LARGEST:
        data = float(data)
    if type(data) is not expected:
        raise _wrong(path, data, expected.__name__, _number_hint(expected, data))
    if expected is float and not math.isfinite(data):
        raise _wrong(path, data, "a finite number")
    if expected is float and data and not SMALLEST <= abs(data) <= LARGEST:
        raise _wrong(path, data, f"0, or a size from {SMALLEST:g} to {LARGEST:g}")
    if expected is int and abs(data) >= 2**63:
        raise _wrong(path, data, "an integer below 2 to the power of 63")
    return data


def _read_spec(expected: type[Spec], data: Any, path: str) -> Spec:
    if isinstance(data, expected):
        return data
    known = kinds_of(expected)
    if isinstance(data, str):  # a bare name is the brick with its defaults
        data = {"kind": data}
    if not isinstance(data, Mapping):
        raise _wrong(path, data, f"{_slot(expected)} ({', '.join(known)})")
    kind = data.get("kind", expected.kind or None)
    if kind is None:
        raise SpecError(f"{path}.kind: missing; expected one of: {', '.join(known)}.")
    if not isinstance(kind, str) or kind not in known:
        got = _short(kind)
        raise SpecError(f"{path}.kind: got {got}, expected {_slot(expected)}; {nearest(str(kind), known)}")
    cls = known[kind]
    fields = fields_of(cls)
    given = {str(name): value for name, value in data.items() if name != "kind"}
    for name in given:
        if name not in fields:
            raise SpecError(f"{path}.{name}: {kind!r} has no such field; {nearest(name, fields)}")
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in given:
            raise SpecError(f"{path}.{f.name}: missing; {kind!r} needs it.")
    values = {name: read(fields[name], value, f"{path}.{name}") for name, value in given.items()}
    try:
        return cls(**values)
    except SpecError as e:
        said = str(e)
        if said.startswith(path):
            raise
        own = f"{cls.kind}."  # a rule of its own names the kind, as it does where there is no path
        raise SpecError(f"{path}.{said.removeprefix(own)}" if said.startswith(own) else f"{path}: {said}") from None


def _read_tuple(args: tuple[Any, ...], data: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        raise _wrong(path, data, "a list")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(read(args[0], item, f"{path}.{i}") for i, item in enumerate(data))
    if len(data) != len(args):
        raise _wrong(path, data, f"a list of {len(args)}")
    return tuple(read(a, item, f"{path}.{i}") for i, (a, item) in enumerate(zip(args, data, strict=True)))


def _read_union(args: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None and type(None) in args:
        return None
    options = [a for a in args if a is not type(None)]
    specs = [a for a in options if isinstance(a, type) and issubclass(a, Spec)]
    others = [a for a in options if a not in specs]
    failures = []
    for option in others:
        try:
            return read(option, data, path)
        except SpecError as e:
            failures.append(e)
    for option in specs:
        named = data.get("kind") if isinstance(data, Mapping) else data
        if len(specs) == 1 or isinstance(data, option) or (isinstance(named, str) and named in kinds_of(option)):
            return read(option, data, path)
    if len(options) == 1 and failures:
        raise failures[0]
    raise _wrong(path, data, " | ".join(_slot(a) for a in args))


def changed(spec: S, changes: Sequence[tuple[str, Any]]) -> S:
    """The spec with all changes, (path, value), in their order. Errors: SpecError: see `paths.put`, and `read`."""
    data = spec.to_dict()
    for path, value in changes:
        put(data, path, plain(value), lambda kind: fields_of(_REGISTRY[kind]) if kind in _REGISTRY else None)
    try:
        out: S = read(type(spec), data, spec.kind)
    except SpecError as e:
        raise SpecError(str(e).removeprefix(f"{spec.kind}.")) from None
    return out


def plain(value: Any) -> Any:
    """A spec, or a field of one, as plain data of its own."""
    match value:
        case Spec():
            return value.to_dict()
        case tuple() | list():
            return [plain(v) for v in value]
        case dict():
            return {name: plain(v) for name, v in value.items()}
        case _:
            return value


def _shown(value: Any) -> str:
    if not isinstance(value, tuple) or len(value) < 2:
        return repr(value)
    period = next(p for p in range(1, len(value) + 1) if value == value[:p] * (len(value) // p))
    if period == len(value):
        return repr(value)
    return f"pattern([{', '.join(map(repr, value[:period]))}], depth={len(value)})"


def _slot(t: Any) -> str:
    if t is type(None):
        return "null"
    name = t.__name__ if isinstance(t, type) else str(t)
    return t.kind if isinstance(t, type) and issubclass(t, Spec) and t.kind else name.removesuffix("Spec")


def _wrong(path: str, data: Any, expected: str, hint: str = "") -> SpecError:
    return SpecError(f"{path}: got {_short(data)} ({type(data).__name__}), expected {expected}.{hint}")


def _short(data: Any) -> str:
    shown = repr(data)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _number_hint(expected: Any, data: Any) -> str:
    if expected in (int, float) and isinstance(data, str):
        try:
            number = float(data)
        except ValueError:
            return ""
        return f" Text is not a number: write {number:g} without quotes" + (
            " (YAML reads 1e-3 as text: write 1.0e-3)." if "e" in data.lower() else "."
        )
    return ""
