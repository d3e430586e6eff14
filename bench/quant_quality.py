"""What weights in 8 and 4 bits cost on real ones: the part `quality` of bench/quant.py.

656 k             a published model, on text that it wrote itself at temperature 1: there the difference of losses is
                  the divergence of what it has become from what it was; calibrated on other such text
tinyshakespeare   `brick train text`, on 512 held-out windows; calibrated on batches of training data
reversal          `brick train reverse`: exact match of 500 held-out sequences
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from common import DATA, table
from torch import Tensor, nn

from brickformer.generate import Sampling, Stop, generate
from brickformer.quant import NF4, Calibration, Heads, Int4, Int8, Method, Scheme, quantize
from brickformer.recipes import Trained
from brickformer.recipes.published import load
from brickformer.recipes.quantized import Plan, quantize_run


@dataclass(frozen=True)
class Way:
    """One way to quantize. method: to round by data, None to nearest. tune: steps that are learned afterwards."""

    scheme: Scheme
    method: Method | None = None
    head: Heads = "same"
    tune: int = 0

    def more(self, count: int) -> int:
        """Batches, or rows, to round by: what learns needs more of them."""
        return 0 if self.method is None else MORE * count if self.tune else count


STORIES = DATA / "tinystories-656k"
STEPS = 640
"""Of tuning."""
MORE = 4
"""Times as much data to tune by."""
WAYS = {
    "int8, to nearest": Way(Int8()),
    "int4, to nearest": Way(Int4()),
    "int4, AWQ": Way(Int4(), "awq"),
    "int4, GPTQ": Way(Int4(), "gptq"),
    "int4, GPTQ, tuned": Way(Int4(), "gptq", tune=STEPS),
    "int4, GPTQ, head int8": Way(Int4(), "gptq", "int8"),
    "int4, GPTQ, head int8, tuned": Way(Int4(), "gptq", "int8", STEPS),
    "int4, zero points, GPTQ": Way(Int4(symmetric=False), "gptq"),
    "int4 in groups of 16, GPTQ": Way(Int4(group=16), "gptq"),
    "int4 in groups of 64, GPTQ": Way(Int4(group=64), "gptq"),
    "nf4, to nearest": Way(NF4()),
    "nf4, GPTQ": Way(NF4(), "gptq"),
    "nf4, GPTQ, tuned": Way(NF4(), "gptq", tune=STEPS),
    "nf4 in groups of 32, GPTQ, head int8": Way(NF4(group=32), "gptq", "int8"),
}
GOALS = {
    "int8, to nearest": 0.005,
    "int4, GPTQ, tuned": 0.02,
    "int4, GPTQ, head int8": 0.02,
    "int4, GPTQ": 0.02,
    "nf4, GPTQ": 0.03,
}
BATCHES = 64
"""Of calibration, of tinyshakespeare's 12 × 64 characters."""
ROWS = 160
"""Of calibration, of 256 tokens that the 656 k model wrote."""


def quality(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """Loss on real weights."""
    found: dict[str, dict[str, float]] = {}
    if STORIES.is_dir():
        model = Stories(8 if args.tiny else ROWS)
        found["656 k"] = {name: model.delta(way) for name, way in WAYS.items()}
    else:
        missing.append(str(STORIES))
    text = DATA / "tinyshakespeare" / "input.txt"
    learnt = 0
    with runs(args.runs) as root:
        if text.is_file():
            steps = ["--steps", "20" if args.tiny else str(args.steps)]
            run = trained(root, "text", "--data", str(text), *steps)
            found["tinyshakespeare"], learnt = shakespeare(run), Trained.open(run).step
        else:
            missing.append(str(text))
        exact = digits(trained(root, "reverse", *["--steps", "20"] * args.tiny))
    goals = [
        (f"{way}, {model}: Δ loss", f"{most}", f"{deltas[way]:+.4f}", "met" if deltas[way] <= most else "**missed**")
        for way, most in GOALS.items()
        for model, deltas in found.items()
    ]
    goals += [
        (
            f"{way}, reversal: exact match",
            "no less",
            f"{before:.1f} → {after:.1f} %",
            "met" if after >= before else "**missed**",
        )
        for way, (before, after) in exact.items()
    ]
    rows = [(way, *(f"{deltas[way]:+.4f}" for deltas in found.values())) for way in WAYS]
    note = (
        f"Δ loss in nats a token. To round by: {ROWS} × 256 tokens that the 656 k model wrote, {BATCHES} batches of "
        f"12 × 64 characters of training data; {MORE} times as much to tune by, {STEPS} steps. Measured on 64 other "
        "texts that it wrote, on 512 held-out windows of "
        f"tinyshakespeare (`brick train text`, {learnt} steps), and on 500 held-out sequences of the reversal, these "
        "to nearest."
    )
    return [
        table(("goal", "at most", "measured", ""), goals),
        table(("way", *(f"{model}: Δ loss" for model in found)), rows),
        note,
    ]


@contextmanager
def runs(kept: Path | None) -> Iterator[Path]:
    """A folder for trained runs."""
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def trained(root: Path, recipe: str, *more: str) -> Path:
    """The first run of a recipe in a folder; trained where there is none."""
    run = root / f"{recipe}-001"
    if not run.is_dir():
        command = [sys.executable, "-m", "brickformer", "train", recipe, *more, "--out", str(root)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return run


def shakespeare(run: Path) -> dict[str, float]:
    """Δ loss of each way, by `brick quantize` as a user calls it."""
    found = {}
    for name, way in WAYS.items():
        plan = Plan(way.scheme, way.more(BATCHES), way.method or "gptq", head=way.head, tune=way.tune)
        with tempfile.TemporaryDirectory() as folder:
            receipt = quantize_run(run, plan, root=Path(folder))[1]
        found[name] = receipt.after["loss"] - receipt.before["loss"]
    return found


def digits(run: Path) -> dict[str, tuple[float, float]]:
    """Exact match before and after, in percent."""
    found = {}
    for name, scheme in {"int8": Int8(), "int4": Int4(), "nf4": NF4()}.items():
        with tempfile.TemporaryDirectory() as folder:
            receipt = quantize_run(run, Plan(scheme), root=Path(folder))[1]
        found[name] = (100 * receipt.before["exact"], 100 * receipt.after["exact"])
    return found


class Stories:
    """The 656 k model and texts that it wrote itself: `count` to round by, more to tune by, 64 to measure on."""

    def __init__(self, count: int = ROWS) -> None:
        self.count, self.model = count, load(STORIES).model
        self.seen, self.held = self._written(MORE * count, 2), self._written(min(64, count), 1)
        self.before = self._loss(self.model)

    def _written(self, rows: int, seed: int) -> Tensor:
        seeds = [1000 * seed + i for i in range(rows)]
        writing = Sampling(temperature=1.0), Stop(max_tokens=255)
        made = generate(self.model, [[1]] * rows, *writing, seeds=seeds, batch=64)
        return torch.tensor([[1, *r.tokens] for r in made.results])

    @torch.no_grad()
    def _loss(self, model: nn.Module) -> float:
        return F.cross_entropy(model(self.held[:, :-1]).flatten(0, 1).double(), self.held[:, 1:].flatten()).item()

    def delta(self, way: Way, rows: int | None = None) -> float:
        """Δ loss of one way. rows: to round by, where it is not the way's own number."""
        made, steps = copy.deepcopy(self.model), way.tune * self.count // ROWS
        seen = self.seen[: way.more(self.count) if rows is None else rows]
        readings = [lambda m, ids=ids: m(ids) for ids in seen.split(8)]
        quantize(made, way.scheme, Calibration(readings, way.method, steps) if way.method else None, head=way.head)
        return self._loss(made) - self.before


def by_command(about: str | None) -> tuple[Stories, bool]:
    """What a benchmark of this model alone measures on, and whether it is only tried (`--tiny`)."""
    p = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tiny", action="store_true", help="to see that it runs; nothing is kept")
    tiny: bool = p.parse_args().tiny
    if not STORIES.is_dir():
        raise SystemExit(f"{STORIES}: not there, and nothing else can be measured on.")
    torch.manual_seed(0)
    return Stories(8 if tiny else ROWS), tiny
