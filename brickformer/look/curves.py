"""Where training goes, as a page: loss, exact match, learning rate, gradient, updates and attention entropy by step.

Records come as dictionaries: step, loss, lr, grad_norm, tokens_per_s; at validation val_loss, exact; update.GROUP the
length of a group's last step divided by the length of its weights; entropy.MAP the mean entropy of a layer's attention,
nats. What a run did not record is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from brickformer.look.maps import left_out
from brickformer.look.page import fill, readable

Record = Mapping[str, float]

_CHARTS: Final[dict[str, dict[str, str] | str]] = {
    "loss": {"train": "loss", "val": "val_loss"},
    "exact": {"exact": "exact"},
    "lr": {"lr": "lr"},
    "grad_norm": {"grad_norm": "grad_norm"},
    "update": "update.",
    "att_entropy": "entropy.",
    "speed": {"speed": "tokens_per_s"},
}
_POINTS: Final = 1_000
_CURVES: Final = 24


def curves_page(
    records: Sequence[Record], title: str, *, steps: int, live: bool = False, quiet: float | None = None
) -> str:
    """The page. steps: how many were asked for. live: it asks its server for data.json every two seconds.

    quiet: seconds since the last record was written, where that is known.
    """
    data = curves_data(records, title, steps=steps, live=live, quiet=quiet)
    return fill(title, data, ["page.js", "training.js"], live=live)


def curves_data(
    records: Sequence[Record], title: str, *, steps: int, live: bool = False, quiet: float | None = None
) -> dict[str, Any]:
    """What the page shows."""
    left: list[tuple[str, str]] = []
    charts, missing = [], []
    for key, wanted in _CHARTS.items():
        names = wanted if isinstance(wanted, dict) else _beginning(records, wanted)
        if len(names) > _CURVES:
            gone = len(names) - _CURVES
            left.append(
                left_out(f"{gone} of {len(names)} curves of {key}", f"{key} 的 {len(names)} 条曲线中的 {gone} 条")
            )
            names = dict(list(names.items())[:_CURVES])
        series = [s for shown, name in names.items() if (s := _series(records, shown, name))["x"]]
        if series:
            charts.append({"key": key, "series": series})
        elif key not in ("exact", "speed"):
            missing.append(key)
    done = int(records[-1]["step"]) if records else 0
    english, chinese = _going(done, steps, quiet if live else None)
    return {
        "title": readable(title, 120),
        "about": {"en": f"step {done:,} of {steps:,}{english}", "zh": f"第 {done:,} 步，共 {steps:,} 步{chinese}"},
        "left_out": [{"en": en, "zh": zh} for en, zh in left],
        "charts": charts,
        "missing": missing if records else [],
        "steps_asked": steps if live else done,
        "stamp": f"{len(records)}.{done}{english}",
        "live": live,
    }


def _going(done: int, steps: int, quiet: float | None) -> tuple[str, str]:
    """Whether training goes on, as far as its numbers tell: nothing is said while they come."""
    if quiet is None:
        return "", ""
    if done >= steps:
        return " · finished", " · 已完成"
    minutes = int(quiet // 60)
    if not minutes:
        return "", ""
    return (
        f" · nothing new for {minutes} min: stopped, or at long steps",
        f" · 已有 {minutes} 分钟没有新数据：训练已停止，或每步很慢",
    )


def _beginning(records: Sequence[Record], beginning: str) -> dict[str, str]:
    """Shown name -> name, of all that begins so, in the order in which it was met."""
    found = dict.fromkeys(name for record in records for name in record if name.startswith(beginning))
    return {readable(name.removeprefix(beginning), 48): name for name in found}


def _series(records: Sequence[Record], shown: str, name: str) -> dict[str, Any]:
    """At most _POINTS points, the last one among them."""
    points = [(r["step"], r[name]) for r in records if name in r and math.isfinite(r[name])]
    every = math.ceil(len(points) / _POINTS) if points else 1
    kept = points[::-1][::every][::-1]
    return {"name": shown, "x": [x for x, _ in kept], "y": [float(f"{y:.5g}") for _, y in kept]}
