"""`brick import` and `brick export`: published checkpoints in, and out."""

from __future__ import annotations

import argparse
from pathlib import Path

ABOUT_IMPORT = """Read a published checkpoint (a folder with config.json, weights and tokenizer)
into a run folder, which every other verb takes. Nothing in it is run."""
ABOUT_EXPORT = """Write a run as a folder that the transformers library reads. It is read back and
compared before it is kept: the largest difference of logits is printed."""
EXAMPLES_IMPORT = """examples:
  brick import tinystories-656k
  brick import HuggingFaceTB/SmolLM2-135M      a name on the hub, with huggingface_hub"""
EXAMPLES_EXPORT = """examples:
  brick export runs/text-001 --to hf my-model"""


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


def add_export(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "export",
        parents=[shared],
        help="a run becomes a published checkpoint",
        description=ABOUT_EXPORT,
        epilog=EXAMPLES_EXPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", metavar="RUN", help="a folder that `brick train` or `brick import` made")
    p.add_argument("--to", metavar="FORMAT", choices=("hf",), required=True, help="hf: a folder for transformers")
    p.add_argument("target", metavar="DIR", help="what to write; it must not be there yet")
    p.add_argument("--family", metavar="NAME", help="this one of `brick list --families`, or none")
    p.set_defaults(verb=export)


def import_(args: argparse.Namespace) -> int:
    """Read, keep, say what it is."""
    from brickformer.recipes.published import imported, load

    trained = load(args.source)
    folder = imported(trained, Path(args.out), args.name)
    count = sum(p.numel() for p in trained.model.parameters())
    print(f"{folder.path}: {trained.run.model.kind}, {count:,} parameters, {trained.target!r}")
    return 0


def export(args: argparse.Namespace) -> int:
    """Write, compare, say how far off it is."""
    import torch

    from brickformer.recipes import Trained
    from brickformer.recipes.published import save

    trained = Trained.open(args.run, device=torch.device("cpu"))
    saved = save(trained, args.target, family=args.family)
    print(f"{saved.path}: {saved.family.model_type}; {saved.check}")
    return 0
