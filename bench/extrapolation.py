"""Longer than any trained on: reversal learnt from 3 to 6 digits, asked for 7 to 12, with each position brick.

    python bench/extrapolation.py [--seeds 5] [--only NAME ...] [--resume]

All but the last model are `brick train reverse` with other positions and nothing else changed (1000 sequences, 300
steps). The last cannot count at all: it finds its place by what it has just written. An answer counts when it is
exactly right, its end included; 500 sequences of each length, none of them trained on. Every run is noted in
bench/results/extrapolation.json; `--resume` skips those.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from common import RESULTS, figure, keep, keep_picture, median, table

from brickformer import (
    MLP,
    Alibi,
    Attention,
    Decoder,
    Encoder,
    EncoderDecoder,
    Layer,
    LayerNorm,
    Learned,
    Mask,
    Rope,
    Sinusoid,
    T5Bias,
)
from brickformer.embed import Embed, Head
from brickformer.mask import FULL
from brickformer.mixers.cross import Cross
from brickformer.models import EncoderDecoderModel
from brickformer.positions import AbsolutePositionSpec, PositionSpec, Randomized
from brickformer.recipes import FROM_DATA, Run, completed, forward, reverse
from brickformer.tasks.reverse import Reverse
from brickformer.tasks.tokenizer import BOS, EOS, SPECIALS
from brickformer.train import fit
from brickformer.train.optim import AdamW, Muon
from brickformer.train.schedule import Cosine
from brickformer.train.settings import Training

TRAINED, LONGER, COUNT = (3, 6), range(7, 13), 500
FILE = RESULTS / "extrapolation.json"
RECIPE = "windows only"
GOAL = 0.95


def with_positions(
    inside: PositionSpec | None = None,
    absolute: AbsolutePositionSpec | None = None,
    randomized: Randomized | None = None,
) -> Run:
    """The recipe for reversal with these positions: in self-attention, and at the embeddings."""
    embed = Embed(position=absolute, scaled=True, randomized=randomized)
    return reverse().but(
        **{
            "model.encoder.embed": embed,
            "model.decoder.embed": embed,
            "model.encoder.layers.*.mixer": Attention(4, position=inside, mask=FULL),
            "model.decoder.layers.*.mixer": Attention(4, position=inside),
        }
    )


def windows() -> Run:
    """No position but within small windows, one layer a side, so that neither side can count.

    What was just written, y_{t-4} ... y_{t-1}, is the source read backwards from some place on; the next digit is the
    one before that place. What is learnt of that from 5 and 6 digits should hold for 12, if three things are seen to:
    repeated digits are common in training (kinds=3), or three digits in a row would be told apart and four not; scores
    in cross-attention are large (scale), or twice as many places take the weight away; batches are large.
    """
    near, mlp, norm, embed = Rope(theta=20.0), MLP(512), LayerNorm(), Embed(scaled=True)
    reader = Attention(4, position=near, mask=Mask(causal=False, window=5), bias=True)
    writer = Attention(4, position=near, mask=Mask(window=4), bias=True)
    model = EncoderDecoder(
        Encoder(FROM_DATA, 128, (Layer(reader, mlp, norm=norm),), embed),
        Decoder(FROM_DATA, 128, (Layer(writer, mlp, cross=Cross(1, scale=0.3), norm=norm),), embed, Head(tied=False)),
        shared=True,
    )
    optim = Muon(lr=0.01, rest=AdamW(lr=3e-3, weight_decay=0.0))
    train = Training(steps=3000, batch=256, optim=optim, schedule=Cosine(warmup=10), ema=0.97)
    return Run(task=Reverse(train=300_000, kinds=3), model=model, train=train)


FAR = Randomized(range=48, stride=2)
MODELS: dict[str, tuple[Callable[[], Run], str, str]] = {  # run, colour, line
    "none": (lambda: with_positions(), "#8a8a8a", "-"),
    "Sinusoid": (lambda: with_positions(absolute=Sinusoid(64)), "#b5533c", "-"),
    "Learned": (lambda: with_positions(absolute=Learned(64)), "#d9a441", "-"),
    "Rope": (lambda: with_positions(Rope()), "#2e8b57", "-"),
    "Alibi": (lambda: with_positions(Alibi()), "#7a5195", "-"),
    "T5Bias": (lambda: with_positions(T5Bias()), "#4aa3a2", "-"),
    "Randomized Sinusoid": (lambda: with_positions(absolute=Sinusoid(64), randomized=FAR), "#b5533c", "--"),
    "Randomized Learned": (lambda: with_positions(absolute=Learned(64), randomized=FAR), "#d9a441", "--"),
    "Randomized Rope": (lambda: with_positions(Rope(), randomized=FAR), "#2e8b57", "--"),
    RECIPE: (windows, "#1f5fa8", "-"),
}


@torch.inference_mode()
def exact(model: EncoderDecoderModel, src: torch.Tensor) -> torch.Tensor:
    """(B, S) digits of one length -> (B,) whether the greedy answer is right, its end included."""
    rows, length = src.shape
    memory, out = model.encode(src), torch.full((rows, 1), BOS)
    for _ in range(length + 1):
        out = torch.cat([out, model.decode(out, memory)[:, -1:].argmax(-1)], 1)
    return (out[:, 1:] == torch.cat([src.flip(1), torch.full((rows, 1), EOS)], 1)).all(1)


def measure(name: str, seed: int) -> dict[str, float]:
    """Shares of right answers: "held out" for the trained lengths, then by length; and the seconds of training."""
    run = MODELS[name][0]().but(seed=seed)
    data = run.task.prepare(seed)
    run = completed(run, data)
    torch.manual_seed(seed)
    model = run.model.build()
    began = time.perf_counter()
    fit(model, run.train, data.batch, forward)
    found = {"seconds": time.perf_counter() - began}
    sources = [data.source.encode(source) for source, _ in data.examples()]
    right = 0.0
    for length in range(TRAINED[0], TRAINED[1] + 1):
        same = [ids for ids in sources if len(ids) == length]
        if same:  # of 3 digits there are only a thousand, and all may have been trained on
            right += exact(model, torch.tensor(same)).sum().item()
    found["held out"] = right / len(sources)
    first = len(SPECIALS)  # the digits follow the special tokens, in order
    for length in LONGER:
        gen = torch.Generator().manual_seed(1000 + length)
        src = torch.randint(first, first + 10, (COUNT, length), generator=gen)
        found[str(length)] = exact(model, src).float().mean().item()
    return found


def draw(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Median over the seeds for each length, with the range shaded for the recipe."""
    drawn, axes = figure(8.4, 4.4)
    ax, xs = axes[0], [TRAINED[1], *LONGER]
    keys = ["held out", *map(str, LONGER)]
    for name, (_, color, line) in MODELS.items():
        if name not in found:
            continue
        columns = [[100 * run[key] for run in found[name].values()] for key in keys]
        wide = 2.6 if name == RECIPE else 1.6
        middle = [median(c) for c in columns]
        ax.plot(xs, middle, line, color=color, marker="o", markersize=4, linewidth=wide, label=name)
        if name == RECIPE:
            ax.fill_between(xs, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.18, lw=0)
    ax.axhline(100 * GOAL, color="#555555", linewidth=0.8, linestyle=":")
    ax.text(xs[-1], 100 * GOAL - 1.5, "95 %", ha="right", va="top", fontsize=8, color="#555555")
    ax.set_xticks(xs, ["3-6\n(trained)", *map(str, LONGER)])
    ax.set_ylim(-3, 103)
    ax.set_xlabel("digits in the sequence")
    ax.set_ylabel("exact match (%), median of the seeds")
    ax.set_title("Reversal, trained on 3 to 6 digits", loc="left", fontsize=11, fontweight="bold")
    drawn.legend(loc="outside right upper", frameon=False, fontsize=9)
    return keep_picture("extrapolation", drawn)


def main() -> None:
    """Train, test, draw, keep the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--only", nargs="*", default=list(MODELS))
    p.add_argument("--resume", action="store_true")
    args = p.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    if args.resume and FILE.exists():
        found = json.loads(FILE.read_text())
    for seed in range(args.seeds):
        for name in args.only:
            if str(seed) in found.get(name, {}):
                continue
            found.setdefault(name, {})[str(seed)] = measure(name, seed)
            print(name, seed, {k: round(v, 3) for k, v in found[name][str(seed)].items()}, flush=True)
            part = FILE.with_suffix(".part")
            part.write_text(json.dumps(found, indent=1) + "\n")
            part.replace(FILE)
    keys = ["held out", *map(str, LONGER)]
    rows = []
    for name in (n for n in MODELS if n in found):
        runs = list(found[name].values())
        cells = []
        for key in keys:
            values = [100 * run[key] for run in runs]
            cells.append(f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        rows.append((name, len(runs), *cells, f"{median(run['seconds'] for run in runs):.0f}"))
    last = str(LONGER[-1])
    parts = []
    if RECIPE in found:
        at_last = [run[last] for run in found[RECIPE].values()]
        parts.append(
            f"**The model of {RECIPE} answers {100 * median(at_last):.1f} % of sequences of {last} digits exactly** "
            f"(median of {len(at_last)} seeds; {sum(v >= GOAL for v in at_last)} of them at {100 * GOAL:.0f} % or "
            "more)."
        )
    fail = [n for n in MODELS if n in found and n != RECIPE and median(r[last] for r in found[n].values()) < GOAL]
    if fail:
        parts.append(
            f"**By itself no position brick does:** {', '.join(fail)} stay below {100 * GOAL:.0f} % at {last} digits."
        )
    header = ("positions", "seeds", "3-6, held out", *(f"{n} digits" for n in LONGER), "seconds of training")
    parts += [draw(found), table(header, rows), "Exact match in percent: median of the seeds (lowest to highest)."]
    keep("extrapolation", "Reversal of sequences longer than any trained on", parts)


if __name__ == "__main__":
    main()
