"""Words and numbers for a terminal."""

from __future__ import annotations

import argparse
import shlex
import shutil
import textwrap


def duration(seconds: float) -> str:
    """A time a person can read: ``0.8 s``, ``42 s``, ``3 min 05 s``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def command(args: argparse.Namespace, words: str) -> str:
    """What to type next, in the shell: with the files of --use that this call had, without which it would not work."""
    return " ".join(["brick", words, *(f"--use {shlex.quote(name)}" for name in args.use)])


def screen() -> int:
    """Columns to write in: those of the terminal, but no line longer than one can read."""
    return max(40, min(shutil.get_terminal_size().columns, 110))


def labelled(name: str, text: str, indent: int) -> str:
    """A name in the left column, a text in the right one, wrapped."""
    return textwrap.fill(
        text, screen(), initial_indent=f"{name:<{indent}}", subsequent_indent=" " * indent, break_on_hyphens=False
    )
