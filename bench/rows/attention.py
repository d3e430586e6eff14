"""Rows about attention itself: masks, the scale, the split into heads, what heads watch, position tables."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from common import figure, log_scale, median, smooth, table, take_turns
from torch import Tensor, nn

from brickformer import Attention, Rope
from brickformer.look import attention as look
from brickformer.recipes.run import forward
from brickformer.train import mean_loss
from rows.learning import reverse_model
from rows.row import BLUE, RED, Row, curves, end, keep, learn, ms, small_lm, text


class Filled(nn.Module):
    """Causal attention whose masked scores become `fill`, as one writes it by hand."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        ahead = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(ahead, self.fill)
        return scores.softmax(-1) @ v


def mask() -> Row:
    """-1e9 or 0 in masked scores."""
    q, k = torch.randn(2, 256, 64, 64)  # variance 1, as after a norm
    ahead = torch.ones(64, 64, dtype=torch.bool).triu(1)
    scores = q @ k.mT / 8.0
    leak = {fill: scores.masked_fill(ahead, fill).softmax(-1).masked_fill(~ahead, 0.0).sum(-1) for fill in (0.0, -1e9)}
    share, first = float(leak[0.0].mean()), float(leak[0.0][:, 0].mean())
    losses, honest = {}, {}
    for name, fill in (("masked with -1e9", -1e9), ("masked with 0", 0.0)):
        torch.manual_seed(0)
        model = small_lm().build()
        for layer in model.stack.layers:
            layer.mixer.attend = Filled(fill)
        losses[name] = learn(model, 400)
        for layer in model.stack.layers:  # writing shows no future: the mask as it will be then
            layer.mixer.attend = Filled(-1e9)
        honest[name] = mean_loss(model.eval(), text().validation(16), forward)
    curves("mask", losses)
    good, bad = (end(x) for x in losses.values())
    return Row(
        "A mask of 0 lets the future through",
        "a 0 becomes a small probability after the softmax: a leak; the training loss does not fall",
        f"{share:.0%} of all weight goes to the future ({first:.0%} in the first row), with -1e9 exactly "
        f"{float(leak[-1e9].max()):.0f}; the training loss falls to {bad:.2f} beside {good:.2f}, and without the future "
        f"the model then has {honest['masked with 0']:.2f} beside {honest['masked with -1e9']:.2f}",
        "in part",
        "Weights: random queries and keys of width 64, 64 tokens. Losses: a decoder of two layers on tinyshakespeare, "
        "400 steps; then evaluated as it will be used, with the future hidden.",
        "The leak is as described, and larger than small. But a leak does not keep the training loss up: the model may "
        "look ahead, evenly, and learns to do without its mask. What breaks is use, where no future is there.",
    )


def scale() -> Row:
    """Dividing by √K."""
    widths, rows, grads = [8, 16, 32, 64, 128, 256, 512], [], {}
    for width in widths:
        q, k = torch.randn(2, 4096, width)
        plain = (q * k).sum(-1).var().item()
        grad = []
        for factor in (1.0, width**-0.5):
            s = (torch.randn(512, 1, width) @ torch.randn(512, 32, width).mT * factor)[:, 0]
            p = s.softmax(-1)
            grad.append(float((torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).flatten(1).norm(dim=1).mean()))
        grads[width] = grad
        rows.append((width, f"{plain:.1f}", f"{plain / width:.2f}", f"{grad[0]:.4f}", f"{grad[1]:.3f}"))
    losses = {}
    for name, change in (("scores / √K", None), ("scores as they are", 1.0)):
        torch.manual_seed(0)
        attention = Attention(heads=1, position=Rope(), scale=change)
        losses[name] = learn(small_lm(6, mixer=attention).build(), 250, clip=False)
    made, axes = figure(9.0, 3.6, columns=2)
    axes[0].plot(widths, [grads[w][0] for w in widths], "o-", color=RED, label="scores as they are")
    axes[0].plot(widths, [grads[w][1] for w in widths], "o-", color=BLUE, label="scores / √K")
    log_scale(axes[0].xaxis)
    axes[0].set(xlabel="width of a head", ylabel="gradient through the softmax")
    axes[0].legend(frameon=False)
    for (label, values), colour in zip(losses.items(), (BLUE, RED), strict=True):
        axes[1].plot(range(1, len(values) + 1), smooth(values), color=colour, linewidth=1.7, label=label)
    axes[1].set(xlabel="step", ylabel="training loss (nats)")
    keep("scale", made)
    good, bad = (end(x) for x in losses.values())
    whole = all(len(x) == 250 for x in losses.values())
    return Row(
        "Scores are divided by √K",
        "the variance of a score grows with the width; divided it is 1; without, gradients and loss jump, deep models blow up",
        f"variance {rows[3][1]} at width 64 and {rows[-1][1]} at 512, divided {rows[3][2]}; the gradient through the "
        f"softmax of 32 keys at width 512 is {grads[512][0]:.3f} instead of {grads[512][1]:.3f}; six layers end at "
        f"{bad:.2f} instead of {good:.2f}",
        "agrees" if bad > good + 0.02 else "in part",
        "Variance of q · k and size of the softmax's Jacobian for random vectors; six layers with one head of width 64, "
        "250 steps at a rate of 0.003, without clipping.",
        ("Nothing blew up here: the norm before each branch keeps queries and keys small. " if whole else "")
        + "A saturated softmax passes little gradient on, so attention learns late; that is the cost that is seen.",
        table(("width", "variance of q·k", "after / √K", "gradient, as it is", "gradient, / √K"), rows),
    )


def split() -> Row:
    """(B, T, D) -> heads, with and without the transpose."""
    x = torch.randn(1, 6, 8)
    try:
        x.view(1, 6, 2, 4).transpose(1, 2).view(1, 6, 8)
        said = "no error"
    except RuntimeError as e:
        said = str(e).split("(")[0].strip()

    def attend(y: Tensor, right: bool) -> Tensor:
        heads = y.view(1, 6, 2, 4).transpose(1, 2) if right else y.view(1, 2, 6, 4)
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return out.transpose(1, 2).reshape(1, 6, 8)

    leaks = {}
    for right in (True, False):
        grid = (
            torch.autograd.functional.jacobian(lambda y, right=right: attend(y, right), x)[0, :, :, 0].abs().sum((1, 3))
        )
        leaks[right] = int((grid.triu(1) > 0).sum())
    apart = float((attend(x, True) - attend(x, False)).norm() / attend(x, True).norm())
    return Row(
        "Heads are split, then transposed",
        "view, then transpose; a view after it without contiguous() is an error; with the axes swapped shapes do not fit",
        f"the view raises ({said}); without the transpose every shape fits, the result is off by {apart:.0%}, and "
        f"{leaks[False]} of 15 pairs of tokens look into the future (with it {leaks[True]})",
        "in part",
        "Six tokens of width 8 in two heads, causal attention; a pair leaks when the Jacobian says that a later token "
        "moves an earlier output.",
        "The error is the harmless case. view(B, H, T, K) in place of view(B, T, H, K).transpose(1, 2) raises nothing: it "
        "cuts the sequence instead of the channels, and the mask then hides the wrong tokens.",
    )


WATCHED = {
    "anti": "the mirrored place",
    "diagonal": "the token itself",
    "previous": "the token before",
    "same_token": "an equal token",
    "first": "the first token",
}


def heads() -> Row:
    """What heads watch after training."""
    trained = reverse_model()
    sums: dict[tuple[str, int], list[Any]] = {}
    for source, target in trained.data.examples()[:20]:
        ids = [trained.data.target.bos, *trained.data.target.encode(target)]
        view = look(trained.model, ids, source=trained.data.source.encode(source), remove=False)
        for m in view.maps:
            for h, s in enumerate(m.stats):
                sums.setdefault((m.name, h), []).append(s)

    def share(stats: list[Any], kind: str) -> float:
        values = [v for s in stats if not math.isnan(v := getattr(s, kind))]
        return sum(values) / len(values) if values else 0.0

    shares = {kind: {key: share(stats, kind) for key, stats in sums.items()} for kind in WATCHED}
    cross = [key for key in sums if key[0].endswith("cross")]
    mirrored = [shares["anti"][key] for key in cross]
    watched = {key: kind for key in sums if shares[kind := max(WATCHED, key=lambda k: shares[k][key])][key] > 0.5}
    counts = {kind: sum(k == kind for key, k in watched.items() if key not in cross) for kind in WATCHED}
    others = [f"{n} on {WATCHED[kind]}" for kind, n in counts.items() if n]
    rows = []
    for kind, means in shares.items():
        (where, h), value = max(means.items(), key=lambda x: x[1])
        rows.append((WATCHED[kind], f"{value:.0%}", f"{where.replace('.stack.layers.', ' ')} head {h + 1}"))
    return Row(
        "Different heads watch different things",
        "each head has something of its own to watch: a verb, a subject, a feeling",
        f"of {len(cross)} heads of cross-attention {sum(x > 0.5 for x in mirrored)} have more than half of their weight on the "
        f"mirrored digit (the best {max(mirrored):.0%}); of the other {len(sums) - len(cross)} heads "
        f"{', '.join(others) or 'none has so much on one kind of place'}; {len(sums) - len(watched)} of all have no such place",
        "agrees" if len(set(watched.values())) > 1 else "in part",
        "The model of `brick train reverse`, 20 held-out sequences; the head with the largest share of each kind.",
        "What is watched is measurable where the task says what there is to watch; feelings were not measured. See "
        "[look.md](look.md).",
        table(("watched", "share of its weight", "head"), rows),
    )


def tables() -> Row:
    """A table of sines, kept or computed at every call."""
    width, most, tokens = 512, 1024, 128

    def build(n: int) -> Tensor:
        angle = torch.arange(n)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)

    kept, x = build(most), torch.randn(16, tokens, width)
    times = take_turns(
        {
            "kept": lambda: x + kept[:tokens],
            "whole": lambda: x + build(most)[:tokens],
            "needed": lambda: x + build(tokens),
        },
        400,
        warm=5,
    )
    t = {name: 1e3 * median(v) for name, v in times.items()}
    model = small_lm().build()
    b = text().batch(0, 16)
    step = ms(lambda: F.cross_entropy(forward(model, b).flatten(0, 1), b.targets.flatten()).backward())
    return Row(
        "Position tables are computed once",
        "computing them at every step is slow; kept in a buffer training got much faster",
        f"adding a kept table {t['kept']:.2f} ms; computing {most} rows each time {t['whole']:.2f} ms, only the {tokens} "
        f"rows that are needed {t['needed']:.2f} ms; a training step of a small decoder takes {step:.0f} ms",
        "in part",
        f"Width {width}, batches of 16 × {tokens}.",
        f"Kept is right. Whether one notices depends on the rest: all {most} rows are {(t['whole'] - t['kept']) / step:.0%} of "
        f"the step of even a small model, the rows that are needed {(t['needed'] - t['kept']) / step:.1%}.",
    )
