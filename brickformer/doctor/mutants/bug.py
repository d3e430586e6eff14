"""A planted bug: a specimen (a hand-written model as text) with one thing broken, and the probe that has to name it.

`source` names a file of `specimens/`; old -> new are changes of its text. Nothing is written to disk. The specimens are
text, not modules: they are written as people write them, and nothing of the package may import them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from torch import nn

from brickformer.doctor.subject import Subject

SPECIMENS: Final = Path(__file__).parent / "specimens"
Changes = tuple[tuple[str, str], ...]


def text_of(source: str, *changes: tuple[str, str]) -> str:
    """The text of a specimen with its changes; every old text must stand in it."""
    text = (SPECIMENS / f"{source}.txt").read_text("utf-8")
    for old, new in changes:
        assert old in text, f"{source}: {old!r} is not in it"
        text = text.replace(old, new)
    return text


def module_of(source: str, *changes: tuple[str, str]) -> ModuleType:
    """A specimen as a module."""
    module = ModuleType(source)
    exec(compile(text_of(source, *changes), f"{source} (planted)", "exec"), module.__dict__)
    return module


def said(module: ModuleType, says: dict[str, Any]) -> dict[str, Any]:
    """What is said of a model, with the functions that strings name; "=name" calls the function for its value."""
    found: dict[str, Any] = {}
    for key, value in says.items():
        if isinstance(value, str) and value.startswith("="):
            found[key] = getattr(module, value[1:])()
        else:
            found[key] = getattr(module, value) if isinstance(value, str) and key in _CALLED else value
    return found


def subject_of(source: str, changes: Changes, make: str, says: dict[str, Any]) -> Subject:
    """A model of a specimen with what is said of it."""
    module = module_of(source, *changes)
    return Subject(getattr(module, make)(), **said(module, says))


_CALLED: Final = frozenset("loss decode call training schedule beam packed build".split())


@dataclass(frozen=True)
class Planted:
    """name; probe: that must name it; cases: of the public list. says: more about the subject, by names.

    breaks: a change of a finished model of ours (`source` is then the name of a preset), in place of `changes`.
    """

    name: str
    probe: str
    source: str
    changes: Changes = ()
    cases: tuple[str, ...] = ()
    make: str = "make"
    says: dict[str, Any] = field(default_factory=dict)
    breaks: Callable[[Any], None] | None = None
    at: str | None = None

    def subject(self) -> Subject:
        """The broken model with what is said of it."""
        if self.breaks is not None:
            from brickformer.doctor.mutants.ours import healthy

            model = healthy(self.source)
            self.breaks(model)
            return Subject(model, **self.says)
        return subject_of(self.source, self.changes, self.make, self.says)

    def places(self, model: nn.Module) -> frozenset[str]:
        """The paths of the modules whose lines were changed; none where it is the whole model or a function."""
        if self.at is not None:
            return frozenset({self.at} - {""})
        names = _classes(self.source, self.changes) if self.breaks is None else set()
        found = {path for path, m in model.named_modules() if path and type(m).__name__ in names}
        return frozenset(found)


@dataclass(frozen=True)
class Clean:
    """A healthy model. source, changes, make, says: as in Planted."""

    name: str
    source: str
    make: str = "make"
    says: dict[str, Any] = field(default_factory=dict)
    changes: Changes = ()

    def subject(self) -> Subject:
        """The model with what is said of it."""
        return subject_of(self.source, self.changes, self.make, self.says)


def _classes(source: str, changes: Changes) -> set[str]:
    """The classes of a specimen in which something was changed."""
    text = text_of(source)
    lines = {text[: text.index(old)].count("\n") + 1 + n for old, _ in changes for n in range(old.count("\n") + 1)}
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
            found.add(node.name)
    return found


def planted(name: str, probe: str, source: str, *changes: tuple[str, str], cases: str = "", **more: Any) -> Planted:
    """A planted bug on one line."""
    return Planted(name, probe, source, changes, tuple(cases.split()), **more)


LM: Final[dict[str, Any]] = {"loss": "lm_loss"}
PAIR: Final[dict[str, Any]] = {"loss": "pair_loss"}
PADDED: Final[dict[str, Any]] = {"loss": "padded_loss", "pad": 0}
FILL: Final = 'att.masked_fill(~self.tril[:T, :T], float("-inf"))'
MASK: Final = (FILL, "att")
SPLIT: Final = "view(B, T, self.heads, self.width).transpose(1, 2)"
