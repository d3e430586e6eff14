"""`brick explain`: whether a spec is valid, what it costs, which kernels it takes, what it cannot be combined with."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from brickformer.cli.show import add_spec

if TYPE_CHECKING:
    from brickformer.models import ModelSpec

ABOUT = """Say of a spec whether it is valid, and why not; its parameters, floating-point
operations and state bytes of one token; which attention kernel each layer takes
on a CPU, in training, with padding and in decoding, and why not the fused one;
and what it cannot be combined with.

SPEC_OR_RUN is a run folder, a JSON or YAML file, or a preset
(`brick list presets`)."""
EXAMPLES = """examples:
  brick explain llama
  brick explain gpt2 --set layers.*.mixer.softcap=30
  brick explain my_model.json --use my_bricks.py"""


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "explain",
        parents=[shared],
        help="valid or not, costs, kernels, and what it cannot be combined with",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_spec(p)
    p.set_defaults(verb=explain)


def explain(args: argparse.Namespace) -> int:
    """Print it. Errors: SpecError, which says that the spec is invalid and why."""
    from brickformer.cli.find import model_spec
    from brickformer.cli.settings import parsed
    from brickformer.cli.show import context_of, totals, width_of
    from brickformer.cli.text import labelled
    from brickformer.cli.train import model_line
    from brickformer.errors import SpecError
    from brickformer.presets import PRESETS
    from brickformer.shapes import shapes_of

    try:
        spec = model_spec(args.what, parsed(args.settings))
        model = shapes_of(spec)
    except SpecError as e:
        if args.what in PRESETS or Path(args.what).expanduser().exists():
            raise SpecError(f"invalid: {e}") from None
        raise
    context = context_of(spec, args.context)
    print(labelled("valid", model_line(spec), 12))
    for name, line in totals(model, context, width_of(spec)).items():
        print(labelled("state" if name == "KV cache" else name, line, 12))
    for line in coded(args.what):
        print(line)
    for title, lines in (("kernels, on a CPU", kernels(spec)), ("cannot be combined with", limits(spec))):
        print(f"\n{title}")
        for line in lines:
            print(line)
    return 0


def coded(what: str) -> Iterator[str]:
    """Of a run that is quantized: its kinds of matrices, how many, and the product that a decode step takes."""
    from collections import Counter

    from brickformer.files import read_json
    from brickformer.quant import QuantLinear
    from brickformer.recipes import Trained
    from brickformer.recipes.weighted import is_quantized
    from brickformer.surgery import places
    from brickformer.train import RunFolder

    path = Path(what).expanduser()
    if not path.is_dir() or not is_quantized(RunFolder.open(path)):
        return
    modules = [p.module for p in places(Trained.open(path).model, QuantLinear)]
    counts = Counter((repr(m.scheme), m.explain()) for m in modules if isinstance(m, QuantLinear))
    receipt = path / "receipt.json"
    method = read_json(receipt).get("method") if receipt.is_file() else None
    yield f"\nquantized: {method}" if method else "\nquantized"
    for (scheme, product), count in counts.items():
        yield f"  {count} × {scheme}: a decode step by {product}; many rows exact"


def kernels(spec: ModelSpec) -> Iterator[str]:
    """Each attention, and what it takes in each case."""
    from brickformer.cli.text import labelled
    from brickformer.kernels import SHORT_CAUSAL
    from brickformer.proof import kernels_of, twin_of

    used = kernels_of(twin_of(spec))
    if not used:
        yield "  none: no brick attends"
    for one in used:
        others = one.alike - 1
        yield f"  {one.where}" + (f" (and in {others} layer{'s' if others > 1 else ''} like it)" if others else "")
        for case, kernel in one.kernels.items():
            yield labelled(f"    {case}", kernel, 14)
    yield f"  (a CPU learns up to {SHORT_CAUSAL} causal tokens by plain products: quicker)"


def limits(spec: ModelSpec) -> Iterator[str]:
    """What is refused, and why."""
    from brickformer.cli.text import labelled
    from brickformer.proof import limits_of, twin_of

    found = limits_of(twin_of(spec))
    if not found:
        yield "  nothing that was tried is refused"
    for line in found:
        yield labelled("  -", line, 4)
