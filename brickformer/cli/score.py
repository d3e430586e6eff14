"""`brick score`: how probable texts are to a trained run."""

from __future__ import annotations

import argparse
import sys

from brickformer.cli.generate import CHUNK, chunks, likely, read_items

ABOUT = """How probable each item is to a trained run: ln p, perplexity, ln p of each token.

ITEM is a text, or a file with one item a line; without any, items are read from
standard input. A language model scores a text from its second token on; a run
that answers needs SOURCE TAB TARGET and scores the target with its end. A line an
item: its text, ln p of the whole, perplexity, ln p of each token, with tabs
between them; on a terminal a line above says so. An item that cannot be scored is
named on standard error, the others go on, and the exit code is 2."""
COLUMNS = ("ln p", "perplexity", "ln p of each token")
EXAMPLES = """examples:
  brick score runs/text-001 "Once upon a time"
  brick score runs/pairs-001 pairs.tsv > scores.tsv"""


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "score",
        parents=[shared],
        help="how probable texts are to a trained run",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", metavar="RUN", help="a folder that `brick train` made")
    p.add_argument("items", metavar="ITEM", nargs="*", help="a text, or a file with one item a line")
    p.set_defaults(verb=score)


def score(args: argparse.Namespace) -> int:
    """Score every item; 2 when one could not be."""
    from brickformer.look.amounts import cut
    from brickformer.recipes import Trained

    trained = Trained.open(args.run)
    failed, head = False, sys.stdout.isatty()
    for chunk in chunks(read_items(args.items), CHUNK):
        asked = [(where, text) for where, text in chunk if text.strip() or not where]
        for (where, text), result in zip(asked, trained.score([text for _, text in asked]), strict=True):
            if result.error is not None:
                failed = True
                sys.stdout.flush()
                about = str(result.error).removeprefix("text, ")
                print(f"brick: {where or repr(cut(text, 30))}, {about}", file=sys.stderr)
            else:
                if head:
                    print("\t".join(("item" if trained.writes_text else "source\ttarget", *COLUMNS)))
                    head = False
                whole, each = likely(result.logprobs, result.tokens, trained).split("\t", 1)
                print(f"{text}\t{whole}\t{result.perplexity:.4f}\t{each}")
    return 2 if failed else 0
