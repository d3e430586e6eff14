"""Errors: one family, and hints that help."""

from __future__ import annotations

import pytest

from brickformer.errors import BrickError, DataError, RunError, SpecError, StateError, nearest


@pytest.mark.parametrize("kind", [SpecError, StateError, DataError, RunError])
def test_one_family(kind: type[BrickError]) -> None:
    assert issubclass(kind, BrickError) and issubclass(BrickError, ValueError)
    with pytest.raises(BrickError, match="^where: what$"):
        raise kind("where: what")


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("heds", ["heads", "kv_heads", "bias"], "did you mean 'heads'?"),
        ("rmsnrom", ["layernorm", "rmsnorm"], "did you mean 'rmsnorm'?"),
        ("xyzzy", ["b", "a"], "known: a, b"),
        ("x", [], "known: none"),
    ],
)
def test_nearest_offers_the_name_that_was_meant(name: str, known: list[str], said: str) -> None:
    assert nearest(name, known) == said
    assert nearest(name, iter(known)) == said
