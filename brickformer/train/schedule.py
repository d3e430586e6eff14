"""Schedules: the learning rate as a factor in [0, 1] of its base value. Step s = 1 ... S, warm-up w, floor m.

    warm-up      s/w                                       while s < w, for every schedule
    Cosine       m + (1-m) · (1 + cos π u)/2               u = (s-w)/(S-w)         arXiv 1608.03983, eq. 5
    LinearDecay  m + (1-m) · (1 - u)
    InverseSqrt  √(w/s), at least m                        arXiv 1706.03762, eq. 3, scaled to a peak of 1
    Constant     1
    Trapezoid    1, then a straight line down to m over the last c·S steps         arXiv 2405.18392

A schedule is a pure function of the step, so that it has no state to save. Warm-up matters most where gradients are
large at first: Post-LN cannot do without it, Pre-LN can (arXiv 2002.04745).
"""

from __future__ import annotations

import math
from abc import abstractmethod

from brickformer.spec import Spec, spec


class ScheduleSpec(Spec):
    """Slot: how the learning rate moves during a run."""

    __slots__ = ()

    warmup: int
    """Steps until the factor first reaches 1; 0 for none."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """What to multiply the base learning rate with at `step` of 1 ... `steps`."""


@spec("cosine")
class Cosine(ScheduleSpec):
    """Half a cosine from 1 down to `floor` (arXiv 1608.03983)."""

    warmup: int = 100
    floor: float = 0.1

    def check(self) -> None:
        """Warm-up is a count, floor a factor."""
        _check(self, self.warmup, self.floor)

    def factor(self, step: int, steps: int) -> float:
        """s/w, then m + (1-m)(1 + cos πu)/2."""
        if step < self.warmup:
            return step / self.warmup
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * _progress(step, self.warmup, steps)))


@spec("lineardecay")
class LinearDecay(ScheduleSpec):
    """A straight line from 1 down to `floor`."""

    warmup: int = 100
    floor: float = 0.0

    def check(self) -> None:
        """Warm-up is a count, floor a factor."""
        _check(self, self.warmup, self.floor)

    def factor(self, step: int, steps: int) -> float:
        """s/w, then m + (1-m)(1-u)."""
        if step < self.warmup:
            return step / self.warmup
        return self.floor + (1 - self.floor) * (1 - _progress(step, self.warmup, steps))


@spec("inversesqrt")
class InverseSqrt(ScheduleSpec):
    """Down with the square root of the step, whatever the end is (arXiv 1706.03762, eq. 3)."""

    warmup: int = 100
    floor: float = 0.0

    def check(self) -> None:
        """Warm-up is a count of at least 1 (it sets the scale), floor a factor."""
        _check(self, self.warmup, self.floor)
        if self.warmup < 1:
            raise self.refuse("warmup", "at least 1, as it sets the scale of the decay")

    def factor(self, step: int, steps: int) -> float:
        """s/w, then √(w/s)."""
        if step < self.warmup:
            return step / self.warmup
        return max(self.floor, math.sqrt(self.warmup / step))


@spec("constant")
class Constant(ScheduleSpec):
    """Warm-up, then the base learning rate to the end."""

    warmup: int = 0

    def check(self) -> None:
        """Warm-up is a count."""
        _check(self, self.warmup, 0.0)

    def factor(self, step: int, steps: int) -> float:
        """s/w, then 1."""
        return step / self.warmup if step < self.warmup else 1.0


@spec("trapezoid")
class Trapezoid(ScheduleSpec):
    """Up, flat, down: the flat part can be stopped anywhere, the way down takes the last `cooldown` of the steps.

    Also known as warmup-stable-decay (arXiv 2404.06395; arXiv 2405.18392).
    """

    warmup: int = 100
    cooldown: float = 0.2
    floor: float = 0.0

    def check(self) -> None:
        """Warm-up is a count, floor a factor, cooldown a share of the run."""
        _check(self, self.warmup, self.floor)
        if not 0.0 <= self.cooldown <= 1.0:
            raise self.refuse("cooldown", "a share of the steps, from 0 to 1")

    def factor(self, step: int, steps: int) -> float:
        """s/w, then the lower of 1 and the line that reaches m at step S."""
        if step < self.warmup:
            return step / self.warmup
        start = max(self.warmup, round(steps * (1 - self.cooldown)))
        return 1.0 if step <= start else self.floor + (1 - self.floor) * (1 - _progress(step, start, steps))


def _progress(step: int, start: int, steps: int) -> float:
    """u: how much of the way from step `start` to step `steps` is done, in [0, 1]."""
    return min(1.0, (step - start) / max(1, steps - start))


def _check(schedule: ScheduleSpec, warmup: int, floor: float) -> None:
    if warmup < 0:
        raise schedule.refuse("warmup", "a number of steps, 0 or more")
    if not 0.0 <= floor <= 1.0:
        raise schedule.refuse("floor", "a factor of the base learning rate, from 0 to 1")
