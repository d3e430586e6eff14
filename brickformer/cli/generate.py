"""`brick generate`: ask a trained run."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from brickformer.errors import BrickError

if TYPE_CHECKING:
    from brickformer.cli.ways import Way
    from brickformer.generate import Result, Stats
    from brickformer.recipes import Trained

ABOUT = """Answer items with a trained run, one line each; a language model goes on with
them instead.

ITEM is a text, or a file with one item a line; without any, items are read from
standard input. An item that cannot be answered is named on standard error, the
others go on, and the exit code is 2."""
EXAMPLES = """examples:
  brick generate runs/reverse-001 "7 1 4"
  brick generate runs/pairs-001 sentences.txt > answers.txt
  brick generate runs/text-001 "Once upon" --set temperature=0.5 --stream
  brick generate runs/pairs-001 "a dog" --set width=4 --set best=3 --logprobs
  brick generate runs/text-001 book.txt --draft lookup --set ahead=6 --stats

--set reaches how a token is chosen (temperature: 0 takes the most probable;
top_k, top_p, min_p, typical, repetition, banned, forced, seed, ...), where an
answer ends (max_tokens, texts, ids, ...), beam search (width, best,
length_penalty, ...) and guessing (ahead, ngram): see `brick list sampling`,
`brick list stop`, `... beam`, `... prompt_lookup`."""
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
    shown = p.add_argument_group("what is shown")
    shown.add_argument("--samples", metavar="N", type=int, default=1, help="answers to each item, drawn independently")
    shown.add_argument("--stream", action="store_true", help="text as it is written (by itself on a terminal)")
    shown.add_argument("--logprobs", action="store_true", help="ln p of each answer and of each of its tokens")
    shown.add_argument("--stats", action="store_true", help="counts and times on standard error")
    quick = p.add_argument_group("time and memory")
    quick.add_argument("--engine", choices=("brick", "onnx"), default="brick", help="onnx: see `brick export`")
    quick.add_argument("--compile", action="store_true", help="compile the decode step first: the same tokens, sooner")
    quick.add_argument("--cache", choices=("float", "int8"), default="float", help="int8: a quarter of the bytes")
    quick.add_argument("--no-cache", action="store_true", help="read everything again at every token, to compare")
    quick.add_argument("--draft", metavar="RUN", help="guess tokens by a smaller run, or `lookup`: by the text itself")
    quick.add_argument("--save-prompt", metavar="FILE", help="read the one item, keep what was read, answer nothing")
    quick.add_argument("--prompt", metavar="FILE", help="go on from what was kept; each ITEM is what comes next")
    p.set_defaults(verb=generate)


def generate(args: argparse.Namespace) -> int:
    """Answer every item; 2 when one could not be."""
    from brickformer.cli.ways import chosen
    from brickformer.generate import Stats
    from brickformer.recipes import Trained

    trained = Trained.open(args.run)
    way = chosen(trained, args)
    if args.save_prompt is not None:
        return keep_prompt(way, args.items, args.save_prompt)
    by_itself = trained.writes_text and sys.stdout.isatty() and way.streams and not (args.logprobs or args.prompt)
    live = args.stream or by_itself
    at_once = 1 if live or (not args.items and sys.stdin.isatty()) else CHUNK
    items = [""] if way.prefix is not None and not args.items else args.items
    failed, total = False, Stats()
    for chunk in chunks(read_items(items), at_once):
        asked = [text for where, text in chunk if text.strip() or not where]
        if live:
            results, stats, shown = written(way, asked, prompt=trained.writes_text)
        else:
            generation, shown = way.answers(asked), False
            results, stats = generation.results, generation.stats
        total.add(stats)
        failed |= answer(chunk, results, trained, shown=shown, logprobs=args.logprobs)
    if args.stats:
        engine = "" if way.engine is None else f"; ONNX Runtime, weights in {way.engine.weights}"
        print(f"{total}{engine}" if total.prompt_tokens else "nothing was read, so no time was taken", file=sys.stderr)
    elif args.compile:
        print(f"compiled in {total.compile_s:.1f} s", file=sys.stderr)
    return 2 if failed else 0


def keep_prompt(way: Way, items: Sequence[str], path: str) -> int:
    """Read one item and keep what was read. Errors: BrickError: more or fewer than one, or one that cannot be read."""
    from brickformer.errors import DataError
    from brickformer.generate import read_prompt
    from brickformer.generate.result import readable_bytes

    texts = [text for _, text in read_items(items)] if items else []
    if len(texts) != 1:
        raise DataError(f"--save-prompt: got {len(texts)} items, expected one text to read.")
    prefix = read_prompt(way.writer, texts[0], way.stop.max_tokens)
    prefix.save(Path(path).expanduser())
    print(f"kept {len(prefix.tokens)} tokens, {readable_bytes(prefix.state.nbytes)}, in {path}", file=sys.stderr)
    return 0


def read_items(items: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(where it comes from, text) of every item: "" for the command line, file and line number elsewhere."""
    from brickformer.tasks import read_lines, read_stream

    if not items:
        name = "standard input"
        try:
            lines = read_stream(cast(BufferedReader, sys.stdin.buffer), name)
        except AttributeError:  # text that somebody has put there
            lines = ((number, line.rstrip("\n")) for number, line in enumerate(sys.stdin, 1))
        for number, line in lines:
            yield f"{name}, line {number}", line
    for item in items:
        if is_file(item):
            for number, line in read_lines(item):
                yield f"{item}, line {number}", line
        else:
            if re.fullmatch(r"\S+\.(txt|tsv|csv|json|jsonl|md)|\.{0,2}/\S+", item):
                print(f"brick: {item}: no such file, so it is taken as a text.", file=sys.stderr)
            yield "", item


def is_file(item: str) -> bool:
    """Whether an item names a file, or a pipe such as `<(sort words)`."""
    try:
        return "\n" not in item and Path(item).exists() and not Path(item).is_dir()
    except (OSError, ValueError):  # too long for a name, or a NUL
        return False


def chunks(items: Iterator[tuple[str, str]], size: int) -> Iterator[list[tuple[str, str]]]:
    """Up to `size` items at a time. Errors: what reading them raises, after the items before it."""
    chunk: list[tuple[str, str]] = []
    try:
        for item in items:
            chunk.append(item)
            if len(chunk) == size:
                yield chunk
                chunk = []
    except BrickError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def written(way: Way, asked: Sequence[str], *, prompt: bool) -> tuple[list[Result], Stats, bool]:
    """Show an answer while it is being written; and whether a line was. prompt: show it before its continuation."""
    from brickformer.generate import Stats

    if not asked:
        return [], Stats(), False
    pieces = way.stream(asked[0])
    begun = pieces.result.error is None
    if prompt and begun:
        print(asked[0], end="", flush=True)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:  # an error, or Ctrl-C, has a line of its own
        if begun:
            print(flush=True)
    return [pieces.result], pieces.stats, begun


def answer(
    chunk: Sequence[tuple[str, str]], results: Sequence[Result], trained: Trained, *, shown: bool, logprobs: bool
) -> bool:
    """Print the answers in order; True when one failed. A blank line stays blank, so that line i answers line i.

    shown: they have been printed while they were written. A continuation comes after its prompt.
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
                if where and not shown:
                    print()
            elif not shown:
                print(f"{text}{result.text}" if trained.writes_text else result.text, end="")
                print(f"\t{likely(result.logprobs, result.tokens, trained)}" if logprobs else "")
        number += 1
    return failed


def likely(logprobs: Sequence[float], tokens: Sequence[int], trained: Trained) -> str:
    """ln p of the whole, a tab, and ln p of each token after its text (its number, where it has none)."""
    texts = [trained.target.decode([token]) for token in tokens]
    names = [json.dumps(text, ensure_ascii=False) if text else str(n) for text, n in zip(texts, tokens, strict=True)]
    each = ", ".join(f"{name} {p:.4f}" for name, p in zip(names, logprobs, strict=True))
    return f"{sum(logprobs):.4f}\t{each}"
