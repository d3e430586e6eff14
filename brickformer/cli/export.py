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

FORMATS = ("hf", "gguf", "onnx")


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
    p.add_argument("run", metavar="RUN", help="a folder that `brick train`, `import` or (onnx) `quantize` made")
    p.add_argument(
        "--to",
        nargs="+",
        required=True,
        metavar=("FORMAT", "TARGET"),
        help="hf, gguf or onnx, and what to write, which must not be there yet; onnx writes RUN/onnx by default, "
        "where `brick generate` looks for it",
    )
    p.add_argument("--family", metavar="NAME", help="hf: this one of `brick list --families`, or none")
    p.add_argument("--dtype", choices=("f32", "f16", "q8_0", "q4_0"), help="gguf: of matrices (default: f16)")
    p.add_argument("--no-tokenizer", action="store_true", help="gguf: leave the vocabulary out")
    p.add_argument("--bits", type=int, choices=(8, 4), help="onnx: round weights to nearest first")
    p.set_defaults(verb=export)


def export(args: argparse.Namespace) -> int:
    """Write, compare, say how far off it is. Errors: RunError: an option of another format, no target."""
    from brickformer.errors import RunError, nearest

    form, target = args.to[0], args.to[1] if len(args.to) > 1 else None
    if form not in FORMATS:
        raise RunError(f"--to {form}: no such format; {nearest(form, FORMATS)}")
    if len(args.to) > 2:
        raise RunError(f"--to {' '.join(args.to)}: got {len(args.to)} words, expected a format and one target.")
    for option, given, only in (
        ("--family", args.family is not None, "hf"),
        ("--dtype", args.dtype is not None, "gguf"),
        ("--no-tokenizer", args.no_tokenizer, "gguf"),
        ("--bits", args.bits is not None, "onnx"),
    ):
        if given and form != only:
            raise RunError(f"{option}: goes with --to {only}, got --to {form}. Leave it out.")
    if form == "onnx":
        return _to_onnx(args, target)
    if target is None:
        raise RunError(f"--to {form}: got no target. Say what to write: brick export RUN --to {form} TARGET.")
    return _to_hf(args, target) if form == "hf" else _to_gguf(args, target)


def _to_hf(args: argparse.Namespace, target: str) -> int:
    import torch

    from brickformer.recipes import Trained
    from brickformer.recipes.published import save

    _plain(args.run)
    saved = save(Trained.open(args.run, device=torch.device("cpu")), target, family=args.family)
    print(f"{saved.path}: {saved.family.model_type}; {saved.check}")
    return 0


def _to_gguf(args: argparse.Namespace, target: str) -> int:
    import torch

    from brickformer.recipes import Trained
    from brickformer.recipes.gguf import export_gguf

    _plain(args.run)
    trained = Trained.open(args.run, device=torch.device("cpu"))
    path = Path(target).expanduser()
    made = export_gguf(trained, path, args.dtype or "f16", tokenizer=not args.no_tokenizer)
    print(f"{path}: {made}")
    return 0


def _plain(run: str) -> None:
    """Errors: RunError where the weights of a run are coded: the other formats have codes of their own."""
    from brickformer.errors import RunError
    from brickformer.recipes.weighted import is_quantized
    from brickformer.train import RunFolder

    if is_quantized(RunFolder.open(Path(run).expanduser())):
        raise RunError(f"{run}: is quantized. Export the run that it was made from; gguf: --dtype q8_0 or q4_0.")


def _to_onnx(args: argparse.Namespace, target: str | None) -> int:
    from brickformer.quant import Int4, Int8
    from brickformer.recipes.onnx import described, export_run

    scheme = {None: None, 8: Int8(), 4: Int4()}[args.bits]
    out = None if target is None else Path(target).expanduser()
    folder, gap = export_run(Path(args.run).expanduser(), scheme, out)
    print(f"{folder}: {described(folder)}")
    print(f"checked in ONNX Runtime: {gap}")
    return 0
