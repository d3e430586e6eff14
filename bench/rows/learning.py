"""Rows about learning: positions beyond training, Post-LN, GELU, a forgotten memory, padding in the loss, the task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from common import table
from torch import Tensor, nn

from brickformer import MLP, Attention, BrickError, Decoder, Embed, Layer, LayerNorm, Learned, Session, pattern
from brickformer.mixers.cross import Memory
from brickformer.presets import vaswani_small
from brickformer.recipes import FROM_DATA, reverse
from brickformer.recipes.run import forward
from brickformer.tasks import Batch, Data
from brickformer.train import Progress, fit, mean_loss
from rows.row import Row, curves, end, learn, small_lm, text

Forward = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Digits:
    """A trained digit model. points: (step, training loss, validation loss, exact match) at validations."""

    model: nn.Module
    data: Data
    points: list[tuple[float, float, float, float]]


class Points(Progress):
    """Keeps what is validated and says nothing."""

    def __init__(self) -> None:
        self.kept: list[tuple[float, float, float, float]] = []

    def record(self, record: Mapping[str, float]) -> None:
        if "val_loss" in record:
            self.kept.append((record["step"], record["loss"], record["val_loss"], record.get("exact", math.nan)))

    def begin(self, step: int, steps: int) -> None: ...

    def step(self, step: int, loss: float | None) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


def trained(steps: int, how: Forward = forward, *, ignore: bool = True, dropout: float = 0.0) -> Digits:
    """The digit task. how: the forward pass. ignore: padding is no target. dropout: on branches and embeddings."""
    run = reverse().but(**{"train.steps": steps})
    if dropout:
        model = vaswani_small(vocab=FROM_DATA, shared=True, dropout=dropout)
        run = run.but(model=model.but(**{"decoder.head.tied": False}))
    session, points = Session.new(run), Points()

    def batches(i: int, n: int) -> Batch:
        batch = session.data.batch(i, n)
        if ignore:
            return batch
        targets = batch.targets.masked_fill(batch.targets == -100, 0)
        return replace(batch, targets=targets, tokens=targets.numel())

    def evaluate(model: nn.Module) -> dict[str, float]:
        values = {"val_loss": mean_loss(model, session.data.validation(64), how)}
        if how is forward:
            values["exact"] = sum(e.exact for e in session.examples(500)) / 500
        return values

    fit(session.model, session.run.train, batches, how, evaluate=evaluate, progress=points)
    return Digits(session.model, session.data, points.kept)


@cache
def reverse_model() -> Digits:
    """The recipe, 150 steps."""
    return trained(150)


def reversal() -> Row:
    """The digit task."""
    found = trained(300)
    at95 = next((int(s) for s, _, _, e in found.points if e >= 0.95), None)
    below = next((int(s) for s, loss, _, _ in found.points if loss < 0.1), None)
    step, loss, val, exact = found.points[-1]
    rows = [(int(s), f"{a:.4f}", f"{b:.4f}", f"{e:.1%}") for s, a, b, e in found.points]
    lines = {"training": [a for _, a, _, _ in found.points], "validation": [b for _, _, b, _ in found.points]}
    curves("reversal", lines, "loss (nats)", every=25, log=True)
    return Row(
        "Reversing digits",
        "1000 sequences of 3 to 6 digits; after about 500 steps the loss is below 0.1 and 95 % of the validation is right",
        f"95 % at step {at95}, loss below 0.1 at step {below}; after {int(step)} steps loss {loss:.4f} and {exact:.1%} of "
        "500 unseen sequences exactly right",
        "agrees" if at95 is not None and at95 <= 500 else "differs",
        "`brick train reverse`: D = 128, 2 + 2 layers, Muon, the mean of the weights; validated every 25 steps.",
        "The recipe is not the article's: Muon for the matrices, validated with the mean of the weights. What each of them "
        "does was not measured here.",
        table(("step", "training loss", "validation loss", "exact match"), rows),
    )


def memory() -> Row:
    """Cross-attention without its memory."""

    def forgetful(model: nn.Module, batch: Batch) -> Tensor:
        seen = model.encode(batch.src, batch.src_valid)  # type: ignore[operator]
        return model.decode(batch.inputs, Memory(torch.zeros_like(seen.value), seen.at))  # type: ignore[operator]

    lost, kept = trained(150, forgetful), reverse_model()
    # n digits, n even among 3 to 6, each even among 10; after the 3rd, 4th and 5th digit it may be the end
    floor = (4.5 * math.log(10) + math.log(4)) / 5.5
    curves(
        "memory",
        {"with the memory": [v for _, _, v, _ in kept.points], "without": [v for _, _, v, _ in lost.points]},
        "validation loss (nats)",
        every=25,
    )
    return Row(
        "A forgotten memory",
        "the decoder ignores the source and the training loss does not move at all",
        f"the loss falls and then stays at {lost.points[-1][2]:.3f}; whoever knows only that there are 3 to 6 digits cannot "
        f"be below {floor:.3f}; with the memory it is {kept.points[-1][2]:.3f}",
        "in part",
        "The digit task for 150 steps with zeros in place of the encoder's output.",
        "It moves, at first: how answers are built (ten digits, three to six of them, an end) is learnt without any source. "
        "What gives the bug away is the height at which it stays: the entropy of the answers alone. In this library a "
        "missing memory is an error.",
    )


def padding() -> Row:
    """Padding as a target, or not."""
    counted, ignored = trained(100, ignore=False), trained(100)
    rows = [
        (int(a[0]), f"{a[1]:.3f}", f"{b[1]:.3f}", f"{a[3]:.1%}", f"{b[3]:.1%}")
        for a, b in zip(ignored.points, counted.points, strict=True)
    ]
    a, b = ignored.points[-1], counted.points[-1]
    lines = {"ignored": [p[1] for p in ignored.points], "counted": [p[1] for p in counted.points]}
    curves("padding", lines, every=25, log=True)
    return Row(
        "Padding is no target",
        "the loss has to ignore padding",
        f"after 100 steps {a[3]:.1%} exactly right where it is ignored, {b[3]:.1%} where it counts; the loss shown is "
        f"{b[1]:.3f} instead of {a[1]:.3f}",
        "in part",
        "The digit task, rows padded to seven tokens; padding as a target of its own, or left out.",
        "With little padding it costs little: the model learns to say padding after the end. What it spoils is the figure: "
        "easy targets make the mean look better, by more the more padding there is.",
        table(("step", "loss, ignored", "loss, counted", "exact, ignored", "exact, counted"), rows),
    )


def placement() -> Row:
    """Post-LN against Pre-LN."""
    losses = {}
    for name, place, warmup in (
        ("Pre-LN", "pre", 0),
        ("Post-LN", "post", 0),
        ("Post-LN, 100 steps of warm-up", "post", 100),
    ):
        torch.manual_seed(0)
        losses[name] = learn(small_lm(6, place=place).build(), 250, warmup=warmup, clip=False)
    curves("placement", losses)
    pre, post, warm = (end(x) for x in losses.values())
    return Row(
        "Pre-LN against Post-LN",
        "Post-LN converges slowly; with Pre-LN training is steady at once",
        f"after 250 steps of six layers without warm-up {pre:.2f} (Pre-LN) against {post:.2f} (Post-LN); with warm-up "
        f"Post-LN has {warm:.2f}",
        "agrees" if pre < post - 0.05 else "differs",
        "tinyshakespeare, D = 64, AdamW at 0.003 throughout, no clipping. More places and depths: "
        "[placement](../bench/results/placement.md).",
    )


def gelu() -> Row:
    """ReLU against GELU."""
    losses: dict[str, list[float]] = {}
    ends: dict[str, list[float]] = {"relu": [], "gelu": []}
    for seed in range(2):
        for act in ends:
            torch.manual_seed(seed)
            found = learn(small_lm(2, ffn=MLP(256, activation=act)).build(), 400)
            losses.setdefault(act, found)
            ends[act].append(end(found, 50))
    curves("gelu", losses)
    relu, other = (sum(x) / len(x) for x in ends.values())
    apart = max(abs(x[0] - x[1]) for x in ends.values())
    return Row(
        "GELU in place of ReLU",
        "about the same",
        f"loss {relu:.3f} with ReLU, {other:.3f} with GELU; two seeds of one of them differ by {apart:.3f}",
        "agrees" if abs(relu - other) < 0.05 else "differs",
        "Two layers, D = 64, tinyshakespeare, 400 steps, two seeds each; mean of the last 50 steps.",
    )


def _each(model: nn.Module, batch: Batch, tokens: int | None = None) -> Tensor:
    """The loss at each of the first places, the mean of the texts."""
    with torch.no_grad():
        said = model(batch.inputs[:, :tokens]).transpose(1, 2)
    return F.cross_entropy(said, batch.targets[:, :tokens], reduction="none").mean(0)


def beyond() -> Row:
    """Longer texts than in training."""
    models = {"rotary": small_lm().build()}
    layer = Layer(Attention(heads=4), MLP(256), norm=LayerNorm())
    vocab = text().target.vocab
    models["learned table of 64"] = Decoder(vocab, 64, pattern([layer], 2), embed=Embed(position=Learned(64))).build()
    rows, found, lines = [], {}, {}
    long = next(iter(text(256).validation(64)))
    for name, model in models.items():
        torch.manual_seed(0)
        learn(model, 500)
        model.eval()
        try:
            each, refused = _each(model, long), ""
        except BrickError as e:
            each, refused = _each(model, long, 64), str(e).split(".")[0]
        parts = [float(each[a:b].mean()) for a, b in ((32, 64), (64, 128), (128, 256)) if b <= len(each)]
        found[name], lines[name] = parts, [float(x) for x in each.unfold(0, 8, 1).mean(-1)]
        rows.append((name, *(f"{p:.2f}" for p in parts), *(["refused", refused] if refused else [])))
    curves("beyond", lines, "loss (nats), mean of 8 places", axis="place in the text; trained on 64")
    inside, after, far = found["rotary"]
    return Row(
        "Longer than in training",
        "absolute tables fail past their length; rotary positions extrapolate excellently",
        f"a table of 64 rows has no row 65 and says so; rotary positions, trained on 64 tokens, have a loss of {inside:.2f} "
        f"at tokens 33 to 64, {after:.2f} at 65 to 128 and {far:.2f} at 129 to 256",
        "in part" if far > inside + 0.05 else "agrees",
        "Two layers, D = 64, trained for 500 steps on windows of 64 characters, asked for 256.",
        "Rotary positions run past their training and lose quality: distances never seen turn queries and keys to angles "
        "never seen. Scalings, windows or randomized positions are what carries further: "
        "[extrapolation](../bench/results/extrapolation.md).",
        table(("positions", "tokens 33 to 64", "65 to 128", "129 to 256"), rows),
    )
