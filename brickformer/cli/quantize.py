"""`brick quantize`: the weights of a trained run in 8 or 4 bits."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brickformer.quant import Scheme

ABOUT = """Write the weights of a trained run in 8 or 4 bits, as a run of its own beside it, with
a receipt: the error of each matrix, loss and exact match (or bits a byte) on
held-out data, sizes and milliseconds a token, before and after; receipt.json and
receipt.png hold the same."""
EXAMPLES = """examples:
  brick quantize runs/reverse-001 --bits 8
  brick quantize runs/text-001 --bits 4 --calibrate 32
  brick quantize runs/text-001 --bits 4 --kind nf4 --calibrate 32 --head int8
  brick quantize runs/text-001 --bits 4 --calibrate 32 --keep worst:3
  brick quantize runs/text-001 --bits 4 --calibrate 64 --tune 200
  brick quantize runs/imported-001 --bits 4 --data book.txt --calibrate 32

--set reaches what a kind has: see `brick list int4` (group, symmetric), `... nf4`."""
KINDS = {8: ("int8",), 4: ("int4", "nf4")}


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "quantize",
        parents=[shared],
        help="the weights of a trained run in 8 or 4 bits",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", metavar="RUN", help="a folder that `brick train` made")
    p.add_argument("--bits", type=int, choices=(8, 4), required=True, help="of a weight")
    p.add_argument("--kind", choices=("int8", "int4", "nf4"), help="how 4 bits are used; default int4")
    p.add_argument("--group", metavar="N", type=int, help="weights that share a scale; default 32, for nf4 64")
    p.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], dest="settings", help="of the kind")
    p.add_argument("--calibrate", metavar="N", type=int, default=0, help="round by N batches of the run's data")
    p.add_argument("--data", metavar="FILE", help="a text to round by and measure on, in place of the run's own data")
    p.add_argument("--method", choices=("gptq", "awq"), help="how to round by data; default gptq")
    p.add_argument("--tune", metavar="STEPS", type=int, default=0, help="then learn rounding and scales on them")
    p.add_argument(
        "--keep", metavar="NAME", action="append", default=[], help="stays as it is; worst:N: the N worst matrices"
    )
    p.add_argument("--head", choices=("same", "int8", "keep"), default="same", help="the map to logits")
    p.add_argument("--table", action="store_true", help="token tables too")
    p.add_argument(
        "--out", metavar="FOLDER", help="folder in which the new run gets its own; default: beside the old one"
    )
    p.set_defaults(verb=quantize)


def quantize(args: argparse.Namespace) -> int:
    """Quantize, and print the receipt."""
    from brickformer.cli.text import command
    from brickformer.errors import SpecError
    from brickformer.recipes.quantized import Plan, quantize_run

    if args.calibrate < 0:
        raise SpecError(f"--calibrate: got {args.calibrate}, expected 0 batches or more.")
    if args.tune < 0 or (args.tune and not args.calibrate):
        raise SpecError(f"--tune: got {args.tune} steps, expected some, and data to learn from: --calibrate N.")
    if args.method and not args.calibrate:
        raise SpecError(
            f"--method {args.method}: rounds by data, and there is none: add --calibrate N, or leave it out."
        )
    scheme = chosen(args)
    keep, worst = [], 0
    for name in args.keep:
        found = re.fullmatch(r"worst:([1-9]\d*)", name)
        if not found and name.startswith("worst"):
            raise SpecError(f"--keep {name}: expected a name, or worst:N with a number of matrices: --keep worst:3.")
        keep += [] if found else [name]
        worst += int(found[1]) if found else 0
    plan = Plan(
        scheme, args.calibrate, args.method or "gptq", tuple(keep), worst, args.head, args.table, args.tune, args.data
    )
    root = None if args.out is None else Path(args.out).expanduser()

    what = "matrices and steps" if args.tune else "matrices"

    def progress(done: int, whole: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {whole} {what}", end="\n" if done == whole else "", file=sys.stderr, flush=True)

    folder, receipt = quantize_run(Path(args.run).expanduser(), plan, root=root, progress=progress)
    print(receipt.table())
    print(f"\nsaved in {folder.path}: weights, spec, receipt.txt, receipt.json, receipt.png")
    use = "show {}" if "ms a token" not in receipt.after else 'generate {} "TEXT"'  # an encoder writes nothing
    print(f"use it:  {command(args, use.format(folder.path))}")
    return 0


def chosen(args: argparse.Namespace) -> Scheme:
    """The scheme that was asked for. Errors: SpecError: a kind of other bits, a setting it has not."""
    from brickformer.cli.settings import changed, parsed
    from brickformer.errors import SpecError
    from brickformer.quant import NF4, Int4, Int8

    kind = args.kind or KINDS[args.bits][0]
    if kind not in KINDS[args.bits]:
        raise SpecError(f"--kind {kind}: has not {args.bits} bits. Use {' or '.join(KINDS[args.bits])}.")
    settings = parsed(args.settings)
    if args.group is not None and kind == "int8":
        raise SpecError("--group: int8 has one scale for each output channel. Leave --group out, or use --bits 4.")
    scheme: Scheme = {"int8": Int8, "int4": Int4, "nf4": NF4}[kind]()
    try:
        scheme = scheme if args.group is None else scheme.but(group=args.group)
    except SpecError as e:
        raise SpecError(f"--{e}") from None
    return changed(scheme, settings)
