"""`brick generate`: ask a trained run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from brickformer.generate import Sampling, Stop
    from brickformer.recipes import Trained

ABOUT = """Answer items with a trained run, one line each; a language model goes on with them instead.

ITEM is a text, or a file with one item a line; without any, items are read from standard input. An item that cannot be
answered is named on standard error, the others go on, and the exit code is 2."""
EXAMPLES = """examples:
  brick generate runs/reverse-001 "7 1 4"
  brick generate runs/pairs-001 sentences.txt > answers.txt
  brick generate runs/text-001 "Once upon" --set temperature=0.5 --set max_tokens=500

--set reaches: temperature (0: the most probable token), top_k, top_p, min_p, repetition, seed, max_tokens, texts, ...
(`brick list sampling`, `brick list stop`)"""
CHUNK: Final = 256  # items answered together


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "generate",
        parents=[shared],
        help="answer with a trained run",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", metavar="RUN", help="a folder that `brick train` made")
    p.add_argument("items", metavar="ITEM", nargs="*", help="a text, or a file with one item a line")
    p.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], dest="settings", help="how to choose")
    p.add_argument("--no-cache", action="store_true", help="read everything again at every token, to compare")
    p.add_argument("--stats", action="store_true", help="counts and times on standard error")
    p.set_defaults(verb=generate)


def generate(args: argparse.Namespace) -> int:
    """Answer every item; 2 when one could not be."""
    from brickformer.recipes import Trained

    trained = Trained.open(args.run)
    sampling, stop = chosen(trained, args.settings)
    failed = False
    for chunk in chunks(read_items(args.items), 1 if not args.items and sys.stdin.isatty() else CHUNK):
        failed |= answer(trained, chunk, sampling, stop, args)
    return 2 if failed else 0


def chosen(trained: Trained, settings: Sequence[str]) -> tuple[Sampling, Stop]:
    """Sampling and stop with every --set in the one that has the field. Errors: SpecError."""
    from brickformer.cli.settings import changed, parsed
    from brickformer.errors import SpecError, nearest
    from brickformer.generate import Sampling, Stop
    from brickformer.spec import fields_of

    pairs = parsed(settings)
    known = {**fields_of(Sampling), **fields_of(Stop)}
    for name, _ in pairs:
        if name not in known:
            raise SpecError(f"--set {name}: no such setting; {nearest(name, known)}")
    return (
        changed(trained.sampling, [p for p in pairs if p[0] in fields_of(Sampling)]),
        changed(Stop(), [p for p in pairs if p[0] in fields_of(Stop)]),
    )


def read_items(items: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(where it comes from, text) of every item: "" for the command line, file and line number elsewhere."""
    from brickformer.tasks import read_lines

    if not items:
        for number, line in enumerate(sys.stdin, 1):
            yield f"standard input, line {number}", line.rstrip("\n")
    for item in items:
        if len(item) < 4096 and "\n" not in item and Path(item).is_file():
            for number, line in read_lines(item):
                yield f"{item}, line {number}", line
        else:
            yield "", item


def chunks(items: Iterator[tuple[str, str]], size: int) -> Iterator[list[tuple[str, str]]]:
    """Up to `size` items at a time."""
    while chunk := list(islice(items, size)):
        yield chunk


def answer(
    trained: Trained, chunk: list[tuple[str, str]], sampling: Sampling, stop: Stop, args: argparse.Namespace
) -> bool:
    """Print the answers in order; True when one failed. A blank line stays blank, so that line i answers line i."""
    from brickformer.look.amounts import cut

    asked = [text for where, text in chunk if text.strip() or not where]
    generation = trained.generate(asked, sampling, stop, use_cache=not args.no_cache)
    results = iter(generation.results)
    failed = False
    for where, text in chunk:
        if where and not text.strip():
            print()
            continue
        result = next(results)
        if result.error is not None:
            failed = True
            sys.stdout.flush()
            print(f"brick: {where or repr(cut(text, 30))}, {str(result.error).removeprefix('text, ')}", file=sys.stderr)
            if where:
                print()
        else:
            print(f"{text}{result.text}" if trained.writes_text else result.text)
    if args.stats:
        print(generation.stats, file=sys.stderr)
    return failed
