"""What a view says in words: a line a head, a line a layer, and what was left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from brickformer.look.amounts import cut
from brickformer.look.maps import short
from brickformer.look.page import readable
from brickformer.look.view import View

_COLUMNS = {
    "entropy": "entropy",
    "distance": "distance",
    "first": "first",
    "previous": "previous",
    "same_token": "same",
    "diagonal": "diagonal",
    "anti": "mirrored",
    "removed": "removed",
}


def heads(view: View, most: int = 60) -> list[str]:
    """A table of the heads, those that contribute most first where there are more than `most`."""
    found = [(m.name, m.labels[h], s) for m in view.maps for h, s in enumerate(m.stats)]
    gone = max(0, len(found) - most)
    if gone:
        found = sorted(found, key=lambda x: -x[2].removed if math.isfinite(x[2].removed) else 0.0)[:most]
    rows = [("map", "head", *_COLUMNS.values())]
    for name, label, s in found:
        shares = [s.first, s.previous, s.same_token, s.diagonal, s.anti]
        rows.append(
            (
                _short(name),
                label,
                _number(s.entropy, "{:.2f}"),
                _number(s.distance, "{:.1f}"),
                *(_number(100 * x, "{:.0f} %") for x in shares),
                _number(s.removed, "{:.2g}"),
            )
        )
    return [*_aligned(rows), *([f"and {gone} heads more, on the page"] if gone else [])]


def layers(view: View, width: int) -> list[str]:
    """What each layer would answer at the last tokens that `width` has room for, the last layer first."""
    if not view.layers:
        return []
    names = [layer.name.replace("stack.layers.", "") for layer in view.layers]
    texts = [[readable(view.name(ids[0]), 12) for ids in layer.ids] for layer in view.layers]
    given = [readable(view.labels[view.layers_from + i], 12) for i in range(len(texts[0]))]
    widths = [max(len(row[i]) for row in [given, *texts]) for i in range(len(given))]
    room, first = width - max(map(len, names)) - 8, len(given)
    while first > 0 and room >= widths[first - 1] + 2:
        first -= 1
        room -= widths[first] + 2
    rows = [("after", *given[first:], "KL")]
    for name, layer, said in zip(reversed(names), reversed(view.layers), reversed(texts), strict=True):
        rows.append((name, *said[first:], f"{sum(layer.kl) / len(layer.kl):.3f}"))
    return _aligned(rows)


def findings(view: View) -> list[str]:
    """Dead heads, heads that look at the same, what was left out."""
    said = []
    marked, idle = view.marked()
    if marked:
        which = "these" if idle else "all heads but these"
        said.append(f"removed alone, {which} change next to nothing (others may do the same work):")
        for i, m in enumerate(view.maps):
            some = [m.labels[h] for j, h in marked if j == i]
            said += [f"  {_short(m.name)} {cut(', '.join(some), 200)}"] if some else []
    for m in view.maps:
        said += [f"{_short(m.name)}: heads {m.labels[a]} and {m.labels[b]} look at the same" for a, b in m.alike()[:3]]
    return [*said, *(english for english, _ in view.left_out)]


def _short(name: str) -> str:
    return readable(short(name), 120)


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "–"


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
