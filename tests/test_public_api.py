"""The public names: one list for people, one for type checkers, one for the import at first use; all the same."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import brickformer

ROOT = Path(__file__).resolve().parent.parent


def seen_by_type_checkers() -> dict[str, str]:
    """Name -> module, of the imports under TYPE_CHECKING."""
    found = {}
    for node in ast.parse(Path(inspect.getfile(brickformer)).read_text("utf-8")).body:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body):
                for line in body:
                    assert isinstance(line, ast.ImportFrom) and line.module
                    found |= {alias.name: line.module for alias in line.names}
            case _:
                pass
    return found


def test_the_lists_agree() -> None:
    typed = seen_by_type_checkers()
    assert typed == {name: f"brickformer.{module}" for name, module in brickformer._HOME.items()}
    assert sorted(typed) == sorted(brickformer.__all__) == dir(brickformer)
    assert len(typed) <= 60, "an interface is small"


@pytest.mark.parametrize("name", brickformer.__all__)
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(brickformer, name)
    assert value is getattr(sys.modules[seen_by_type_checkers()[name]], name)
    assert (getattr(value, "__doc__", "") or "").strip()


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="Transformer"):
        _ = brickformer.Transformer


def test_the_package_does_not_wait_for_torch() -> None:
    code = "import brickformer, sys; dir(brickformer); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ), check=True)


def test_recipes_do_not_wait_for_the_tables_of_others() -> None:
    code = "import brickformer.recipes, sys; sys.exit(any(m.startswith('brickformer.hf') for m in sys.modules))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ), check=True)
