"""Training: losses, optimizers, schedules, the loop, checkpoints, logs. Knows no task, no generation and no model.

settings = Training(steps=500, optim=Muon(), schedule=Cosine(warmup=50))
run = RunFolder.create(Path("runs"), "reverse", spec=spec.to_dict(), run=settings.to_dict())
fit(model, settings, data.batch, forward, evaluate=evaluate, run=run, progress=progress())
"""

from brickformer.train.checkpoint import RunFolder
from brickformer.train.log import Bar, Lines, Metrics, Progress, Silent, progress
from brickformer.train.loop import Batch, Result, fit, mean_loss
from brickformer.train.losses import IGNORE, cross_entropy
from brickformer.train.optim import AdamW, Muon, Optimizers, OptimSpec
from brickformer.train.picture import draw
from brickformer.train.schedule import Constant, Cosine, InverseSqrt, LinearDecay, ScheduleSpec, Trapezoid
from brickformer.train.settings import Training

__all__ = [
    "IGNORE",
    "AdamW",
    "Bar",
    "Batch",
    "Constant",
    "Cosine",
    "InverseSqrt",
    "LinearDecay",
    "Lines",
    "Metrics",
    "Muon",
    "OptimSpec",
    "Optimizers",
    "Progress",
    "Result",
    "RunFolder",
    "ScheduleSpec",
    "Silent",
    "Training",
    "Trapezoid",
    "cross_entropy",
    "draw",
    "fit",
    "mean_loss",
    "progress",
]
