"""The table of bricks is complete: whatever the package registers has an entry, every choice of a field is tried."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
from contract.bricks import pairs, stars

import brickformer
from brickformer.feedforward import Activation, FeedForwardSpec
from brickformer.mixers.base import MixerSpec
from brickformer.models import ModelSpec
from brickformer.norms import NormSpec
from brickformer.positions import AbsolutePositionSpec, PositionSpec, RopeScaling
from brickformer.spec import Spec, fields_of, kinds_of

CORE = "mask norms feedforward moe mixers positions layers embed models".split()
ELSEWHERE: dict[tuple[str, str], str] = {
    (f"{kind}.backend", backend): f"tests set {backend} on the built model: kernels_agree, test_flex_says_the_same"
    for kind in ("attention", "cross", "latent", "differential")
    for backend in ("reference", "sdpa", "flex")
} | {
    (f"{kind}.backend", "matmul"): "what training of short sequences takes by itself; compared in test_attend"
    for kind in ("attention", "cross", "latent", "differential")
}
for name in get_args(Activation):
    ELSEWHERE["transform.activation", name] = "the functions of the feed-forwards, which try them all"
ELSEWHERE["encoder.pooler", True] = "no part of forward; compared with transformers in tests/hf"


def _ours(slot: type[Spec]) -> dict[str, type[Spec]]:
    """Bricks of the package's core: not those that a test, or a leaf, registers."""
    for found in pkgutil.walk_packages(brickformer.__path__, "brickformer."):
        if found.name.split(".")[1] in CORE:
            importlib.import_module(found.name)
    made_in = {f"brickformer.{unit}" for unit in CORE}
    ours = {k: made for k, made in kinds_of(slot).items() if ".".join(made.__module__.split(".")[:2]) in made_in}
    assert ours, f"no brick in the slot {slot.__name__}: this test looks in the wrong place"
    return ours


def _inside(spec: Spec) -> Iterator[Spec]:
    yield spec
    for name in fields_of(type(spec)):
        value = getattr(spec, name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Spec):
                yield from _inside(part)


@pytest.fixture(scope="module")
def used() -> list[Spec]:
    """Every spec inside every cell."""
    return [part for cell in [*stars(), *pairs()] for part in _inside(cell.spec())]


@pytest.mark.parametrize(
    "slot",
    [MixerSpec, PositionSpec, RopeScaling, AbsolutePositionSpec, FeedForwardSpec, NormSpec, ModelSpec, Spec],
    ids=lambda slot: slot.__name__,
)
def test_every_registered_brick_has_an_entry(slot: type[Spec], used: list[Spec]) -> None:
    missing = set(_ours(slot)) - {spec.kind for spec in used}
    assert not missing, f"{slot.__name__}: no entry in tests/contract/bricks.py for {sorted(missing)}"


def test_every_choice_is_tried(used: list[Spec]) -> None:
    """Every value of every Literal field, both values of every bool, and None beside a value."""
    tried = {(f"{s.kind}.{name}", _choice(getattr(s, name))) for s in used for name in fields_of(type(s))}
    missing = [
        f"{kind}.{name}={value!r}"
        for kind, cls in _ours(Spec).items()
        for name, hint in fields_of(cls).items()
        for value in _choices(hint)
        if (f"{kind}.{name}", value) not in tried and (f"{kind}.{name}", value) not in ELSEWHERE
    ]
    assert not missing, f"never tried: {', '.join(missing)}"


def _choices(hint: Any) -> list[Any]:
    if hint is bool:
        return [True, False]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if type(None) in get_args(hint):
        inner = [a for a in get_args(hint) if a is not type(None)]
        return [None, *(_choices(inner[0]) or ["something"])] if len(inner) == 1 else [None, "something"]
    return []


def _choice(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | str) else "something"
