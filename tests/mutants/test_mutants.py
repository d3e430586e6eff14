"""Every mutant of mutants.py is caught by the check it names; every check catches a mutant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contract.bricks import Cell
from contract.checks import CHECKS
from mutants.mutants import MUTANTS, Mutant
from mutants.world import ROOT, world

pytestmark = pytest.mark.unchecked


def home(text: str) -> str:
    """The module of the package in which a text stands, once."""
    found = [
        file
        for file in sorted(ROOT.glob("brickformer/**/*.py"))
        if not {"doctor", "look"} & set(file.parts)  # which speak of models of others
        for _ in range(file.read_text("utf-8").count(text))
    ]
    assert len(found) == 1, f"{text!r} stands in {[str(file.relative_to(ROOT)) for file in found]}, expected one place"
    return ".".join(Path(found[0]).relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    with world({home(mutant.old): (mutant.old, mutant.new)}) as (bricks, checks):
        model = bricks.Cell(**mutant.cell).build()
        check = checks.CHECKS[mutant.check]
        assert isinstance(model, check.families), f"{mutant.check} is not for {mutant.cell}"
        with pytest.raises(AssertionError) as caught:
            check.run(model)
        assert str(caught.value), "caught by a bare assert: say what broke"


@pytest.mark.parametrize(
    ("check", "cell"), sorted({(m.check, Cell(**m.cell)) for m in MUTANTS}, key=str), ids=lambda x: str(x)
)
def test_the_real_code_passes_where_mutants_fail(check: str, cell: Cell) -> None:
    CHECKS[check].run(cell.build())


def test_every_check_catches_something() -> None:
    assert {m.check for m in MUTANTS} == set(CHECKS)
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 40


def test_a_copy_is_the_same_package_and_leaves_no_trace() -> None:
    import brickformer.models
    import brickformer.spec

    before = dict(brickformer.spec._REGISTRY)
    with world() as (bricks, checks):
        copy = bricks.Cell().build()
        assert type(copy) is not brickformer.models.DecoderModel
        ids = checks.draw(copy)
        told = checks.say(copy, ids)
    assert torch.equal(told, Cell().build()(ids))
    assert before == brickformer.spec._REGISTRY
    assert type(Cell().build()) is brickformer.models.DecoderModel


def test_a_patch_that_does_not_apply_is_an_error() -> None:
    for patches in ({"brickformer.mask": ("no such text", "x")}, {"brickformer.no_such_module": ("a", "b")}):
        with pytest.raises(AssertionError), world(patches):
            pass
