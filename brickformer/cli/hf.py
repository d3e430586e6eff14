"""`brick import`: published checkpoints in; `brick export` (export.py) is the way out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brickformer.tasks import Imported

ABOUT_IMPORT = """Read a published checkpoint (a folder with config.json, weights and tokenizer)
into a run folder, which every other verb takes. Nothing in it is run."""
EXAMPLES_IMPORT = """examples:
  brick import tinystories-656k
  brick import HuggingFaceTB/SmolLM2-135M      a name on the hub, with huggingface_hub"""


def add_import(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "import",
        parents=[shared],
        help="a published checkpoint becomes a run",
        description=ABOUT_IMPORT,
        epilog=EXAMPLES_IMPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("source", metavar="DIR", help="a folder, or a name on the hub")
    p.add_argument("--name", metavar="NAME", help="of the run folder (default: that of DIR)")
    p.add_argument("--out", metavar="DIR", default="runs", help="where the run folder goes (default: runs)")
    p.set_defaults(verb=import_)


def import_(args: argparse.Namespace) -> int:
    """Read, keep, say what it is."""
    from brickformer.cli.text import command
    from brickformer.models import EncoderModel
    from brickformer.recipes.published import imported, load
    from brickformer.tasks import Imported
    from brickformer.train import RunFolder

    RunFolder.check(Path(args.out), args.name or "imported")
    trained = load(args.source)
    folder = imported(trained, Path(args.out), args.name)
    count = sum(p.numel() for p in trained.model.parameters())
    print(f"{folder.path}: {trained.run.model.kind}, {count:,} parameters, {trained.target.vocab:,} tokens")
    match trained.model:
        case EncoderModel():
            print(f"use it:  {command(args, f'show {folder.path}')}")
        case _:
            print("use it:  " + command(args, f'generate {folder.path} "TEXT"'))
            if isinstance(task := trained.run.task, Imported):
                say(task)
    return 0


def say(task: Imported) -> None:
    """What the folder asks of generation and is not done by itself."""
    if task.said:
        print("as its configuration asks, with:  " + " ".join(f"--set {setting}" for setting in task.said))
    if task.undone:
        print(f"not done, though it asks for it:  {', '.join(task.undone)}")
