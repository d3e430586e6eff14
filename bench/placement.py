"""Where the norm stands: loss curves of five placements, with and without warm-up, 6 and 12 layers.

    python bench/placement.py [--steps 300] [--data FILE] [--rate 1e-3] [--places pre post ...]

A decoder of width 64 learns tinyshakespeare character by character; AdamW at one learning rate for all, without
clipping, so that nothing but the placement and the warm-up (none, or a fifth of the steps) decides. The curve is the
training loss, smoothed; a run whose loss is not finite is said to diverge.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from common import DATA, figure, keep, keep_picture, smooth, table
from rows.row import learn

from brickformer import MLP, Attention, Decoder, Layer, LayerNorm, Rope, pattern
from brickformer.tasks.text import Text

DIM, BATCH, CONTEXT = 64, 8, 64
PLACES = {"pre": "#1f5fa8", "post": "#b5533c", "deep": "#d9a441", "peri": "#2e8b57", "branch": "#7a5195"}
NAMES = {
    "pre": "Pre-LN",
    "post": "Post-LN",
    "deep": "DeepNorm (post)",
    "peri": "Peri-LN (both sides)",
    "branch": "norm of the branch",
}


def curve(place: str, depth: int, warm: bool, steps: int, rate: float, data: Path) -> list[float]:
    """The training loss of every step; shorter where it stopped being finite."""
    source = Text(data=str(data), context=CONTEXT).prepare(0)
    torch.manual_seed(0)
    layer = Layer(Attention(heads=4, position=Rope()), MLP(4 * DIM), norm=LayerNorm(), place=place)
    model = Decoder(source.target.vocab, DIM, pattern([layer], depth)).build()
    warmup = steps // 5 if warm else 0
    return learn(model, steps, rate=rate, batch=BATCH, warmup=warmup, source=source, clip=False)


def main() -> None:
    """Train, draw, keep the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--rate", type=float, default=1e-3)
    p.add_argument("--data", type=Path, default=DATA / "tinyshakespeare" / "input.txt")
    p.add_argument("--depths", type=int, nargs="*", default=[6, 12])
    p.add_argument("--places", nargs="*", default=list(PLACES), choices=list(PLACES))
    args = p.parse_args()
    drawn, axes = figure(9.0, 3.6 * len(args.depths), columns=2, rows=len(args.depths))
    rows = []
    last: dict[tuple[str, int, bool], float] = {}
    for row, depth in enumerate(args.depths):
        for column, warm in enumerate((False, True)):
            ax = axes[2 * row + column]
            for place in args.places:
                began = time.perf_counter()
                losses = curve(place, depth, warm, args.steps, args.rate, args.data)
                whole = len(losses) == args.steps
                end = sum(losses[-20:]) / len(losses[-20:]) if whole else math.inf
                last[place, depth, warm] = end
                ax.plot(
                    range(1, len(losses) + 1), smooth(losses), color=PLACES[place], linewidth=1.6, label=NAMES[place]
                )
                said = f"{end:.3f}" if whole else f"diverges at step {len(losses)}"
                rows.append((NAMES[place], depth, f"{args.steps // 5} steps" if warm else "none", said))
                print(rows[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
            ax.set_title(
                f"{depth} layers, {'with' if warm else 'without'} warm-up", loc="left", fontsize=11, fontweight="bold"
            )
            ax.set_xlabel("step")
            ax.set_ylabel("training loss (nats a character)")
            ax.set_ylim(1.8, 4.2)
    axes[0].legend(frameon=False, fontsize=8)
    shown = keep_picture("placement", drawn)
    said = []
    for depth in args.depths:
        for warm in (False, True):
            pre, post = last["pre", depth, warm], last["post", depth, warm]
            said.append(f"{depth} layers, {'with' if warm else 'without'} warm-up: {pre:.2f} against {post:.2f}")
    keep(
        "placement",
        "Where the norm stands",
        [
            f"**Pre-LN against Post-LN**, mean loss of the last 20 of {args.steps} steps: {'; '.join(said)}.",
            shown,
            table(("placement", "layers", "warm-up", f"loss, last 20 of {args.steps} steps"), rows),
            f"Width {DIM}, 4 heads, context {CONTEXT}, batch {BATCH}, AdamW at {args.rate:g} throughout, no clipping; "
            "one seed. Guessing evenly: 4.17.",
        ],
    )


if __name__ == "__main__":
    main()
