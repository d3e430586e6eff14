"""`brick export`: a trained run for other engines."""

from __future__ import annotations

import argparse
from pathlib import Path

ABOUT = """Write a trained run for another engine, and compare what it answers there with what
it answers here: the largest gap of the logits is printed.

onnx: RUN/onnx, graphs for ONNX Runtime with caches as flat inputs and outputs."""
EXAMPLES = """examples:
  brick export runs/reverse-001 --to onnx
  brick export runs/text-001 --to onnx --bits 4
  brick generate runs/text-001 "Once upon" --engine onnx"""


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "export",
        parents=[shared],
        help="a trained run for other engines",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", metavar="RUN", help="a folder that `brick train` or `brick quantize` made")
    p.add_argument("--to", choices=("onnx",), required=True, help="for which engine")
    p.add_argument("--bits", type=int, choices=(8, 4), help="round weights to nearest first; default as they are")
    p.add_argument("--out", metavar="FOLDER", help="where; default RUN/onnx, where `brick generate` looks for it")
    p.set_defaults(verb=export)


def export(args: argparse.Namespace) -> int:
    """Export, and say how near the answers are."""
    from brickformer.quant import Int4, Int8
    from brickformer.recipes.onnx import described, export_run

    scheme = {None: None, 8: Int8(), 4: Int4()}[args.bits]
    out = None if args.out is None else Path(args.out).expanduser()
    folder, gap, _ = export_run(Path(args.run).expanduser(), scheme, out)
    print(f"{folder}: {described(folder)}")
    print(f"checked in ONNX Runtime: {gap}")
    return 0
