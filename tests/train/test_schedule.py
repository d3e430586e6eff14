"""Schedules against tables worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brickformer.errors import SpecError
from brickformer.spec import read
from brickformer.train import Constant, Cosine, InverseSqrt, LinearDecay, ScheduleSpec, Trapezoid

HALF = math.sqrt(0.5)

TABLES: list[tuple[ScheduleSpec, int, dict[int, float]]] = [
    (Cosine(warmup=4, floor=0.0), 12, {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0, 6: (1 + HALF) / 2, 8: 0.5, 12: 0.0}),
    (Cosine(warmup=4, floor=0.2), 12, {2: 0.5, 4: 1.0, 8: 0.6, 10: 0.2 + 0.4 * (1 - HALF), 12: 0.2}),
    (Cosine(warmup=0, floor=0.1), 10, {5: 0.55, 10: 0.1}),
    (LinearDecay(warmup=2, floor=0.0), 10, {1: 0.5, 2: 1.0, 4: 0.75, 6: 0.5, 10: 0.0}),
    (LinearDecay(warmup=2, floor=0.5), 10, {1: 0.5, 2: 1.0, 6: 0.75, 10: 0.5}),
    (InverseSqrt(warmup=4), 400, {1: 0.25, 4: 1.0, 16: 0.5, 64: 0.25, 400: 0.1}),
    (InverseSqrt(warmup=4, floor=0.3), 400, {16: 0.5, 64: 0.3, 400: 0.3}),
    (Constant(), 10, {1: 1.0, 10: 1.0}),
    (Constant(warmup=5), 10, {1: 0.2, 4: 0.8, 5: 1.0, 10: 1.0}),
    (Trapezoid(warmup=2, cooldown=0.4), 10, {1: 0.5, 2: 1.0, 6: 1.0, 7: 0.75, 8: 0.5, 10: 0.0}),
    (Trapezoid(warmup=2, cooldown=0.4, floor=0.2), 10, {6: 1.0, 8: 0.6, 10: 0.2}),
    (Trapezoid(warmup=8, cooldown=0.5), 10, {4: 0.5, 8: 1.0, 9: 0.5, 10: 0.0}),  # the warm-up eats into the way down
]


@pytest.mark.parametrize(("schedule", "steps", "table"), TABLES, ids=lambda x: repr(x)[:40])
def test_factors_are_those_of_the_table(schedule: ScheduleSpec, steps: int, table: dict[int, float]) -> None:
    found = {step: schedule.factor(step, steps) for step in table}
    assert found == pytest.approx(table, abs=1e-12)


def test_inverse_sqrt_is_equation_3_scaled_to_a_peak_of_one() -> None:
    """lr = d^-0.5 · min(step^-0.5, step · warmup^-1.5), divided by its largest value d^-0.5 · warmup^-0.5."""
    d, warmup = 512, 40
    for step in range(1, 500):
        paper = d**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert InverseSqrt(warmup=warmup).factor(step, 499) == pytest.approx(paper / (d**-0.5 * warmup**-0.5))


@given(
    make=st.sampled_from([Cosine, LinearDecay, InverseSqrt, Trapezoid]),
    warmup=st.integers(1, 50),
    extra=st.integers(0, 200),
    floor=st.just(0.0) | st.floats(1e-30, 1),
)
def test_up_to_one_at_the_end_of_the_warm_up_then_down_to_the_floor(
    make: type[Cosine], warmup: int, extra: int, floor: float
) -> None:
    steps = warmup + extra
    factors = [make(warmup=warmup, floor=floor).factor(step, steps) for step in range(1, steps + 1)]
    up, down = factors[:warmup], factors[warmup - 1 :]
    assert up[-1] == 1.0
    assert all(a < b for a, b in pairwise(up))
    assert all(a >= b - 1e-12 for a, b in pairwise(down))
    assert all(f >= floor - 1e-12 for f in down)
    assert min(factors) > 0 or floor == 0


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"kind": "cosine", "warmup": -1}, "spec.warmup"),
        ({"kind": "cosine", "floor": 1.5}, "spec.floor"),
        ({"kind": "inversesqrt", "warmup": 0}, "spec.warmup"),
        ({"kind": "trapezoid", "cooldown": 2}, "spec.cooldown"),
        ({"kind": "constant", "warmup": -1}, "spec.warmup"),
        ({"kind": "cosin"}, "did you mean 'cosine'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(data: dict[str, object], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        read(ScheduleSpec, data)
