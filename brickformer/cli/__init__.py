"""The command line: `brick VERB ...`. One file a verb; torch is imported inside the functions that need it.

What a user caused is one or two lines on standard error and exit code 2; Ctrl-C is 130.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from brickformer.cli.check import add as add_check
from brickformer.cli.doctor import add as add_doctor
from brickformer.cli.explain import add as add_explain
from brickformer.cli.export import add as add_export
from brickformer.cli.generate import add as add_generate
from brickformer.cli.hf import add_import
from brickformer.cli.list import add as add_list
from brickformer.cli.look import add as add_look
from brickformer.cli.quantize import add as add_quantize
from brickformer.cli.score import add as add_score
from brickformer.cli.show import add as add_show
from brickformer.cli.train import add as add_train
from brickformer.cli.trap import add as add_trap
from brickformer.errors import BrickError

ABOUT = "Assemble a Transformer from bricks, train it, use it."
EPILOG = """start here:
  brick train reverse               learn to say digits backwards, in a minute
  brick generate runs/reverse-001 "7 1 4"

Every verb has its own help: brick train --help"""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    shared = argparse.ArgumentParser(add_help=False)
    group = shared.add_argument_group("always")
    group.add_argument("--use", metavar="FILE.py", action="append", default=[], help="import bricks of your own")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    out = argparse.ArgumentParser(
        prog="brick", description=ABOUT, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--version", action="version", version=f"brickformer {version()}")
    verbs = out.add_subparsers(title="verbs", metavar="VERB", required=True)
    for add in (
        add_train,
        add_generate,
        add_score,
        add_look,
        add_quantize,
        add_import,
        add_export,
        add_check,
        add_explain,
        add_doctor,
        add_trap,
        add_show,
        add_list,
    ):
        add(verbs, shared)
    return out


def version() -> str:
    """Of the installed package."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("brickformer")
    except PackageNotFoundError:  # a checkout that is not installed
        return "(not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    open_streams()
    known = parser()
    args, rest = known.parse_known_args(argv)
    if rest and (any(word.startswith("-") for word in rest) or "items" not in args):
        known.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes no items after an option that comes after the first of them
        args.items += rest
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without │ shows ? and goes on
    try:
        if args.use:
            from brickformer.cli.find import use

            use(args.use)
        code: int = args.verb(args)
        sys.stdout.flush()
        return code
    except BrickError as e:
        if args.debug:
            raise
        print(f"brick: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("brick: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `brick list | head`: nobody reads on
        discard_output()
        return 0
    except OSError as e:  # of the system itself, where no brick knows more: standard output on a full disk, ...
        if args.debug:
            raise
        print(f"brick: {e.filename or 'input or output'}: {e.strerror or e}.", file=sys.stderr)
        discard_output()
        return 2


def open_streams() -> None:
    """Streams that the caller has closed (`>&-`) lead nowhere, and no file that is opened later takes their place."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115  (for as long as we run)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  (for as long as we run)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  (for as long as we run)


def discard_output() -> None:
    """What is still to be written to standard output goes nowhere: Python writes it when it ends."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: not a stream of the system
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
