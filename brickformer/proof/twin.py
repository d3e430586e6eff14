"""The twin: the same bricks with the same options in a model so small that all of it can be tried out.

Kept: the kind of every brick and every choice it was given, who shares keys with whom, the order of the layers, loops.
Shrunk: the vocabulary, widths, numbers of heads and experts (not below what tells their kinds apart), windows (so that
a dozen tokens are more than one), and depth: every distinct layer once.

A brick of one's own may need the size it was given: fields shrink where they have the usual names and the brick agrees,
and the width of the model is the smallest at which every brick can be built.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from brickformer.embed import Embed
from brickformer.errors import BrickError, SpecError
from brickformer.layers import Layer
from brickformer.mask import Mask
from brickformer.models import Decoder, Encoder, EncoderDecoder, ModelSpec
from brickformer.positions import AbsolutePositionSpec
from brickformer.shapes import shapes_of
from brickformer.spec import Spec, fields_of, plain

VOCAB: Final = 11
TOKENS: Final = 12
WINDOW: Final = 3
LOOPS: Final = 2
TABLE: Final = 1024
MOST: Final = 6
"""Distinct layers, above which layers that differ in numbers only count as alike."""
LARGEST: Final[Mapping[str, int]] = {
    "hidden": 24, "inner": 24, "state": 4, "rank": 8, "q_rank": 8, "head_dim": 8, "value_dim": 8, "v_dim": 8,
    "rope_dim": 4, "width": 4,
}  # fmt: skip
HEADS: Final[Mapping[str, int]] = {"heads": 4, "kv_heads": 2, "value_heads": 2, "groups": 2}
"""Numbers of heads that stay: enough that some share and some do not."""

Side = TypeVar("Side", Decoder, Encoder)


@dataclass(frozen=True)
class Twin:
    """whole: the model it stands for. spec: small. layers: the path of each of its layers in the whole.

    alike: of how many layers each of them is the first. tokens: how long a row may be.
    """

    whole: ModelSpec
    spec: ModelSpec
    layers: tuple[str, ...]
    alike: tuple[int, ...]
    tokens: int

    @property
    def depth(self) -> int:
        """Layers of the model it stands for."""
        return sum(self.alike)


def twin_of(spec: ModelSpec) -> Twin:
    """The twin of a model. Errors: SpecError when the model cannot be built, with the place."""
    groups = {path: distinct(side.layers) for path, side in sides(spec).items()}
    kept = {path: list(group) for path, group in groups.items()}
    shapes_of(_keep(spec, kept))  # at its own size, without memory
    small = _small(_keep(spec, kept))
    names = tuple(f"{path}layers.{i}" for path, places in kept.items() for i in places)
    alike = tuple(count for group in groups.values() for count in group.values())
    return Twin(spec, small, names, alike, _tokens(small))


def sides(spec: ModelSpec) -> dict[str, Decoder | Encoder]:
    """The stacks of a model by the beginning of their path: "" where there is one. Errors: SpecError."""
    match spec:
        case EncoderDecoder():
            return {"encoder.": spec.encoder, "decoder.": spec.decoder}
        case Decoder() | Encoder():
            return {"": spec}
        case _:
            raise SpecError(f"check: got a {spec.kind!r}, expected a decoder, an encoder or an encoder_decoder.")


def distinct(layers: tuple[Layer, ...]) -> dict[int, int]:
    """The first of each kind of layer, and how many are like it; where many differ, numbers do not tell them apart."""
    small = [shrunk(layer) for layer in layers]
    groups = _counted(small)
    return groups if len(groups) <= MOST else _counted([_without_numbers(plain(layer)) for layer in small])


def _counted(kinds: list[Any]) -> dict[int, int]:
    firsts = [kinds.index(kind) for kind in kinds]
    return {first: firsts.count(first) for first in dict.fromkeys(firsts)}


def _without_numbers(data: Any) -> Any:
    match data:
        case dict():
            return {name: _without_numbers(value) for name, value in data.items()}
        case list():
            return [_without_numbers(value) for value in data]
        case bool() | str() | None:
            return data
        case _:
            return "a number"


def _keep(spec: ModelSpec, kept: Mapping[str, list[int]]) -> ModelSpec:
    def of(side: Side, path: str) -> Side:
        return dataclasses.replace(side, layers=tuple(side.layers[i] for i in kept[path]))

    match spec:
        case EncoderDecoder():
            decoder = of(spec.decoder, "decoder.")
            return dataclasses.replace(spec, encoder=of(spec.encoder, "encoder."), decoder=decoder)
        case Decoder():
            return of(spec, "")
        case Encoder():
            return of(spec, "")
        case _:
            raise AssertionError("sides() has refused it")


def _small(spec: ModelSpec) -> ModelSpec:
    """At the smallest width at which it can be built."""
    small = shrunk(spec)
    dim = next(iter(sides(spec).values())).dim
    for candidate, tried in [*((d, small) for d in _widths(dim, heads_in(small))), (dim, small), (dim, spec)]:
        resized = _resized(tried, candidate)
        try:
            resized.build()
        except Exception:  # this width does not suit a brick: the next; its own is known to be good
            continue
        return resized
    return _resized(spec, dim)


def _widths(dim: int, heads: int) -> Iterator[int]:
    """Widths to try, smallest first: eight channels a head."""
    base = (16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1536, 2048)
    yield from (d for d in base if max(16, 8 * heads) <= d < dim)


def _resized(spec: ModelSpec, dim: int) -> ModelSpec:
    match spec:
        case EncoderDecoder():
            encoder = dataclasses.replace(spec.encoder, dim=dim, vocab=VOCAB, loops=min(spec.encoder.loops, LOOPS))
            decoder = dataclasses.replace(spec.decoder, dim=dim, vocab=VOCAB, loops=min(spec.decoder.loops, LOOPS))
            return dataclasses.replace(spec, encoder=encoder, decoder=decoder)
        case Decoder() | Encoder():
            return dataclasses.replace(spec, dim=dim, vocab=VOCAB, loops=min(spec.loops, LOOPS))
        case _:
            raise AssertionError("sides() has refused it")


def heads_in(spec: Spec) -> int:
    """The largest number of heads of any brick."""
    own = [v for name in fields_of(type(spec)) if "heads" in name and isinstance(v := getattr(spec, name), int)]
    return max([1, *own, *(heads_in(part) for part in parts(spec))])


def parts(spec: Spec) -> list[Spec]:
    """The specs that are fields of a spec."""
    found: list[Spec] = []
    for name in fields_of(type(spec)):
        value = getattr(spec, name)
        found += [part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Spec)]
    return found


S = TypeVar("S", bound=Spec)


def shrunk(spec: S) -> S:
    """The same brick with smaller numbers, its parts likewise; as it is where it refuses them."""
    changes = {name: _shrunk_value(getattr(spec, name)) for name in fields_of(type(spec))}
    inside = _changed(spec, changes)
    return _changed(inside, _smaller_numbers(inside))


def _shrunk_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_shrunk_value, value))
    return shrunk(value) if isinstance(value, Spec) else value


def _changed(spec: S, changes: Mapping[str, Any]) -> S:
    changes = {name: value for name, value in changes.items() if value is not getattr(spec, name)}
    try:
        return dataclasses.replace(spec, **changes) if changes else spec  # type: ignore[type-var]
    except BrickError:
        return spec


def _smaller_numbers(spec: Spec) -> dict[str, Any]:
    numbers = {name: v for name in fields_of(type(spec)) if type(v := getattr(spec, name)) is int}
    if isinstance(spec, Mask):
        return {"window": min(spec.window, WINDOW)} if spec.window is not None else {}
    out = {name: min(numbers[name], most) for name, most in LARGEST.items() if name in numbers}
    if isinstance(spec, AbsolutePositionSpec) and "max_len" in numbers:  # room for the rows that are tried
        out["max_len"] = min(max(numbers["max_len"], TOKENS), TABLE)
    shared = {name: numbers[name] for name in HEADS if name in numbers}
    by = math.gcd(*shared.values()) if shared else 1
    fits = (f for f in range(by, 0, -1) if by % f == 0 and all(n // f >= min(n, HEADS[k]) for k, n in shared.items()))
    factor = next(fits, 1)
    out |= {name: n // factor for name, n in shared.items()}
    if "experts" in numbers:
        chosen = max([1, *(k for part in parts(spec) for n in fields_of(type(part)) if n == "top_k"
                           for k in [getattr(part, n)])])  # fmt: skip
        out["experts"] = min(numbers["experts"], chosen + 2)
    return out


def _tokens(spec: ModelSpec) -> int:
    """As many as every table and every range of places can hold."""
    return min(_reach(side.embed) for side in sides(spec).values())


def _reach(embed: Embed) -> int:
    limit = embed.position.limit() if embed.position is not None else None
    reach = TOKENS if limit is None else min(TOKENS, limit)
    if embed.randomized is not None:
        reach = min(reach, (embed.randomized.range - 1) // embed.randomized.stride + 1)
    return reach
