"""The probes, causes before symptoms: the table of what a healthy Transformer does."""

from __future__ import annotations

from typing import Final

from brickformer.doctor.exam import Probe
from brickformer.doctor.probes import (
    attention,
    batch,
    cached,
    causality,
    length,
    loss,
    memory,
    norms,
    numbers,
    overfit,
    padding,
    parameters,
    positions,
    randomness,
)

PROBES: Final[tuple[Probe, ...]] = (
    randomness.PROBE,
    numbers.INPUT,
    attention.SOFTMAX,
    attention.MASK_VALUE,
    attention.HEADS,
    attention.SCALE,
    norms.PROBE,
    causality.PROBE,
    padding.PROBE,
    batch.PROBE,
    memory.PROBE,
    positions.PROBE,
    cached.PROBE,
    loss.SHIFT,
    loss.PADDING,
    loss.FIRST,
    parameters.REGISTERED,
    parameters.SHARED,
    parameters.DEAD,
    parameters.TIED,
    parameters.COPIES,
    length.PROBE,
    numbers.PRECISION,
    numbers.MASKED,
    overfit.PROBE,
)
"""Every probe, in the order in which they run."""
