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
        ("xyzzy", ["b", "a"], "known: a, b."),
        ("xyzzy", ["b.c", "", "d"], "known: d, b.c."),
        ("x", [], "known: none."),
    ],
)
def test_nearest_offers_the_name_that_was_meant(name: str, known: list[str], said: str) -> None:
    assert nearest(name, known) == said
    assert nearest(name, iter(known)) == said


def test_a_long_list_of_names_is_cut() -> None:
    """Every name that is shown is whole; how many are not is said."""
    known = [f"stack.layers.{i}.mixer" for i in range(300)]
    shown = nearest("xyzzy", known).removeprefix("known: ").removesuffix(".")
    names, more = shown.split(" and ")
    assert len(shown) < 230 and set(names.split(", ")) <= set(known)
    assert more == f"{300 - len(names.split(', '))} more"
    assert nearest("xyzzy", ["y" * 999]) == f"known: {'y' * 999}."
