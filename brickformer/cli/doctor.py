"""`brick doctor`: find silent bugs in anyone's Transformer."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brickformer.doctor import Report, Subject

ABOUT = """Measure what a Transformer must satisfy, whoever wrote it: no future is seen, padding
and other rows change nothing, scores are scaled, softmax runs over the keys, heads
stay beside their token, decoding says what reading says, targets are shifted once,
every parameter is alive, eight examples can be learnt by heart, and more.

make() in FILE.py returns a model, or a Subject that says more about it (its
padding, its loss, how it is called). The model is copied and left as it is.
Exit code 0: healthy, 1: something is wrong, 2: it could not be asked."""
EXAMPLES = """examples:
  brick doctor my_model.py:make
  brick doctor my_model.py:make --kind decoder --pad 0
  brick doctor my_model.py:make --format sarif > doctor.sarif
  brick doctor --exam                      the planted bugs, and the table of docs/doctor.md"""


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "doctor",
        parents=[shared],
        help="find silent bugs in anyone's Transformer",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("what", nargs="?", metavar="FILE.py:make", help="a file and a function without arguments in it")
    p.add_argument("--kind", choices=("decoder", "encoder", "encoder_decoder"), help="what the model is meant to be")
    p.add_argument("--pad", type=int, help="the id of padding")
    p.add_argument("--vocab", type=int, help="how many ids it knows")
    p.add_argument("--format", choices=("text", "json", "sarif", "html"), default="text", help="of the report")
    p.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    p.add_argument("--seconds", type=float, default=60.0, help="what one model may take in all (60)")
    p.add_argument("--exam", action="store_true", help="examine the doctor itself on planted bugs and clean variants")
    p.add_argument("--table", metavar="FILE.md", help="with --exam: rebuild the table in this page")
    p.add_argument("--only", metavar="WORD", help="with --exam: what has this word in its name or family")
    p.set_defaults(verb=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Print the report; 1 when something is wrong."""
    import json

    import torch

    from brickformer.doctor import diagnose
    from brickformer.errors import SpecError

    if args.exam:
        from brickformer.cli.exam import exam

        given = [f"--{n}" for n in ("kind", "pad", "vocab") if getattr(args, n) is not None]
        given += [args.what] if args.what is not None else []
        given += ["--format"] if args.format != "text" else []
        if given:
            raise SpecError(f"doctor --exam: got {', '.join(given)}; the exam has models of its own. Leave it out.")
        if args.only is not None and args.table is not None:
            raise SpecError("doctor --exam --only: a part would replace the whole table. Leave out --table.")
        return exam(args.only, args.table, args.seconds)
    for name in ("only", "table"):
        if getattr(args, name) is not None:
            raise SpecError(f"doctor --{name}: belongs to the exam. Add --exam, or leave it out.")
    if args.what is None:
        raise SpecError("doctor: expected FILE.py:make (or --exam).")
    subject = made(args.what, args.seconds)
    for name in ("kind", "pad", "vocab"):
        if getattr(args, name) is not None:
            setattr(subject, name, getattr(args, name))
    late = f"doctor {args.what}: a call of the model took longer than all that was allowed"
    with within(args.seconds, late, torch.get_num_threads()):
        report = diagnose(subject, seconds=args.seconds)
    match args.format:
        case "json":
            print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        case "sarif":
            from brickformer.cli import version
            from brickformer.doctor.formats import sarif

            print(json.dumps(sarif(report, args.what.rpartition(":")[0], version()), indent=2, ensure_ascii=False))
        case "html":
            from brickformer.doctor.formats import page

            print(page(report), end="")
        case _:
            print("\n".join(text(report)))
    return 0 if report.ok else 1


@contextlib.contextmanager
def within(seconds: float, what: str, threads: int = 1) -> Iterator[None]:
    """A limit for what runs inside. Errors: SpecError."""
    from brickformer.doctor.guard import OutOfTime, interrupted
    from brickformer.errors import SpecError

    try:
        with interrupted(seconds, f"interrupted after {seconds:g} s", threads):
            yield
    except OutOfTime as e:
        raise SpecError(f"{what} ({e}). Give it a smaller model, or more time: --seconds {2 * seconds:g}") from None


def made(what: str, seconds: float = 60.0) -> Subject:
    """What FILE.py:make returns, as a Subject. Errors: SpecError: no such file or function, or it raises."""
    from torch import nn

    from brickformer.cli.find import loaded
    from brickformer.doctor import Subject
    from brickformer.errors import SpecError, nearest

    name, colon, function = what.rpartition(":")
    if not colon or not name.endswith(".py"):
        raise SpecError(f"doctor {what}: expected FILE.py:FUNCTION, as in model.py:make")
    aside = contextlib.redirect_stdout(sys.stderr)  # the report has standard output to itself
    with within(seconds, f"doctor {what}: importing the file did not end"), aside:
        module = loaded(name, "doctor")
    make: Callable[[], Any] | None = getattr(module, function, None)
    if make is None:
        names = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise SpecError(f"doctor {what}: no {function!r} in it; {nearest(function, names)}")
    try:
        with within(seconds, f"doctor {what}: {function}() did not end"), aside:
            value = make() if not isinstance(make, nn.Module) else make
    except SpecError:
        raise
    except (Exception, SystemExit) as e:
        said = (str(e).splitlines() or [""])[0]
        raise SpecError(f"doctor {what}: {function}() raised {type(e).__name__}: {said}") from e
    if isinstance(value, nn.Module):
        return Subject(value)
    if not isinstance(value, Subject):
        raise SpecError(
            f"doctor {what}: {function}() returned {type(value).__name__}; expected a model (nn.Module) or a "
            f"brickformer.doctor.Subject."
        )
    return value


def text(report: Report) -> list[str]:
    """The report for a terminal, wrapped."""
    from brickformer.cli.text import labelled

    lines = [f"{report.name}: {', '.join(report.facts)}"]
    for f in report.findings:
        lines += ["", f"{f.severity.upper()}  {f.probe}" + (f"  at {f.where}" if f.where else "")]
        cause = f.cause if f.confidence == "certain" else f"{f.cause} ({f.confidence})"
        rows = [("measured", f.measured), ("expected", f.expected), ("cause", cause), ("fix", f.fix)]
        rows += [("also", also) for also in f.also]
        lines += [labelled(f"  {name}", said, 12) for name, said in rows]
        lines += [f"  {'confirm' if i == 0 else '':<10}{line}" for i, line in enumerate(f.confirm.splitlines())]
    lines += ["", report.summary()]
    untested = [v for v in report.verdicts if v.outcome == "untested"]
    return lines + [labelled("not tested", f"{v.probe}: could not be tested, because {v.detail}", 12) for v in untested]
