"""`brick train`: learn something, say how well, keep it."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brickformer.recipes import Run, Session
    from brickformer.recipes.examples import Example
    from brickformer.train import Result

ABOUT = """Train a recipe and keep the result in a folder of its own.

  reverse   made-up digits: 7 1 4 -> 4 1 7
  text      a decoder that goes on with any text, character by character
  pairs     an encoder-decoder for two columns: source TAB target, one a line"""
EXAMPLES = """examples:
  brick train reverse
  brick train text --data book.txt --steps 5000
  brick train text --data book.txt --model llama   what `brick export` can share
  brick train pairs --data pairs.tsv --set task.level=word --set train.batch=32
  brick train reverse --set model.*.layers.*.place=post --name post
  brick train --resume runs/text-001

--set reaches every field of the run: task.*, model.*, train.*; `brick list` has
them all. * stands for every layer, or every part that has such a field."""


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "train",
        parents=[shared],
        help="learn digits, a text, or pairs of sentences",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("recipe", metavar="RECIPE", nargs="?", help="reverse, text or pairs")
    p.add_argument("--data", metavar="FILE", help="what to learn from (text, pairs)")
    p.add_argument("--model", metavar="NAME", help="one to be exported: llama or gpt2 for text, marian for others")
    p.add_argument("--set", metavar="PATH=VALUE", action="append", default=[], dest="settings", help="change a field")
    p.add_argument("--steps", metavar="N", type=int, help="how long; short for --set train.steps=N")
    p.add_argument("--seed", metavar="N", type=int, help="of the data, the initial values, the dropout (default 0)")
    p.add_argument("--name", metavar="NAME", help="of the folder (default: the recipe)")
    p.add_argument("--out", metavar="DIR", help="where the folder goes (default: runs)")
    p.add_argument("--resume", metavar="RUN", help="go on with a run that was stopped")
    p.set_defaults(verb=train)


def train(args: argparse.Namespace) -> int:
    """Say what will be done, do it, say how it went."""
    from brickformer.cli.find import recipe
    from brickformer.cli.settings import changed, parsed
    from brickformer.cli.text import command
    from brickformer.errors import SpecError
    from brickformer.recipes import Session
    from brickformer.train import RunFolder, progress

    for option, given, least in (("--steps", args.steps, 1), ("--seed", args.seed, 0)):
        if given is not None and given < least:
            raise SpecError(f"{option}: got {given}, expected at least {least}.")
    settings = parsed(args.settings)
    if args.resume is not None:
        for name in ("recipe", "data", "model", "name", "seed", "out"):
            if getattr(args, name) is not None:
                raise SpecError(f"--resume {args.resume}: the run has its own {name}. Leave yours out.")
        session = Session.resume(Path(args.resume), lambda run: shortened(changed(run, settings), args.steps))
    elif args.recipe is None:
        raise SpecError("train: no recipe. Say what to learn: reverse, text or pairs; or --resume RUN.")
    else:
        run = shortened(recipe(args.recipe, args.data, settings, args.model), args.steps)
        run = run.but(**{name: value for name in ("seed", "name") if (value := getattr(args, name)) is not None})
        RunFolder.check(Path(args.out or "runs"), run.name)
        session = Session.new(run)
    plan(session)
    if not proved(session):
        return 1
    print(file=sys.stderr)  # what follows, up to the next blank line, is progress
    if session.folder is None:
        session.create_folder(Path(args.out or "runs"))
    result = session.fit(progress(sys.stderr))
    if not result.finished:
        assert session.folder is not None
        print(f"Go on with: {command(args, f'train --resume {session.folder.path}')}", file=sys.stderr)
        return 130
    print(f"use it:  {command(args, report(session, result))}")
    return 0


def shortened(run: Run, steps: int | None) -> Run:
    """The run with `steps` steps; a warm-up longer than that is cut to it."""
    if steps is None:
        return run
    if run.train.schedule.warmup > steps >= 1:
        run = run.but(**{"train.schedule.warmup": steps})
    return run.but(**{"train.steps": steps})


def plan(session: Session) -> None:
    """Task, sizes, parameters, steps."""
    run, train = session.run, session.run.train
    optim = train.optim.build(session.model).describe()
    each = f"{train.accumulate} × {train.batch}" if train.accumulate > 1 else str(train.batch)
    device = next(session.model.parameters()).device
    say("task", session.data.describe())
    say(
        "model",
        f"{model_line(run.model)}, {sum(p.numel() for p in session.model.parameters()):,} parameters, on {device}",
    )
    say("train", f"{train.steps:,} steps of {each} rows, seed {run.seed}; {optim}")


def proved(session: Session) -> bool:
    """Whether a small twin of the model keeps what every model owes; said in a line, or in one a failure."""
    from time import perf_counter

    from brickformer.cli.text import duration
    from brickformer.proof import check

    began = perf_counter()
    report = check(session.run.model)
    if report.ok:
        say("check", f"{report.line()} hold, in {duration(perf_counter() - began)}")
    sys.stdout.flush()
    for failure in report.failures:
        print(f"brick: {failure.failure()}", file=sys.stderr)
    if not report.ok:
        print(f"brick: not trained: {report.verdict()}", file=sys.stderr)
    return report.ok


def model_line(spec: Any) -> str:
    """``encoder_decoder, D 128, 2 + 2 layers``."""
    from brickformer.models import EncoderDecoder

    if isinstance(spec, EncoderDecoder):
        return f"{spec.kind}, D {spec.decoder.dim}, {len(spec.encoder.layers)} + {len(spec.decoder.layers)} layers"
    return f"{spec.kind}, D {spec.dim}, {len(spec.layers)} layers"


def report(session: Session, result: Result) -> str:
    """The last numbers, five samples, where it is; returns how to use it."""
    from brickformer.cli.text import duration, screen

    assert session.folder is not None
    record, where = result.record, shown_path(session.folder.path)
    count = min(session.run.answers, len(session.data.examples()))
    exact = f", exact match {100 * record['exact']:.1f} % of {count} unseen sequences" if "exact" in record else ""
    val = f" ({record['val_loss']:.4f} on unseen data)" if "val_loss" in record else ""
    print()
    say("result", f"loss {record['loss']:.4f}{val}{exact}; {result.step:,} steps in {duration(result.seconds)}")
    print()
    examples = session.examples(5)
    if examples:
        prompt = examples[0].source
        print("\n".join(compared(examples, screen())))
    else:
        prompt, text = session.passage(200)
        print(f"  a sample; its first {len(prompt)} characters are given:\n")
        for line in (prompt + text).strip().split("\n"):
            for part in textwrap.wrap(line, screen() - 2) or [""]:
                print(f"  {part}".rstrip())
        prompt = prompt.strip().split("\n")[0]
    print(f"\nsaved in {where}: weights, spec, metrics, loss.png")
    return f"generate {where} {quoted(prompt)}"


def compared(examples: Sequence[Example], width: int) -> list[str]:
    """Source → output, and whether it is right: a line each, or a block each where they are long."""
    from brickformer.look.amounts import cut

    rows = [(e.source, e.output, "right" if e.exact else f"expected {e.expected}") for e in examples]
    left, middle, right = (max(len(row[i]) for row in rows) for i in (0, 1, 2))
    if left + middle + right + 9 <= width:
        return [f"  {source:<{left}}  →  {output:<{middle}}  {said}".rstrip() for source, output, said in rows]
    return [
        cut(line, width) for source, output, said in rows for line in (f"  {source}", f"  → {output}", f"    {said}")
    ]


def say(name: str, text: str) -> None:
    """A line of the plan."""
    from brickformer.cli.text import labelled

    print(labelled(name, text, 8))


def shown_path(path: Path) -> Path:
    """Relative where that is shorter."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path


def quoted(text: str) -> str:
    """As a shell takes it."""
    import shlex

    return f'"{text}"' if text and not set(text) & set('"$`\\!') else shlex.quote(text)
