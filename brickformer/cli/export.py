"""`brick export`: a run for other libraries and engines; what is printed says how far off it is there."""

from __future__ import annotations

import argparse
from pathlib import Path

ABOUT = """Write a run for another library or engine, and compare what it answers there with
what it answers here: the largest difference of logits is printed.

hf: a folder that the transformers library reads.
gguf: one file for llama.cpp and what is built on it; --dtype says how matrices are kept.
onnx: a folder of graphs for ONNX Runtime, with caches as flat inputs and outputs."""
EXAMPLES = """examples:
  brick export runs/text-001 --to hf my-model
  brick export runs/text-001 --to gguf my-model.gguf --dtype q8_0
  brick export runs/text-001 --to onnx --bits 4
  brick generate runs/text-001 "Once upon" --engine onnx"""


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "export",
        parents=[shared],
        help="a run for other libraries and engines",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", metavar="RUN", help="a folder that `brick train`, `import` or `quantize` made")
    p.add_argument("--to", choices=("hf", "gguf", "onnx"), required=True, help="for which library or engine")
    p.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        help="what to write; it must not be there yet. onnx: default RUN/onnx, where `brick generate` looks for it",
    )
    p.add_argument("--family", metavar="NAME", help="hf: this one of `brick list --families`, or none")
    p.add_argument("--dtype", choices=("f32", "f16", "q8_0", "q4_0"), help="gguf: of matrices (default: f16)")
    p.add_argument("--no-tokenizer", action="store_true", help="gguf: leave the vocabulary out")
    p.add_argument("--bits", type=int, choices=(8, 4), help="onnx: round weights to nearest first")
    p.set_defaults(verb=export)


def export(args: argparse.Namespace) -> int:
    """Write, compare, say how far off it is. Errors: RunError: an option of another format, no target."""
    from brickformer.errors import RunError

    for option, given, only in (
        ("--family", args.family is not None, "hf"),
        ("--dtype", args.dtype is not None, "gguf"),
        ("--no-tokenizer", args.no_tokenizer, "gguf"),
        ("--bits", args.bits is not None, "onnx"),
    ):
        if given and args.to != only:
            raise RunError(f"{option}: goes with --to {only}, got --to {args.to}. Leave it out.")
    match args.to:
        case "onnx":
            return _to_onnx(args)
        case _ if args.target is None:
            raise RunError(f"--to {args.to}: got no TARGET. Say what to write: brick export RUN --to {args.to} TARGET.")
        case "hf":
            return _to_hf(args)
        case _:
            return _to_gguf(args)


def _to_hf(args: argparse.Namespace) -> int:
    import torch

    from brickformer.recipes import Trained
    from brickformer.recipes.published import save

    saved = save(Trained.open(args.run, device=torch.device("cpu")), args.target, family=args.family)
    print(f"{saved.path}: {saved.family.model_type}; {saved.check}")
    return 0


def _to_gguf(args: argparse.Namespace) -> int:
    import torch

    from brickformer.recipes import Trained
    from brickformer.recipes.gguf import export_gguf

    trained = Trained.open(args.run, device=torch.device("cpu"))
    target = Path(args.target).expanduser()
    made = export_gguf(trained, target, args.dtype or "f16", tokenizer=not args.no_tokenizer)
    print(f"{target}: {made}")
    return 0


def _to_onnx(args: argparse.Namespace) -> int:
    from brickformer.quant import Int4, Int8
    from brickformer.recipes.onnx import described, export_run

    scheme = {None: None, 8: Int8(), 4: Int4()}[args.bits]
    out = None if args.target is None else Path(args.target).expanduser()
    folder, gap, _ = export_run(Path(args.run).expanduser(), scheme, out)
    print(f"{folder}: {described(folder)}")
    print(f"checked in ONNX Runtime: {gap}")
    return 0
