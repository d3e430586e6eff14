"""`brick generate`: ask a trained run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from brickformer.generate import Beam, Result, Sampling, Stop
    from brickformer.recipes import Trained

ABOUT = """Answer items with a trained run, one line each; a language model goes on with
them instead.

ITEM is a text, or a file with one item a line; without any, items are read from
standard input. An item that cannot be answered is named on standard error, the
others go on, and the exit code is 2."""
EXAMPLES = """examples:
  brick generate runs/reverse-001 "7 1 4"
  brick generate runs/pairs-001 sentences.txt > answers.txt
  brick generate runs/text-001 "Once upon" --set temperature=0.5

--set reaches how a token is chosen (temperature: 0 takes the most probable;
top_k, top_p, seed, ...), where an answer ends (max_tokens, texts, ...) and beam
search (width, ...): see `brick list sampling`, `brick list stop`, `... beam`."""
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
    sampling, stop, beam = chosen(trained, args.settings)
    live = beam is None and trained.writes_text and sys.stdout.isatty() and not args.no_cache
    at_once = 1 if live or (not args.items and sys.stdin.isatty()) else CHUNK
    failed = False
    for chunk in chunks(read_items(args.items), at_once):
        asked = [text for where, text in chunk if text.strip() or not where]
        if live and asked:
            results, stats = [written(trained, asked[0], sampling, stop)], None
        elif beam is not None:
            generation = trained.search(asked, beam, stop, use_cache=not args.no_cache)
            results, stats = generation.results, generation.stats
        else:
            generation = trained.generate(asked, sampling, stop, use_cache=not args.no_cache)
            results, stats = generation.results, generation.stats
        failed |= answer(chunk, results, shown=live, prompt=trained.writes_text)
        if args.stats and stats is not None:
            print(stats, file=sys.stderr)
    return 2 if failed else 0


def chosen(trained: Trained, settings: Sequence[str]) -> tuple[Sampling, Stop, Beam | None]:
    """Sampling, stop and beam with every --set in the one that has the field; a beam only when asked for one."""
    from brickformer.cli.settings import changed, parsed
    from brickformer.errors import SpecError, nearest
    from brickformer.generate import Beam, Sampling, Stop
    from brickformer.spec import fields_of

    pairs = parsed(settings)
    known = [*fields_of(Sampling), *fields_of(Stop), *fields_of(Beam)]
    for name, _ in pairs:
        if name not in known:
            raise SpecError(f"--set {name}: no such setting; {nearest(name, known)}")
    drawing, ending, searching = ([p for p in pairs if p[0] in fields_of(kind)] for kind in (Sampling, Stop, Beam))
    if searching and drawing:
        raise SpecError(
            f"--set {drawing[0][0]}: a beam search ({searching[0][0]}) draws nothing. Leave one of them out."
        )
    beam = changed(Beam(), searching) if searching else None
    return changed(trained.sampling, drawing), changed(Stop(), ending), beam


def read_items(items: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(where it comes from, text) of every item: "" for the command line, file and line number elsewhere."""
    from brickformer.errors import DataError
    from brickformer.tasks import read_lines

    if not items:
        number = 0
        try:
            for line in sys.stdin:
                number += 1
                yield f"standard input, line {number}", line.rstrip("\n")
        except UnicodeDecodeError:
            raise DataError(f"standard input, after line {number}: not UTF-8 text. Save it as UTF-8.") from None
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


def written(trained: Trained, text: str, sampling: Sampling, stop: Stop) -> Result:
    """Show a continuation while it is being written."""
    pieces = trained.stream(text, sampling, stop)
    if pieces.result.error is None:
        print(text, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    if pieces.result.error is None:
        print()
    return pieces.result


def answer(chunk: Sequence[tuple[str, str]], results: Sequence[Result], *, shown: bool, prompt: bool) -> bool:
    """Print the answers in order; True when one failed. A blank line stays blank, so that line i answers line i.

    shown: they have been printed while they were written. prompt: print it before its answer.
    """
    from brickformer.look.amounts import cut

    failed, number = False, 0
    for where, text in chunk:
        if where and not text.strip():
            print()
            continue
        for result in (r for r in results if r.prompt == number):
            if result.error is not None:
                failed = True
                sys.stdout.flush()
                about = str(result.error).removeprefix("text, ")
                print(f"brick: {where or repr(cut(text, 30))}, {about}", file=sys.stderr)
                if where:
                    print()
            elif not shown:
                print(f"{text}{result.text}" if prompt else result.text)
        number += 1
    return failed
