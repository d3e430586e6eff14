"""`brick trap`: a planted bug as a lesson, trained beside the right model."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brickformer.doctor.lessons import Lesson

ABOUT = """Learn to see a silent bug: the broken lines beside the right ones, a question, both
models trained on a toy task for some seconds with their loss curves, the symptom,
what the doctor measures, and the fix."""
EXAMPLES = """examples:
  brick trap list
  brick trap mask-zero
  brick trap post-norm --seconds 60"""


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "trap",
        parents=[shared],
        help="lessons: silent bugs, trained beside the right model",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("name", metavar="NAME", nargs="?", default="list", help="a trap; default: their list")
    p.add_argument("--seconds", type=float, default=20.0, help="for both trainings together (20)")
    p.add_argument("--no-wait", action="store_true", help="do not wait for an answer")
    p.set_defaults(verb=trap)


def trap(args: argparse.Namespace) -> int:
    """List the traps, or show one."""
    from brickformer.doctor.lessons import ALL, LESSONS
    from brickformer.errors import SpecError, nearest

    if args.name == "list":
        for lesson in ALL:
            print(f"{lesson.name:<24} {lesson.title}")
        return 0
    if args.name not in LESSONS:
        raise SpecError(f"trap {args.name}: no such trap; {nearest(args.name, list(LESSONS))}")
    _show(LESSONS[args.name], args.seconds, args.no_wait)
    return 0


def _show(lesson: Lesson, seconds: float, no_wait: bool) -> None:
    from brickformer.cli.plot import curves
    from brickformer.cli.text import screen
    from brickformer.doctor import diagnose
    from brickformer.doctor.lessons import train

    print(f"{lesson.title}\n")
    for right, broken in lesson.lines():
        print("\n".join(_beside(right, broken, screen())) + "\n")
    print(f"question: {lesson.question}")
    if not no_wait and sys.stdin.isatty():
        with contextlib.suppress(EOFError):  # Ctrl-D
            input("(your guess, then Enter) ")
    right_module, broken_module = lesson.modules()
    print(f"\ntraining both, {seconds / 2:g} s each ...", flush=True)
    right_losses, right_model = train(lesson, right_module, seconds / 2)
    broken_losses, broken_model = train(lesson, broken_module, seconds / 2)
    count = min(len(right_losses), len(broken_losses))
    print("\n".join(curves({"right": right_losses[:count], "broken": broken_losses[:count]}, screen() - 12)))
    print(f"\nanswer: {lesson.answer}")
    if lesson.see is not None:
        print(f"\nright:  {lesson.see(right_module, right_model)}")
        print(f"broken: {lesson.see(broken_module, broken_model)}")
    report = diagnose(lesson.subject())
    print("\nthe doctor:")
    for f in report.wrong[:1]:
        print(f"  {f.severity} {f.probe}" + (f" at {f.where}" if f.where else "") + f": {f.measured}")
        print(f"  expected: {f.expected}")
    if report.ok:
        print("  nothing wrong: what it computes is right; only the time is wasted")
    print(f"\nfix: {lesson.fix}")


def _beside(right: list[str], broken: list[str], width: int) -> list[str]:
    """Two columns where they fit, else one below the other."""
    cut = min((len(x) - len(x.lstrip()) for x in (*right, *broken) if x.strip()), default=0)
    left, other = ([x[cut:] for x in lines] for lines in (right, broken))
    column = max(map(len, left), default=0)
    if column + 3 + max(map(len, other), default=0) > width:
        return [*(f"  right   {x}" for x in left), *(f"  broken  {x}" for x in other)]
    rows = max(len(left), len(other))
    left, other = ["right", *left], ["broken", *other]
    left += [""] * (rows + 1 - len(left))
    other += [""] * (rows + 1 - len(other))
    return [f"{a:<{column}} | {b}".rstrip() for a, b in zip(left, other, strict=True)]
