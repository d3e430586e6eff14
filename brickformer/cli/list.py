"""`brick list`: every registered brick, its slot, its options, its paper."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

if TYPE_CHECKING:
    from brickformer.spec import Spec

ABOUT = """Every brick there is: its slot, what it does, its paper, and its options as
name: type = default. One brick alone is shown with all that is known of it.
At the end, and alone as `brick list presets`: whole models that have a name."""
PRESETS_SLOT = "presets"
INDENT = " " * 18
KEEP = "\xa0"  # a space where no line is broken
EXAMPLES = """examples:
  brick list
  brick list mixer
  brick list presets
  brick list attention --use my_bricks.py"""


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "list",
        parents=[shared],
        help="every brick, its slot, its options, its paper",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("slot", metavar="SLOT", nargs="?", help="only this slot, this brick or preset, or presets")
    p.add_argument("--families", action="store_true", help="published models that can be read and written")
    p.set_defaults(verb=list_)


def list_(args: argparse.Namespace) -> int:
    """Print the bricks by slot."""
    from brickformer.cli.text import screen
    from brickformer.errors import SpecError, nearest
    from brickformer.presets import PRESETS

    if args.families:
        return families()
    width = screen()
    if args.slot in (PRESETS_SLOT, *PRESETS):
        presets(width, args.slot)
        return 0
    slots = by_slot()
    if args.slot is not None:
        chosen = {
            slot: {kind: c for kind, c in bricks.items() if args.slot in (slot, kind)} for slot, bricks in slots.items()
        }
        slots = {slot: bricks for slot, bricks in chosen.items() if bricks}
        if not slots:
            everything = by_slot()
            kinds = [kind for bricks in everything.values() for kind in bricks]
            known = [*everything, *kinds, PRESETS_SLOT, *PRESETS]
            raise SpecError(f"list {args.slot}: no such slot, brick or preset; {nearest(args.slot, known)}")
    for i, (slot, bricks) in enumerate(slots.items()):
        print("\n" * bool(i) + slot)
        for kind, cls in bricks.items():
            for line in detail(kind, cls, width) if args.slot == kind else entry(kind, cls, width):
                print(line)
    if args.slot is None:
        print()
        presets(width, PRESETS_SLOT)
    return 0


def presets(width: int, asked: str) -> None:
    """Print the models that have a name: what each is and its arguments; of one alone also the spec it returns."""
    from brickformer.presets import PRESETS

    print(PRESETS_SLOT)
    for name, make in PRESETS.items():
        if asked not in (PRESETS_SLOT, name):
            continue
        about = (make.__doc__ or "").strip().split("\n")[0]
        sizes = inspect.signature(make).parameters.values()
        options = "; ".join(
            p.name + ("" if p.default is p.empty else f" = {plain(p.default)}").replace(" ", KEEP) for p in sizes
        )
        lines = [(about, f"  {name:<16}"), (options, INDENT)]
        if asked == name:
            needed = {"vocab": 32_000} if inspect.signature(make).parameters["vocab"].default is inspect._empty else {}
            lines.append((repr(make(**needed)), INDENT))
        for part, first in lines:
            for line in textwrap.wrap(part, width, initial_indent=first, subsequent_indent=INDENT):
                print(line.replace(KEEP, " "))


def families() -> int:
    """Print the families of published models: what they are, and the test that proves it."""
    from brickformer.cli.text import screen
    from brickformer.hf import FAMILIES

    for name, family in FAMILIES.items():
        about = (sys.modules[family.read.__module__].__doc__ or "").split("\n\n")[0].partition(": ")[2]
        for line in textwrap.wrap(about, screen(), initial_indent=f"  {name:<16}", subsequent_indent=INDENT):
            print(line)
        print(f"{INDENT}proof: {family.proof} -k {name}-")
    return 0


def by_slot() -> dict[str, dict[str, type[Spec]]]:
    """Slot -> kind -> class, in the order of registration; a brick that is no variant of anything is its own slot."""
    from brickformer.recipes.bricks import import_bricks
    from brickformer.spec import Spec, kinds_of

    import_bricks()
    out: dict[str, dict[str, type[Spec]]] = {}
    for kind, cls in kinds_of(Spec).items():
        slot = next(c for c in cls.__mro__[1:] if issubclass(c, Spec))
        name = "parts" if slot is Spec else words(slot.__name__.removesuffix("Spec"))
        out.setdefault(name, {})[kind] = cls
    return {slot: out[slot] for slot in sorted(out, key=lambda s: s == "parts")}


def words(name: str) -> str:
    """FeedForward -> feed-forward."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


def entry(kind: str, cls: type[Spec], width: int) -> Iterator[str]:
    """The lines of one brick."""
    summary, _, rest = (cls.__doc__ or "").strip().partition("\n")
    found = papers(cls)
    text = re.sub(r"\s*\((?:arXiv )[^)]*\)", "", summary)
    line = text + "".join(f" [{name}]".replace("arXiv ", f"arXiv{KEEP}") for name in found)
    options = "; ".join(option(f, t).replace(" ", KEEP) for f, t in fields(cls))
    for part, first in ((line, f"  {kind:<16}"), (options, INDENT)):
        for wrapped in textwrap.wrap(
            part, width, initial_indent=first, subsequent_indent=INDENT, break_on_hyphens=False
        ):
            yield wrapped.replace(KEEP, " ")


def detail(kind: str, cls: type[Spec], width: int) -> Iterator[str]:
    """The lines of one brick when it is asked for by name: all that its docstring says, an option a line."""
    found = papers(cls)
    yield f"  {kind}" + (f"  [{', '.join(found)}]" if found else "")
    for paragraph in inspect.cleandoc(cls.__doc__ or "").split("\n\n"):
        yield from textwrap.wrap(paragraph, width, initial_indent="    ", subsequent_indent="    ")
        yield ""
    rows = [
        (f.name, type_name(t), "needed" if f.default is dataclasses.MISSING else plain(f.default))
        for f, t in fields(cls)
    ]
    names, types_ = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    for name, type_, default in rows:
        yield f"    {name:<{names}}  {type_:<{types_}}  {default}"


def fields(cls: type[Spec]) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """Every option and its type."""
    from brickformer.spec import fields_of

    types_ = fields_of(cls)
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        yield f, types_[f.name]


def option(f: dataclasses.Field[Any], t: Any) -> str:
    """``window: int | none = none``; without a default it has to be given."""
    default = "" if f.default is dataclasses.MISSING else f" = {plain(f.default)}"
    return f"{f.name}: {type_name(t)}{default}"


def type_name(t: Any) -> str:
    """A type as it is written in a spec file."""
    from brickformer.spec import Spec

    origin = get_origin(t)
    if origin in (Union, types.UnionType):
        return " | ".join(map(type_name, get_args(t)))
    if origin is Literal:
        return " | ".join(map(str, get_args(t)))
    if origin is tuple:
        args = get_args(t)
        return f"list of {type_name(args[0])}" if Ellipsis in args else f"({', '.join(map(type_name, args))})"
    if t is type(None):
        return "none"
    if isinstance(t, type) and issubclass(t, Spec):
        return t.kind or words(t.__name__.removesuffix("Spec"))
    return str(t.__name__)


def plain(value: Any) -> str:
    """A default in short."""
    from brickformer.spec import Spec

    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Spec):
        return repr(value).replace(type(value).__name__, value.kind, 1).removesuffix("()")
    if isinstance(value, tuple):
        return f"[{', '.join(map(plain, value))}]"
    return str(value)


def papers(cls: type[Spec]) -> list[str]:
    """arXiv numbers: of the docstring's first sentence, else of the line about it at the top of its file."""
    top = (sys.modules[cls.__module__].__doc__ or "").strip()
    lines = top.split("\n")
    about = [line for line in lines[1:] if re.match(rf"\s*{cls.__name__}\b", line)]
    for text in ((cls.__doc__ or "").strip().split("\n\n")[0].split("\n")[0], *about, lines[0]):
        found = re.findall(r"arXiv[ :](\d{4}\.\d{4,5})", text)
        if found:
            return [f"arXiv {number}" for number in found]
    return []
