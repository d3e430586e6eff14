"""Which family a spec belongs to, and what is in the way where it belongs to none.

    fits(family, spec)   <=>   settled(family.read(family.guess(spec))) == settled(spec)

`settled` writes out every default that depends on other fields (key heads, head width, a bias that follows another) and
drops what computes nothing once training is over (dropout, a router's losses, the choice of a kernel). What is left is
what the model computes, and it has to agree in every field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, final

from brickformer.errors import SpecError
from brickformer.errors import nearest as nearest_name
from brickformer.hf.families import FAMILIES
from brickformer.hf.family import Family
from brickformer.mixers.attention import Attention
from brickformer.mixers.cross import Cross
from brickformer.mixers.latent import LatentAttention
from brickformer.mixers.mamba import Mamba
from brickformer.mixers.mamba2 import Mamba2
from brickformer.models import Decoder, Encoder, EncoderDecoder, ModelSpec
from brickformer.moe import Router
from brickformer.positions import Rope, Yarn
from brickformer.spec import Spec


class FamilyError(SpecError):
    """No published family computes what a model computes. why: the first brick that is in the way, without `more`."""

    def __init__(self, why: str, more: str = "") -> None:
        super().__init__(f"{why}{more}")
        self.why = why


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """A family that says a spec exactly, and the fields of its configuration."""

    family: Family
    config: dict[str, Any]


@final
@dataclass(frozen=True, slots=True)
class Near:
    """The nearest that a family can say. spec: what it says. config: in its fields. apart: (path, asked for, said)."""

    family: Family
    config: dict[str, Any]
    spec: ModelSpec
    apart: tuple[tuple[str, Any, Any], ...]

    @property
    def fields(self) -> int:
        """How many fields differ, those of several layers counted once."""
        return len({re.sub(r"\.\d+", "", path) for path, _, _ in self.apart})


def fit(spec: ModelSpec, only: str | None = None) -> Fit:
    """The first family, in the order of their list, that computes what `spec` computes. only: no other than this one.

    Errors: FamilyError naming the first brick that has no place in the nearest one, and the spec that would have.
    """
    near = nearest(spec, only)
    if not near.apart:
        return Fit(near.family, near.config)
    path, got, expected = near.apart[0]
    if isinstance(got, Spec) or isinstance(expected, Spec):  # as they were written, defaults left out
        got, expected = _at(spec, path), _at(near.spec, path)
    more = f"; {near.fields - 1} more such fields" if near.fields > 1 else ""
    raise FamilyError(
        f"{path}: got {_short(got)}, which {'no published family' if only is None else f'no {only}'} has there. "
        f"The nearest is {near.family.model_type}, with {_short(expected)}{more}",
        f": {_short(near.spec, 600)}. Train that, or share the run folder itself.",
    )


def _at(value: Any, path: str) -> Any:
    """What stands at the end of a path."""
    for step in path.split("."):
        value = value[int(step)] if isinstance(value, tuple) else getattr(value, step)
    return value


def nearest(spec: ModelSpec, only: str | None = None) -> Near:
    """The first family that says `spec`, else the one that has most of its bricks.

    Errors: SpecError: `only` is no family; FamilyError: none is a model of this kind.
    """
    if only is not None and only not in FAMILIES:
        raise SpecError(f"family: got {only!r}, expected a known one; {nearest_name(only, FAMILIES)}")
    found: list[tuple[int, Near]] = []
    asked = settled(spec)
    for name, family in FAMILIES.items():
        if not isinstance(spec, family.kind) or only not in (None, name):
            continue
        config = {**family.constant, **family.guess(spec)}
        try:
            said = family.spec({"model_type": name, **config})
        except SpecError:
            continue  # not even its own guess: a model of another kind
        known = settled(said)
        near = Near(family, config, said, tuple(differences(asked, known)))
        if not near.apart:
            return near
        found.append((len(_kinds(asked) ^ _kinds(known)), near))
    if not found:
        who = "no published family is" if only is None else f"{only} is not"
        raise FamilyError(f"{spec.kind}: {who} a model of this kind. Share the run folder itself.")
    return min(found, key=lambda pair: (pair[0], pair[1].fields))[1]


def _kinds(spec: Spec) -> set[str]:
    return {part.kind for part in spec.parts()}


def differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, a's, b's) of the fields in which two specs differ, the innermost that says it."""
    dot = f"{path}." if path else ""
    if isinstance(a, Spec) and type(a) is type(b):
        for f in fields(a):  # type: ignore[arg-type]
            yield from differences(getattr(a, f.name), getattr(b, f.name), f"{dot}{f.name}")
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{dot}{i}")
    elif not _same(a, b):
        yield path, a, b


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-12)
    return type(a) is type(b) and bool(a == b)


def settled(spec: ModelSpec) -> ModelSpec:
    """The same computation with every default written out and nothing that only training uses."""
    match spec:
        case Decoder() | Encoder():
            return _settled(spec, spec.dim)
        case EncoderDecoder():
            return spec.but(encoder=settled(spec.encoder), decoder=settled(spec.decoder))
        case _:
            return spec


def _settled(part: Any, dim: int, width: int | None = None) -> Any:
    """A part of a model of width `dim`; width: of the heads it is in."""
    if isinstance(part, tuple):
        return tuple(_settled(item, dim, width) for item in part)
    if not isinstance(part, Spec):
        return part
    new: dict[str, Any] = {}
    match part:
        case Attention() | Cross():
            width = part.head_dim or max(1, dim // part.heads)
            new = {"kv_heads": part.kv_heads or part.heads, "head_dim": width, "scale": part.scale or width**-0.5}
            if isinstance(part, Attention) and part.out_bias is None:
                new["out_bias"] = part.bias
        case LatentAttention():
            own = part.head_dim or max(1, dim // part.heads)
            width = part.rope_dim
            new = {"head_dim": own, "v_dim": part.v_dim or own, "scale": part.scale or (own + width) ** -0.5}
        case Mamba():
            new = {"inner": part.inner or 2 * dim, "rank": part.rank or math.ceil(dim / 16)}
        case Mamba2():
            new = {"heads": part.heads or max(1, 2 * dim // part.head_dim)}
        case Rope() if width is not None:
            new = {"width": part.width or width}
        case Yarn():
            new = {"sharpening": part.sharpen()}
        case Router():
            new = {"balance": 0.0, "z": 0.0, "bias_rate": 0.0}
        case _:
            pass
    own_fields = {f.name for f in fields(part)}
    new |= {name: value for name, value in _COMPUTES_NOTHING.items() if name in own_fields}
    inside = {name: _settled(getattr(part, name), dim, width) for name in own_fields if name not in new}
    changed: Mapping[str, Any] = {k: v for k, v in {**inside, **new}.items() if v != getattr(part, k)}
    return part.but(**changed) if changed else part


_COMPUTES_NOTHING = {"dropout": 0.0, "backend": "auto"}


def _short(value: Any, most: int = 80) -> str:
    shown = repr(value)
    return shown if len(shown) <= most else shown[: most - 3] + "..."
