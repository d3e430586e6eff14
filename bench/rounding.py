"""What each part of rounding by data gives: Δ loss of the 656 k model, as in bench/quant_quality.py.

    python bench/rounding.py [--tiny]

Drift (brickformer/quant/drift.py) and polish (polish.py) are left out in turn; then other codes, and the head in full.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from common import keep, table
from quant_quality import Way, by_command

from brickformer.quant import NF4, Int4

WHERE = "brickformer.quant.quantize."
WAYS: dict[str, tuple[Way, bool, bool]] = {
    "int4, to nearest": (Way(Int4()), False, False),
    "int4, GPTQ": (Way(Int4(), "gptq"), False, False),
    "int4, GPTQ and polish": (Way(Int4(), "gptq"), False, True),
    "int4, drift, GPTQ and polish (what `Calibration` does)": (Way(Int4(), "gptq"), True, True),
    "the same with zero points": (Way(Int4(symmetric=False), "gptq"), True, True),
    "the same, NF4 in groups of 64": (Way(NF4(), "gptq"), True, True),
    "int4, the head in full": (Way(Int4(), "gptq", "keep"), True, True),
    "int4 with zero points, the head in full": (Way(Int4(symmetric=False), "gptq", "keep"), True, True),
}
"""A way, with drift or without, with polish or without."""


@contextmanager
def parts(drift: bool, polish: bool) -> Iterator[None]:
    """Rounding by data with or without its parts."""
    with ExitStack() as stack:
        if not drift:
            stack.enter_context(mock.patch(WHERE + "followed", lambda weight, h, d: weight))
        if not polish:
            stack.enter_context(mock.patch(WHERE + "polish", lambda weight, coded, h: coded))
        yield


def main() -> None:
    """Measure and keep the table."""
    began, (model, tiny), found = time.perf_counter(), by_command(__doc__), []
    for name, (way, drift, polish) in WAYS.items():
        with parts(drift, polish):
            found.append((name, f"{model.delta(way, model.count):+.4f}"))
        print(*found[-1], sep="   ", flush=True)
    note = (
        f"In nats a token; {model.count} rows of 256 tokens that the model wrote. {time.perf_counter() - began:.0f} s."
    )
    if not tiny:
        keep("rounding", "What each part of rounding by data gives", [table(("way", "Δ loss"), found), note])


if __name__ == "__main__":
    main()
