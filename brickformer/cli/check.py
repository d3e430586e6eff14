"""`brick check`: prove the assembled model before anything is learnt."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brickformer.proof import Report

ABOUT = """Build a tiny twin of the same bricks and prove it, in about a second: causal,
cached == full, padded == unpadded, batch == single, fused == reference
attention, bf16 close to fp32, gradients reach everything, save → load equal,
first loss near ln V, eval deterministic, nothing seen beyond a window.

A failure names the brick, the property and the numbers, and the exit code is 1.
SPEC_OR_RUN is a run folder (its own weights are tried as well), a JSON or YAML
file, a preset (`brick list presets`), or the recipe reverse."""
EXAMPLES = """examples:
  brick check llama
  brick check gpt2 --set layers.*.mixer.mask.window=128
  brick check my_model.json --use my_bricks.py
  brick check runs/reverse-001 --json"""


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "check",
        parents=[shared],
        help="prove the assembled model: causal, cached, padded, gradients, ...",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("what", metavar="SPEC_OR_RUN")
    p.add_argument("--set", metavar="PATH=VALUE", action="append", default=[], dest="settings", help="change the spec")
    p.add_argument("--json", action="store_true", help="the report as JSON")
    p.set_defaults(verb=check)


def check(args: argparse.Namespace) -> int:
    """Print the report; 1 when something is broken."""
    import json
    import sys

    report = prove(args.what, args.settings)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        return 0 if report.ok else 1
    for line in table(report):
        print(line)
    if report.ok:
        print(f"\nall hold: {report.line()}")
        return 0
    sys.stdout.flush()
    for failure in report.failures:
        print(f"brick: {failure.failure()}", file=sys.stderr)
    print(f"brick: {report.verdict()}", file=sys.stderr)
    return 1


def prove(what: str, settings: list[str]) -> Report:
    """The report on a run with its weights, or on a spec. Errors: BrickError: none of these, or it cannot be built."""
    from pathlib import Path

    from brickformer.cli.find import model_spec
    from brickformer.cli.settings import parsed
    from brickformer.proof import check as proved
    from brickformer.recipes import RECIPES, Trained

    if Path(what).expanduser().is_dir() and not settings:
        return proved(Trained.open(what).model)
    if what == "reverse" and not Path(what).exists():
        from brickformer.cli.settings import changed

        return proved(changed(RECIPES[what]().model, parsed(settings)))
    return proved(model_spec(what, parsed(settings)))


def table(report: Report) -> list[str]:
    """A line a property: what holds and what was tried, or why it is not owed, or which brick breaks it."""
    from brickformer.cli.text import labelled, screen

    names = max(len(row.name) for row in report.rows)
    lines = []
    for row in report.rows:
        said = (row.where or row.kind) if row.outcome == "broken" else row.detail
        mark = {"holds": "holds", "broken": "BROKEN", "not owed": "-"}[row.outcome]
        lines.append(labelled(row.name, f"{mark:<6} {said}", min(names + 2, screen() // 2)))
    return lines
