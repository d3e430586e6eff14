"""Linear mixers against attention: time and memory of one forward pass as the sequence gets longer.

    python bench/linear.py [--rounds 5] [--longest 8192]

One mixer of width 256 by itself, batch 1, float32, without gradients: attention (8 heads, RoPE, the fused kernel),
Mamba, Mamba2, GatedDelta, and attention that sees a window of 512. Time is the median of calls that take turns; memory
the most that is allocated at one time during a call, its output included (torch.profiler, see memory.py).
"""

from __future__ import annotations

import argparse

import torch
from common import figure, keep, keep_picture, log_scale, median, table, take_turns
from memory import peak

from brickformer.mask import Mask, Span
from brickformer.mixers.attention import Attention
from brickformer.mixers.base import Mixer, MixerSpec
from brickformer.mixers.delta import GatedDelta
from brickformer.mixers.mamba import Mamba
from brickformer.mixers.mamba2 import Mamba2
from brickformer.positions import Rope

DIM = 256
LIMIT = 9.0  # of time(8k) / time(1k), for a mixer that is linear
MIXERS: dict[str, tuple[MixerSpec, bool, str]] = {  # spec, linear, colour
    "Attention": (Attention(heads=8, position=Rope()), False, "#b5533c"),
    "Attention, window 512": (Attention(heads=8, position=Rope(), mask=Mask(window=512)), False, "#d9a441"),
    "Mamba": (Mamba(), True, "#1f5fa8"),
    "Mamba2": (Mamba2(head_dim=32), True, "#2e8b57"),
    "GatedDelta": (GatedDelta(heads=4), True, "#7a5195"),
}


@torch.inference_mode()
def run(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    """One call."""
    return mixer(x, Span(0, x.shape[1]))


def main() -> None:
    """Measure, draw, keep the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--longest", type=int, default=8192)
    args = p.parse_args()
    lengths = [t for t in (1024, 2048, 4096, 8192) if t <= args.longest]
    torch.manual_seed(0)
    mixers = {name: made.build(DIM).eval() for name, (made, _, _) in MIXERS.items()}
    inputs = {t: torch.randn(1, t, DIM) for t in lengths}
    jobs = {f"{name}|{t}": lambda m=m, x=x: run(m, x) for name, m in mixers.items() for t, x in inputs.items()}
    times = {key: median(found) for key, found in take_turns(jobs, args.rounds).items()}
    peaks = {key: peak(job) for key, job in jobs.items()}
    rows = []
    for name, mixer in mixers.items():
        seconds = [times[f"{name}|{t}"] for t in lengths]
        most = [peaks[f"{name}|{t}"] for t in lengths]
        rows.append(
            (
                name,
                f"{sum(p.numel() for p in mixer.parameters()):,}",
                *(f"{1e3 * s:,.1f}" for s in seconds),
                f"**{seconds[-1] / seconds[0]:.1f}**",
                *(f"{b / 2**20:,.0f}" for b in most),
                f"{most[-1] / most[0]:.1f}",
            )
        )
    spread = f"time({lengths[-1]}) ÷ time({lengths[0]})"
    header = ("mixer", "parameters", *(f"ms at T = {t}" for t in lengths), spread)
    header += (*(f"MiB at T = {t}" for t in lengths), "MiB, last ÷ first")
    drawn, axes = figure(9.0, 4.4, columns=2)
    for name, (_, _, color) in MIXERS.items():
        for ax, values, scale in ((axes[0], times, 1e3), (axes[1], peaks, 2**-20)):
            ys = [values[f"{name}|{t}"] * scale for t in lengths]
            ax.plot(lengths, ys, color=color, marker="o", markersize=4, linewidth=1.8, label=name)
    for ax, label, title in (
        (axes[0], "time (ms)", "Forward: time"),
        (axes[1], "peak memory (MiB)", "Forward: memory"),
    ):
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [str(t) for t in lengths])
        log_scale(ax.yaxis)
        ax.set_xlabel("sequence length T (tokens)")
        ax.set_ylabel(label)
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    shown = keep_picture("linear", drawn)
    ratios = {name: times[f"{name}|{lengths[-1]}"] / times[f"{name}|{lengths[0]}"] for name in mixers}
    linear = {name: r for name, r in ratios.items() if MIXERS[name][1]}
    said = ", ".join(f"{name} {r:.1f} ×" for name, r in linear.items())
    over = [name for name, r in linear.items() if r > LIMIT]
    verdict = (
        f"all within the {LIMIT:g} × asked for" if not over else f"above the {LIMIT:g} × asked for: {', '.join(over)}"
    )
    parts = [
        f"**{lengths[-1] // lengths[0]} × the tokens take** {said} the time ({verdict}); attention "
        f"{ratios['Attention']:.1f} ×.",
        shown,
        table(header, rows),
        f"One mixer of width {DIM}, batch 1, float32, no gradients. Medians of {args.rounds} calls in turns. "
        "Memory: the most allocated at one time during a call, output included.",
    ]
    keep("linear", "Linear mixers against attention", parts)


if __name__ == "__main__":
    main()
