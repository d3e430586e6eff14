"""Where tuning begins, which numbers it learns, and how much data it takes: Δ loss of int4 on the 656 k model.

    python bench/tuning.py [--tiny]

Each row of the table is one run of `quantize` with every matrix in 4 bits: GPTQ, then `brickformer/quant/tune.py` with
its constants or the amount of data changed. Measured as in bench/quant_quality.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from unittest import mock

from common import keep, table
from quant_quality import MORE, ROWS, STEPS, Way, by_command

from brickformer.quant import Int4, tune


@dataclass(frozen=True)
class Trial:
    """edge: codes between the middle of a code and where u begins. travel: codes that u can move at most, twice."""

    said: str
    rows: int = MORE * ROWS
    steps: int = STEPS
    edge: float = tune.EDGE
    travel: float = tune.TRAVEL


TRIALS = [
    Trial("not tuned", ROWS, steps=0),
    Trial("scales alone", ROWS, travel=0.0),
    Trial("as `tune` does", ROWS),
    Trial("not tuned", steps=0),
    Trial("scales alone", travel=0.0),
    Trial("as `tune` does"),
    Trial("u begins on codes", edge=0.0, travel=1.3),
    Trial("u begins at most 0.3 from them", edge=0.3, travel=0.7),
    Trial("u begins at most 0.499 from them", edge=0.499),
]


def main() -> None:
    """Measure and keep the table."""
    began, (model, tiny), found = time.perf_counter(), by_command(__doc__), []
    part = ROWS // model.count
    for trial in TRIALS:
        with mock.patch.multiple(tune, EDGE=trial.edge, TRAVEL=trial.travel):
            delta = model.delta(Way(Int4(), "gptq", tune=trial.steps), trial.rows // part)
        found.append((trial.said, trial.rows // part, trial.edge, trial.travel / 2, f"{delta:+.4f}"))
        print(*found[-1], sep="   ", flush=True)
    text = table(("way", "rows", "codes from the middle", "codes that u may move", "Δ loss"), found)
    note = f"In nats a token. {STEPS} steps; rows of 256 tokens that the model wrote. `tune` begins {tune.EDGE} away."
    if not tiny:
        keep("tuning", "Where tuning begins", [text, f"{note} {time.perf_counter() - began:.0f} s."])


if __name__ == "__main__":
    main()
