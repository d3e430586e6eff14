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
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import DATA, table
from torch import Tensor, nn

from brickformer.generate import Sampling, Stop, generate
from brickformer.quant import NF4, Calibration, Heads, Int4, Int8, Method, Scheme, quantize
from brickformer.recipes import Trained
from brickformer.recipes.published import load
from brickformer.recipes.quantized import Plan, quantize_run

WAYS: dict[str, tuple[Scheme, Method | None, Heads]] = {
    "int8, to nearest": (Int8(), None, "same"),
    "int4, to nearest": (Int4(), None, "same"),
    "int4, AWQ": (Int4(), "awq", "same"),
    "int4, GPTQ": (Int4(), "gptq", "same"),
    "int4, GPTQ, head int8": (Int4(), "gptq", "int8"),
    "int4, zero points, GPTQ": (Int4(symmetric=False), "gptq", "same"),
    "int4 in groups of 16, GPTQ": (Int4(group=16), "gptq", "same"),
    "nf4, to nearest": (NF4(), None, "same"),
    "nf4, GPTQ": (NF4(), "gptq", "same"),
    "nf4 in groups of 32, GPTQ, head int8": (NF4(group=32), "gptq", "int8"),
}
GOALS = {"int8, to nearest": 0.005, "int4, GPTQ, head int8": 0.02, "int4, GPTQ": 0.02, "nf4, GPTQ": 0.03}
BATCHES = 64
"""Of calibration, of tinyshakespeare's 12 × 64 characters."""
ROWS = 160
"""Of calibration, of 256 tokens that the 656 k model wrote."""


def quality(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """Loss on real weights."""
    found: dict[str, dict[str, float]] = {}
    folder = DATA / "tinystories-656k"
    if folder.is_dir():
        found["656 k"] = stories(load(folder).model, 8 if args.tiny else ROWS)
    else:
        missing.append(str(folder))
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
        "12 × 64 characters of training data. Measured on 64 other texts that it wrote, on 512 held-out windows of "
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
    for way, (scheme, method, head) in WAYS.items():
        plan = Plan(scheme, BATCHES if method else 0, method or "gptq", head=head)
        with tempfile.TemporaryDirectory() as folder:
            receipt = quantize_run(run, plan, root=Path(folder))[1]
        found[way] = receipt.after["loss"] - receipt.before["loss"]
    return found


def digits(run: Path) -> dict[str, tuple[float, float]]:
    """Exact match before and after, in percent."""
    found = {}
    for name, scheme in {"int8": Int8(), "int4": Int4(), "nf4": NF4()}.items():
        with tempfile.TemporaryDirectory() as folder:
            receipt = quantize_run(run, Plan(scheme), root=Path(folder))[1]
        found[name] = (100 * receipt.before["exact"], 100 * receipt.after["exact"])
    return found


@torch.no_grad()
def stories(model: Any, count: int) -> dict[str, float]:
    """Δ loss on text the model wrote itself; calibration on other such text, `count` rows of it."""

    def written(rows: int, seed: int) -> Tensor:
        seeds = [1000 * seed + i for i in range(rows)]
        made = generate(model, [[1]] * rows, Sampling(temperature=1.0), Stop(max_tokens=255), seeds=seeds, batch=64)
        return torch.tensor([[1, *r.tokens] for r in made.results])

    def loss(m: nn.Module) -> float:
        return F.cross_entropy(m(held[:, :-1]).flatten(0, 1).double(), held[:, 1:].flatten()).item()

    held, seen = written(min(64, count), 1), written(count, 2)
    before, found = loss(model), {}
    readings = [lambda m, ids=ids: m(ids) for ids in seen.split(8)]
    for way, (scheme, method, head) in WAYS.items():
        made = copy.deepcopy(model)
        quantize(made, scheme, Calibration(readings, method) if method else None, head=head)
        found[way] = loss(made) - before
    return found
