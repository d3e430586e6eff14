"""Memory of attention: the formula written out beside the fused kernel, forward and backward, by sequence length.

    python bench/memory.py [--longest 4096] [--rounds 5]

Memory is the most that is allocated at one time during the call, beyond what was there before, by torch's own profiler
(every allocation and every release of its CPU allocator). Time is the median of calls that take turns. 8 heads of width
64, causal, batch 1, float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from common import figure, keep, keep_picture, log_scale, median, table, take_turns
from torch.profiler import ProfilerActivity, profile

from brickformer.attend import Attend
from brickformer.mask import CAUSAL, Span

HEADS, WIDTH = 8, 64
BACKENDS = ("reference", "sdpa")
COLORS = {"reference": "#b5533c", "sdpa": "#1f5fa8"}
NAMES = {"reference": "written out (reference)", "sdpa": "fused (sdpa)"}


def peak(job: Callable[[], object]) -> int:
    """The most bytes that a call holds at one time beyond what was there before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False) as seen:
        job()
    now = most = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def forward(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One call without gradients."""
    at = Span(0, q.shape[2])
    with torch.no_grad():
        return attend(q, k, v, at, at)


def learn(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Forward and backward."""
    at = Span(0, q.shape[2])
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attend(*inputs, at, at).sum(), inputs)


def measure(tokens: int, rounds: int) -> dict[tuple[str, str], tuple[int, float]]:
    """(what, backend) -> (bytes at the peak, seconds)."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, tokens, WIDTH, generator=gen) for _ in range(3))
    jobs = {
        (what, backend): partial(run, Attend(CAUSAL, backend=backend), q, k, v)
        for what, run in (("forward", forward), ("forward and backward", learn))
        for backend in BACKENDS
    }
    peaks = {key: peak(job) for key, job in jobs.items()}
    times = take_turns({f"{a}|{b}": job for (a, b), job in jobs.items()}, rounds)
    return {key: (peaks[key], median(times["|".join(key)])) for key in jobs}


def main() -> None:
    """Measure, draw, keep the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--longest", type=int, default=4096)
    p.add_argument("--rounds", type=int, default=5)
    args = p.parse_args()
    lengths = [t for t in (256, 512, 1024, 2048, 4096, 8192) if t <= args.longest]
    found = {t: measure(t, args.rounds) for t in lengths}
    whats = ["forward", "forward and backward"]
    rows = []
    for what in whats:
        for t in lengths:
            (ref_b, ref_s), (new_b, new_s) = (found[t][what, b] for b in BACKENDS)
            rows.append(
                (
                    what,
                    t,
                    f"{ref_b / 2**20:,.1f}",
                    f"{new_b / 2**20:,.1f}",
                    f"{100 * new_b / ref_b:.1f} %",
                    f"{1e3 * ref_s:,.1f}",
                    f"{1e3 * new_s:,.1f}",
                    f"{ref_s / new_s:.1f} ×",
                )
            )
    header = (
        "",
        "T",
        "written out, MiB",
        "fused, MiB",
        "fused ÷ written out",
        "written out, ms",
        "fused, ms",
        "faster",
    )
    drawn, axes = figure(9.0, 4.6, columns=2)
    for ax, which, label, scale in ((axes[0], 0, "peak memory (MiB)", 2**-20), (axes[1], 1, "time (ms)", 1e3)):
        for what, style in zip(whats, ("-", "--"), strict=True):
            for b in BACKENDS:
                ys = [found[t][what, b][which] * scale for t in lengths]
                ax.plot(lengths, ys, style, color=COLORS[b], marker="o", markersize=4, label=f"{NAMES[b]}, {what}")
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [str(t) for t in lengths])
        log_scale(ax.yaxis)
        ax.set_xlabel("sequence length T (tokens)")
        ax.set_ylabel(label)
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    axes[0].set_title("Attention: memory", loc="left", fontsize=11, fontweight="bold")
    axes[1].set_title("Attention: time", loc="left", fontsize=11, fontweight="bold")
    shown = keep_picture("memory", drawn)
    last = lengths[-1]
    said = []
    for what in whats:
        (ref_b, ref_s), (new_b, new_s) = (found[last][what, b] for b in BACKENDS)
        said.append(f"{what} {100 * new_b / ref_b:.1f} % of the peak memory and 1/{ref_s / new_s:.1f} of the time")
    how = (
        f"{HEADS} heads of width {WIDTH}, causal, batch 1, float32. Memory: the most allocated at one time during the "
        "call, outputs and gradients included and inputs not (torch.profiler). Time: medians of calls in turns."
    )
    keep(
        "memory",
        "Memory of attention",
        [
            f"**The fused kernel at T = {last}**, beside the formula written out: {'; '.join(said)}.",
            shown,
            table(header, rows),
            how,
        ],
    )


if __name__ == "__main__":
    main()
