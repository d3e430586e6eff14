"""`brick show`: the assembled model, brick by brick, and what it costs."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brickformer.look.tree import Node
    from brickformer.models import AnyModel, ModelSpec

ABOUT = """Every brick of a model: shape, parameters, floating-point operations (FLOPs)
and cache (KV) bytes of one token.

SPEC_OR_RUN is a run folder, a JSON or YAML file, or a preset
(`brick list presets`): vaswani, vaswani_small, gpt2, llama, bert."""
EXAMPLES = """examples:
  brick show llama
  brick show gpt2 --set depth=2 --set layers.*.mixer.mask.window=128
  brick show runs/reverse-001
  brick show vaswani --svg vaswani.svg"""


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "show",
        parents=[shared],
        help="the assembled model: every brick, shapes, parameters, operations, cache bytes",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_spec(p)
    p.add_argument("--svg", metavar="FILE.svg", help="draw it too: shapes on the arrows, layers that are alike folded")
    p.set_defaults(verb=show)


def add_spec(p: argparse.ArgumentParser) -> None:
    """Which spec, what is changed in it, and how much context its costs are counted for."""
    p.add_argument("what", metavar="SPEC_OR_RUN")
    p.add_argument("--set", metavar="PATH=VALUE", action="append", default=[], dest="settings", help="change the spec")
    p.add_argument(
        "--context", metavar="N", type=int, help="tokens a token looks back on (default 1024, or all it can)"
    )


def show(args: argparse.Namespace) -> int:
    """Print the table and the totals."""
    from brickformer.cli.find import model_spec
    from brickformer.cli.settings import parsed
    from brickformer.cli.text import labelled, screen
    from brickformer.errors import SpecError
    from brickformer.look.tree import table, tree
    from brickformer.shapes import shapes_of

    if args.svg is not None and not args.svg.endswith(".svg"):
        raise SpecError(f"--svg {args.svg}: expected a name that ends in .svg")
    spec = model_spec(args.what, parsed(args.settings))
    context = context_of(spec, args.context)
    model = shapes_of(spec)
    width = screen()
    for line in table(without_mixed_total(tree(model, context, width_of(spec), spec.kind)), width):
        print(line)
    print()
    for name, line in totals(model, context, width_of(spec)).items():
        print(labelled(name, line, 12))
    print(labelled("spec", repr(spec), 12))
    if args.svg is not None:
        draw(model, args.what, args.svg)
    return 0


def draw(model: AnyModel, title: str, path: str) -> None:
    """Write the drawing. Errors: RunError: disk."""
    from pathlib import Path

    from brickformer.cli.text import labelled
    from brickformer.files import write_whole
    from brickformer.look.diagram import diagram

    write_whole(Path(path).expanduser(), diagram(model, title).encode())
    print(labelled("drawn", path, 12))


def without_mixed_total(root: Node) -> Node:
    """Tokens that are read and tokens that are written are not added up."""
    from brickformer.look.costs import Cost

    return replace(root, cost=Cost()) if root.name == "encoder_decoder" else root


def context_of(spec: ModelSpec, asked: int | None) -> int:
    """The tokens to look back on: those asked for, else 1024, or as many as there are positions.

    Errors: SpecError for none, or for more than the model knows.
    """
    from brickformer.errors import SpecError
    from brickformer.ranges import LARGEST

    most = min([LARGEST, *table_lengths(spec)])
    if asked is not None and not 1 <= asked <= most:
        why = f"as many positions as the model knows, {most:,}" if asked > most else "at least 1"
        raise SpecError(f"--context: got {asked}, expected {'at most ' if asked > most else ''}{why}.")
    return asked or min(1024, most)


def table_lengths(spec: ModelSpec) -> list[int]:
    """How long each table of positions is."""
    from brickformer.models import Decoder, Encoder, EncoderDecoder

    match spec:
        case EncoderDecoder():
            embeds = [spec.encoder.embed, spec.decoder.embed]
        case Decoder() | Encoder():
            embeds = [spec.embed]
        case _:
            embeds = []
    limits = [embed.position.limit() for embed in embeds if embed.position is not None]
    return [limit for limit in limits if limit is not None]


def width_of(spec: ModelSpec) -> int:
    """D."""
    from brickformer.errors import SpecError
    from brickformer.models import Decoder, Encoder, EncoderDecoder

    match spec:
        case EncoderDecoder():
            return spec.decoder.dim
        case Decoder() | Encoder():
            return spec.dim
        case _:
            raise SpecError(f"show: cannot tell the width of a {spec.kind!r}.")


def totals(model: AnyModel, context: int, dim: int) -> dict[str, str]:
    """The last lines: name, sentence."""
    from brickformer.look.amounts import amount, bytes_
    from brickformer.look.costs import cost
    from brickformer.models import EncoderDecoderModel, EncoderModel

    parameters = list(model.parameters())
    count, size = sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters)
    kind = str(parameters[0].dtype).removeprefix("torch.")
    out = {"parameters": f"{count:,} ({bytes_(size)} in {kind})"}
    rules = f"matrix products and attention over {context:,} tokens, 2 a multiply-add"
    match model:
        case EncoderDecoderModel():
            read, write = cost(model.encoder, context, dim), cost(model.decoder, context, dim)
            out["FLOPs"] = (
                f"{amount(read.flops)} to read a source token, {amount(write.source_flops)} more to keep it for the "
                f"decoder, {amount(write.flops)} to write a target token ({rules})"
            )
        case EncoderModel():
            out["FLOPs"] = f"{amount(cost(model, context, dim).flops)} a token ({rules})"
            return out
        case _:
            write = cost(model, context, dim)
            out["FLOPs"] = f"{amount(write.flops)} a token ({rules})"
    kept = model.init_state(1, context).nbytes
    held = kept + write.source_kv_bytes * context
    source = f", {write.source_kv_bytes:,} a source token" if write.source_kv_bytes else ""
    until = " until a window is full" if kept < write.kv_bytes * context else ""
    out["KV cache"] = f"{write.kv_bytes:,} bytes a token{until}{source}; {bytes_(held)} for {context:,} tokens"
    return out
