"""tinyshakespeare, character by character: our recipe beside nanoGPT's, at equal parameters, steps and tokens.

    NANOGPT=path/to/nanoGPT/model.py python bench/shakespeare.py [--seeds 3] [--muon] [--data FILE]

Ours is `brick train text` as a user types it, within nanoGPT's budget (context 64, batch 12, 2000 steps). The peers are
nanoGPT's model with its own recipe (AdamW) and, when asked for, with Muon, by a script of their own. Runs alternate,
one at a time.
Our loss is measured twice: over all of the held-out tenth in windows of 64, and as the peers' script does, over 100
batches of 64 random windows.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from common import DATA, PEERS, keep, median, table
from torch import Tensor

from brickformer.recipes import Trained

BUDGET = ["--steps", "2000", "--set", "task.context=64", "--set", "train.batch=12"]


def ours(data: Path, seed: int) -> dict[str, float]:
    """One run by the command line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "brickformer", "train", "text", "--data", str(data), "--seed", str(seed)]
        began = time.perf_counter()
        subprocess.run([*command, *BUDGET, "--out", folder], check=True, capture_output=True)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, **measure(next(Path(folder).iterdir()), data)}


@torch.no_grad()
def measure(run: Path, data: Path) -> dict[str, float]:
    """Parameters of a run's model; its loss on all of the held-out tenth; the same by the peers' own measure."""
    trained = Trained.open(run)
    text = data.read_text()
    ids = torch.tensor(trained.target.encode(text))[int(0.9 * len(text)) :]

    def loss(windows: Tensor) -> float:
        return F.cross_entropy(trained.model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).item()

    torch.manual_seed(1)
    drawn = [torch.randint(len(ids) - 64, (64,)) for _ in range(100)]
    every = torch.arange(0, len(ids) - 64, 64)
    return {
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "all": loss(ids[every[:, None] + torch.arange(65)]),
        "random": sum(loss(ids[starts[:, None] + torch.arange(65)]) for starts in drawn) / len(drawn),
    }


def peer(optimizer: str, data: Path, seed: int) -> tuple[float, float, int] | None:
    """Validation loss, seconds, parameters of nanoGPT's model; None where it cannot run."""
    if not os.path.exists(os.environ.get("NANOGPT", "")):
        return None
    command = [sys.executable, str(PEERS / "shakespeare_peers.py"), optimizer, str(data), str(seed)]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    wall = time.perf_counter() - began
    m = re.search(r"val ([\d.]+) .* params (\d+)", done.stdout)
    return (float(m[1]), wall, int(m[2])) if m else None


def main() -> None:
    """Measure and keep the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--muon", action="store_true", help="also nanoGPT's model with Muon on its matrices")
    p.add_argument("--data", type=Path, default=DATA / "tinyshakespeare" / "input.txt")
    args = p.parse_args()
    rows, mine, adamw = [], [], []
    for seed in range(args.seeds):
        run = ours(args.data, seed)
        mine.append(run)
        cells = (f"{run['all']:.4f}", f"{run['random']:.4f}", f"{run['seconds']:.0f}", f"{run['parameters']:,}")
        rows.append(("brickformer `train text`", seed, *cells))
        print(rows[-1], flush=True)
        for optimizer in ("adamw", "muon") if args.muon else ("adamw",):
            found = peer(optimizer, args.data, seed)
            if found is None:
                rows.append((f"nanoGPT, {optimizer}", seed, "not run: set NANOGPT", "", "", ""))
                continue
            if optimizer == "adamw":
                adamw.append(found)
            rows.append((f"nanoGPT, {optimizer}", seed, "", f"{found[0]:.4f}", f"{found[1]:.0f}", f"{found[2]:,}"))
            print(rows[-1], flush=True)
    losses = [r["random"] for r in mine]
    said = f"Ours ends at {median(losses):.3f} in the median (worst {max(losses):.3f})"
    if adamw:
        ratio = median(r["seconds"] for r in mine) / median(r[1] for r in adamw)
        said += f", in {ratio:.2f} × the wall time of nanoGPT's recipe, which ends at {median(r[0] for r in adamw):.3f}"
    header = ("recipe", "seed", "loss, all windows", "loss, random windows", "seconds, whole command", "parameters")
    keep(
        "shakespeare",
        "tinyshakespeare: 2000 steps of 12 windows of 64 characters",
        [said + ".", table(header, rows)],
    )


if __name__ == "__main__":
    main()
