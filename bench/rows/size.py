"""Rows about sizes: the feed-forward's share, mixtures of experts, weights in 8 and 4 bits."""

from __future__ import annotations

import copy
from functools import partial

import torch
from common import figure, median, table, take_turns

from brickformer import MLP, Attention, Decoder, DecoderModel, Layer, Rope, pattern, vaswani
from brickformer.look.costs import cost
from brickformer.moe import MoE, Router
from brickformer.quant import NF4, Calibration, Int4, Int8, quantize
from brickformer.recipes.run import forward
from brickformer.shapes import shapes_of
from brickformer.train import mean_loss
from rows.row import BLUE, GREY, RED, Row, keep, learn, text


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


def bits() -> Row:
    """Weights in 8 and 4 bits: bytes and time of a model of the article's width, loss of one that learnt something."""
    schemes = {"8 bits": Int8(), "4 bits": Int4(), "4 bits, by data": Int4(), "4 bits, NF4": NF4()}
    learnt, wide = language_model(128, 2), language_model(512, 6)
    learn(learnt, 300)
    learnt.eval()
    before = mean_loss(learnt, text().validation(64), forward)
    batches = [text().batch(10_000 + i, 16) for i in range(8)]  # not those of the training
    readings = [partial(forward, batch=b) for b in batches]
    models, losses, share = {"float32": wide}, {"float32": before}, {}
    for name, scheme in schemes.items():
        coded = copy.deepcopy(learnt)
        quantize(coded, scheme, Calibration(readings) if "data" in name else None)
        losses[name] = mean_loss(coded, text().validation(64), forward)
        models[name] = copy.deepcopy(wide)
        sizes = quantize(models[name], scheme)
        share[name] = sum(m.after for m in sizes) / sum(m.before for m in sizes)
    del models["4 bits, by data"]  # the same bytes and the same product as without data
    ids = torch.randint(wide.spec.vocab, (1, 64))
    jobs = {name: partial(one_token, m, ids, m.init_state(1, 64)) for name, m in models.items()}
    ms = {name: 1e3 * median(t) for name, t in take_turns(jobs, 15, warm=3).items()}
    ms["4 bits, by data"] = ms["4 bits"]
    rows = [
        (
            n,
            f"{share.get(n, 1.0):.3f}",
            f"{ms[n]:.1f}",
            f"{ms['float32'] / ms[n]:.1f} ×",
            f"{x:.4f}",
            more(x - before),
        )
        for n, x in losses.items()
    ]
    made, (left, right) = figure(9.0, 3.2, columns=2)
    fast = ["float32", "8 bits", "4 bits"]
    left.barh(fast, [ms[n] for n in fast], color=[GREY, BLUE, BLUE])
    left.set(xlabel="ms a token")
    right.barh(list(schemes), [losses[n] - before for n in schemes], color=RED)
    right.set(xlabel="loss above float32 (nats)")
    for ax in (left, right):
        ax.invert_yaxis()
    keep("bits", made)
    eight, four, calibrated = (losses[n] - before for n in ("8 bits", "4 bits", "4 bits, by data"))
    faster = {n: ms["float32"] / ms[n] for n in ("8 bits", "4 bits")}
    return Row(
        "Weights in 8 and 4 bits",
        "a quarter of the size, twice the speed, a bearable loss",
        f"8 bits: {share['8 bits']:.2f} of the bytes, {faster['8 bits']:.1f} × as fast, {more(eight)} nats on a loss of "
        f"{before:.2f}; 4 bits: {share['4 bits']:.2f}, {faster['4 bits']:.1f} ×, {more(four)}, rounded by data "
        f"{more(calibrated)}",
        "agrees" if share["8 bits"] < 0.27 and faster["8 bits"] > 1.9 and eight < 0.01 else "in part",
        "Bytes and time: six layers of width 512, one text on a CPU, a token through the cache of 63, the middle of 15 calls. "
        "Loss: two layers of width 128, 300 steps on tinyshakespeare, on its held-out part; by data: GPTQ with eight batches. "
        "Bytes are of the coded matrices, scales included. More: [quantization](quantization.md).",
        "How many times depends on the machine: a token reads every weight once, so what counts is where the weights lie, and "
        "what is no product (calls, norms, attention) takes as long as before: [quant](../bench/results/quant.md) has larger "
        "models and compiled steps. A quarter is 8 bits against 32; with 4 bits it is a seventh. NF4 has no kernel on a CPU: its matrices are made anew "
        "for every product, which is small and slow.",
        table(("weights", "bytes ÷ float32", "ms a token", "times", "loss", "more"), rows),
    )


def more(loss: float) -> str:
    """A difference, without the sign of a zero."""
    return f"{loss:+.4f}" if abs(loss) >= 0.00005 else "0.0000"


def language_model(dim: int, depth: int) -> DecoderModel:
    """Of characters."""
    layer = Layer(Attention(heads=dim // 64 * 2, position=Rope()), MLP(4 * dim))
    return Decoder(text().target.vocab, dim, pattern([layer], depth)).build().eval()


@torch.inference_mode()
def one_token(model: DecoderModel, ids: torch.Tensor, state: object) -> None:
    """The last token, the others read before."""
    if state.length == 0:  # type: ignore[attr-defined]
        model(ids[:, :-1], None, state)  # type: ignore[arg-type]
    model(ids[:, -1:], None, state)  # type: ignore[arg-type]
    state.rewind(ids.shape[1] - 1)  # type: ignore[attr-defined]
