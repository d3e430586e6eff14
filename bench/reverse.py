"""Digit reversal over ten seeds: `brick train reverse` beside x-transformers, transformers (Marian) and nn.Transformer.

    python bench/reverse.py [--seeds 10] [--peer-seeds 3]

Everything goes through the command a user types; the figures come from the metrics it writes. The peers are trained by
a script of their own (see `PEERS` in common.py) on the same task, 500 steps of 64 sequences.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import PEERS, keep, median, table

PEER_NAMES = {"xt": "x-transformers", "hf": "transformers (Marian)", "torch": "nn.Transformer, N(0,1)·√d"}


def ours(seed: int) -> dict[str, float]:
    """One run by the command line, with an exact match every ten steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "brickformer", "train", "reverse", "--seed", str(seed), "--out", folder]
        began = time.perf_counter()
        subprocess.run([*command, "--set", "train.validate_every=10"], check=True, capture_output=True)
        seconds = time.perf_counter() - began
        run = next(Path(folder).iterdir())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    exact = {row["step"]: row["exact"] for row in rows if "exact" in row}
    return {
        "first95": next((s for s, e in exact.items() if e >= 0.95), float("inf")),
        "first100": next((s for s, e in exact.items() if e == 1.0), float("inf")),
        "exact": list(exact.values())[-1],
        "loss": [row["loss"] for row in rows if "loss" in row][-1],
        "steps": max(exact),
        "seconds": seconds,
    }


def peer(name: str, seed: int) -> str:
    """The one line a peer's script prints."""
    command = [sys.executable, str(PEERS / "reverse_peers.py"), name, str(seed), "500"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else ""


def main() -> None:
    """Measure and keep the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=int, default=10)
    p.add_argument("--peer-seeds", type=int, default=3)
    args = p.parse_args()
    runs = []
    for seed in range(args.seeds):
        runs.append(ours(seed))
        print(seed, runs[-1], flush=True)
    rows = [
        (
            s,
            r["steps"],
            r["first95"],
            r["first100"],
            f"{r['loss']:.4f}",
            f"{100 * r['exact']:.1f} %",
            f"{r['seconds']:.0f}",
        )
        for s, r in enumerate(runs)
    ]
    whole = sum(r["exact"] == 1.0 for r in runs)
    rows.append(
        (
            "median",
            "",
            f"{median(r['first95'] for r in runs):g}",
            f"{median(r['first100'] for r in runs):g}",
            f"{median(r['loss'] for r in runs):.4f}",
            f"100 % on {whole} of {len(runs)}",
            f"{median(r['seconds'] for r in runs):.0f}",
        )
    )
    header = (
        "seed",
        "steps",
        "first ≥ 95 % at step",
        "first 100 % at step",
        "last loss",
        "exact match at the end",
        "seconds",
    )
    found = []
    for name, title in PEER_NAMES.items():
        for seed in range(args.peer_seeds):
            line = peer(name, seed)
            print(line or f"{name}: no result", flush=True)
            m = re.search(r"loss ([\d.]+) val exact ([\d.]+) first>=95% at step (\w+)\s+([\d.]+)s", line)
            found.append(
                (title, seed, m[3].replace("None", "never"), m[1], f"{100 * float(m[2]):.1f} %", m[4])
                if m
                else (title, seed, *["not run"] * 4)
            )
    peers = table(
        ("peer", "seed", "first ≥ 95 % at step", "last loss", "exact match at step 500", "seconds of training"), found
    )
    keep(
        "reverse",
        "Digit reversal: 1000 training sequences of 3 to 6 digits, 500 others to answer",
        [
            "Exact match of the whole greedy answer, end included, every 10 steps (peers: every 50). Seconds are of "
            "the whole command, start of Python and every validation included.",
            table(header, rows),
            "The same task, 500 steps of 64 sequences, by the peers:",
            peers,
        ],
        "x-transformers",
        "transformers",
    )


if __name__ == "__main__":
    main()
