"""The loss curve as a picture: training and validation loss, and exact match below it where there is one."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from brickformer.files import write_whole
from brickformer.train.log import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRAIN, _VALIDATION, _EXACT = "#9aa7b5", "#1f5fa8", "#2e8b57"


def draw(records: Sequence[Record], path: Path, title: str) -> None:
    """Draw the records of a run and write the PNG file. Draws nothing when there are none. Errors: RunError: disk."""
    if not records:
        return
    from matplotlib.figure import Figure

    exact = _series(records, "exact")
    heights = [2, 1] if exact[0] else [1]
    figure = Figure(figsize=(7.2, 5.4 if exact[0] else 4.0), dpi=144, layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    _draw_loss(axes[0, 0], records, title)
    if exact[0]:
        _draw_exact(axes[1, 0], *exact)
    axes[-1, 0].set_xlabel("step")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_whole(path, buffer.getvalue())


def _draw_loss(ax: Axes, records: Sequence[Record], title: str) -> None:
    """Training loss as a line, validation loss as a line with points, each labelled with its last value."""
    train, validation = _series(records, "loss"), _series(records, "val_loss")
    values = [*train[1], *validation[1]]
    if values and min(values) > 0 and max(values) / min(values) > 20:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
    if train[0]:
        ax.plot(*train, color=_TRAIN, linewidth=1.4, label=f"training, last {train[1][-1]:.3f}")
    if validation[0]:
        ax.plot(
            *validation,
            color=_VALIDATION,
            linewidth=1.8,
            marker="o",
            markersize=3.5 if len(validation[0]) <= 40 else 0,
            label=f"validation, last {validation[1][-1]:.3f}",
        )
    ax.set_ylabel("loss (nats a token)")
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    if values:
        ax.legend(frameon=False)
    _tidy(ax)


def _draw_exact(ax: Axes, steps: Sequence[float], values: Sequence[float]) -> None:
    """Exact match in percent."""
    percent = [100 * v for v in values]
    size = 3.5 if len(steps) <= 40 else 0
    ax.plot(steps, percent, color=_EXACT, linewidth=1.8, marker="o", markersize=size, label=f"last {percent[-1]:.1f} %")
    ax.set_ylim(-4, 104)
    ax.set_yticks([0, 25, 50, 75, 100])
    ax.set_ylabel("exact match (%)")
    ax.legend(frameon=False, loc="lower right")
    _tidy(ax)


def _tidy(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.8)
    ax.margins(x=0.02)


def _series(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the records that have a finite `name`."""
    points = [(r["step"], r[name]) for r in records if name in r and math.isfinite(r[name])]
    return [step for step, _ in points], [value for _, value in points]
