"""The settings of training, as a spec."""

from __future__ import annotations

from brickformer.spec import Spec, spec
from brickformer.train.optim import AdamW, OptimSpec
from brickformer.train.schedule import Cosine, ScheduleSpec


@spec("training")
class Training(Spec):
    """How a model is trained.

    steps: optimizer steps. batch: rows of a micro-batch. accumulate: micro-batches of a step. clip: the most the norm
    of the gradient may be, or none. smoothing: of the labels. ema: decay of the average of the weights that is
    evaluated and saved in their place, or none. log_every, validate_every: in steps. save_minutes: between two saves.
    """

    steps: int = 500
    batch: int = 64
    accumulate: int = 1
    optim: OptimSpec = AdamW()
    schedule: ScheduleSpec = Cosine()
    clip: float | None = 1.0
    smoothing: float = 0.0
    ema: float | None = None
    log_every: int = 10
    validate_every: int = 100
    save_minutes: float = 5.0

    def check(self) -> None:
        """Counts from 1, shares below 1, a warm-up that ends."""
        counts = {
            "steps": self.steps,
            "batch": self.batch,
            "accumulate": self.accumulate,
            "log_every": self.log_every,
            "validate_every": self.validate_every,
        }
        for name, count in counts.items():
            if count < 1:
                raise self.refuse(name, "1 or more")
        if self.clip is not None and self.clip <= 0.0:
            raise self.refuse("clip", "a norm above 0", "Leave it out (null) for none.")
        if not 0.0 <= self.smoothing < 1.0:
            raise self.refuse("smoothing", "0 to below 1")
        if self.ema is not None and not 0.0 < self.ema < 1.0:
            raise self.refuse("ema", "a decay between 0 and 1, like 0.999", "Leave it out (null) for none.")
        if self.save_minutes < 0.0:
            raise self.refuse("save_minutes", "0 or more")
        if self.schedule.warmup > self.steps:
            raise self.refuse("steps", f"at least the warm-up ({self.schedule.warmup})", "Set schedule.warmup lower.")
