"""Planted bugs and clean variants: what the doctor is examined on (`brick doctor --exam`), and lessons (`brick trap`)."""

from __future__ import annotations

from typing import Final

from brickformer.doctor.mutants import (
    attention,
    decoding,
    future,
    losses,
    masks,
    ours,
    positions,
    sampling,
    styles,
    training,
    weights,
)
from brickformer.doctor.mutants.bug import Clean, Planted
from brickformer.doctor.mutants.clean import CLEAN

BUGS: Final[tuple[Planted, ...]] = (
    *future.BUGS,
    *masks.BUGS,
    *attention.BUGS,
    *positions.BUGS,
    *decoding.BUGS,
    *losses.BUGS,
    *weights.BUGS,
    *training.BUGS,
    *sampling.BUGS,
    *ours.BUGS,
    *styles.BUGS,
)
"""Every planted bug."""

__all__ = ["BUGS", "CLEAN", "Clean", "Planted"]
