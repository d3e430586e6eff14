"""A second copy of the package, perhaps with some lines broken, imported beside the real one.

`world(patches)` takes brickformer and the contract's helpers out of `sys.modules`, imports them again from patched
source, and puts the real ones back at the end. Nothing is written to disk, and the copy is not shape-checked: what a
mutant breaks has to be found by the contract itself (and torch.compile can trace it).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = ("brickformer", "contract")


class Patched(importlib.machinery.SourceFileLoader):
    """Loads a module of the package from its file, after a change of its text."""

    def __init__(self, fullname: str, path: str, change: tuple[str, str] | None) -> None:
        super().__init__(fullname, path)
        self.change = change

    def get_code(self, fullname: str) -> CodeType:
        """Compiled here and now: never read from, or written to, __pycache__."""
        text = Path(self.path).read_text("utf-8")
        if self.change is not None:
            old, new = self.change
            assert text.count(old) == 1, f"{fullname}: {old!r} stands {text.count(old)} times, expected once"
            text = text.replace(old, new)
        return compile(text, f"{self.path} (a copy)", "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the package, and nothing else."""

    def __init__(self, patches: Mapping[str, tuple[str, str]]) -> None:
        self.patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The file of the checkout, with its patch."""
        if fullname.split(".")[0] != "brickformer":
            return None
        place = ROOT.joinpath(*fullname.split("."))
        package = place.is_dir()
        file = place / "__init__.py" if package else place.with_suffix(".py")
        if not file.is_file():
            return None
        loader = Patched(fullname, str(file), self.patches.get(fullname))
        spec = importlib.machinery.ModuleSpec(fullname, loader, origin=str(file), is_package=package)
        if package:
            spec.submodule_search_locations = [str(place)]
        return spec


@contextmanager
def world(patches: Mapping[str, tuple[str, str]] | None = None) -> Iterator[tuple[ModuleType, ModuleType]]:
    """(contract.bricks, contract.checks) on a copy of the package. patches: module -> (old text, new text).

    Errors: AssertionError when the old text does not stand in the module exactly once, or the module was not imported.
    """
    finder = Finder(patches or {})
    taken = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in COPIED}
    sys.meta_path.insert(0, finder)
    try:
        pair = importlib.import_module("contract.bricks"), importlib.import_module("contract.checks")
        unused = sorted(set(finder.patches) - set(sys.modules))
        assert not unused, f"patched, but never imported: {unused}"
        yield pair
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in COPIED]:
            del sys.modules[name]
        sys.modules.update(taken)
