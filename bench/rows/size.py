"""Rows about sizes: the feed-forward's share, mixtures of experts."""

from __future__ import annotations

from functools import partial

import torch
from common import median, table, take_turns

from brickformer import MLP, vaswani
from brickformer.look.costs import cost
from brickformer.moe import MoE, Router
from brickformer.shapes import shapes_of
from rows.row import Row


def ffn() -> Row:
    """Parameters of the feed-forward."""
    model = shapes_of(vaswani(vocab=37_000, shared=True))
    size = lambda m: sum(p.numel() for p in m.parameters())  # noqa: E731
    layer = model.encoder.stack.layers[0]  # type: ignore[union-attr]
    one, six, whole = size(layer.ffn), 6 * size(layer.ffn), size(layer)
    parts = {
        "feed-forward": sum(size(m.ffn) for side in (model.encoder, model.decoder) for m in side.stack.layers),
        "attention": sum(size(m.mixer) for side in (model.encoder, model.decoder) for m in side.stack.layers)
        + sum(size(m.cross) for m in model.decoder.stack.layers),
        "embedding": size(model.encoder.embed),
    }
    total = size(model)
    return Row(
        "What the feed-forward weighs",
        "at 512 and 2048 nearly 2 M a layer, 12 M for six: the feed-forward eats the parameters",
        f"{one:,} a layer and {six:,} for six ({one / whole:.0%} of an encoder layer); of the whole base model, "
        f"{total:,}, the feed-forwards are {parts['feed-forward'] / total:.0%}",
        "agrees",
        "Counted in the model of the paper: 6 + 6 layers, one table of 37,000 tokens. `brick show vaswani` counts any other.",
        "",
        table(("part", "parameters", "share"), [(n, f"{v:,}", f"{v / total:.0%}") for n, v in parts.items()]),
    )


def moe() -> Row:
    """Twice the parameters at the same work."""
    torch.manual_seed(0)
    dense = MLP(1024).build(256).eval()
    sparse = MoE(4, MLP(512), Router(top_k=2)).build(256).eval()
    size = {n: sum(p.numel() for p in m.parameters()) for n, m in (("dense", dense), ("moe", sparse))}
    work = {n: cost(m, 1024, 256).flops for n, m in (("dense", dense), ("moe", sparse))}
    rows, ratios = [], []
    for n in (1, 256, 4096):
        x = torch.randn(1, n, 256)

        def run(m: torch.nn.Module, x: torch.Tensor) -> None:
            with torch.inference_mode():
                m(x)

        t = take_turns({"dense": partial(run, dense, x), "moe": partial(run, sparse, x)}, 15, warm=3)
        d, s = (1e3 * median(v) for v in t.values())
        ratios.append(s / d)
        rows.append((n, f"{d:.2f}", f"{s:.2f}", f"{s / d:.1f} ×"))
    return Row(
        "A mixture of experts",
        "two experts are active; twice the parameters at nearly the same work",
        f"{size['moe'] / size['dense']:.2f} × the parameters, {work['moe'] / work['dense']:.2f} × the operations a token; in "
        f"time {ratios[-1]:.1f} × for 4096 tokens at once and {ratios[0]:.1f} × for one",
        "agrees" if work["moe"] < 1.1 * work["dense"] else "in part",
        "A feed-forward of 256 → 1024 beside four experts of 256 → 512, two a token, on a CPU. More: "
        "[moe](../bench/results/moe.md).",
        "What is counted is the products. The time has more in it: the router, sorting tokens by expert, products in smaller "
        "pieces.",
        table(("tokens at once", "dense, ms", "experts, ms", "times"), rows),
    )
