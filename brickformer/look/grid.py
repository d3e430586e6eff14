"""All maps as one picture: a row a layer, a column a head, tokens along the sides where there is room for them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Final

from brickformer.look.amounts import cut
from brickformer.look.maps import Map
from brickformer.look.page import readable
from brickformer.look.view import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS: Final = 24
COLUMNS: Final = 16
NAMED: Final = 16  # tokens up to which each is named
_COLOURS: Final = ["#f7f6f3", "#1f5fa8"]
_EASTERN: Final = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Noto Serif CJK SC",
    "Noto Serif CJK JP",
    "SimHei",
    "Arial Unicode MS",
)


def picture(view: View) -> bytes:
    """A PNG file. What has no room is left out and said under the title."""
    from matplotlib import rc_context

    with rc_context({"font.family": list(_fonts())}):
        return _drawn(view)


def _drawn(view: View) -> bytes:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    maps, columns = view.maps[:ROWS], min(COLUMNS, max(m.heads for m in view.maps))
    longest = max(max(len(m.rows), len(m.keys)) for m in maps)
    size = 1.0 if longest > NAMED else min(1.5, 0.55 + 0.11 * longest)
    figure = Figure(figsize=(1.9 + size * columns, 0.7 + (size + 0.28) * len(maps)), dpi=130, layout="constrained")
    colours = LinearSegmentedColormap.from_list("look", _COLOURS)
    grid = figure.subplots(len(maps), columns, squeeze=False)
    for m, line in zip(maps, grid, strict=True):
        for h, ax in enumerate(line):
            if h >= m.heads:
                ax.set_visible(False)
                continue
            ax.imshow(m.weights[h].numpy() ** 0.7, cmap=colours, vmin=0.0, vmax=1.0, interpolation="nearest")
            ax.spines[:].set_color("#d5d2cc")
            _name(ax, m, view, first=h == 0)
            ax.set_title(m.labels[h], fontsize=7, color="#666d76", pad=2)
        line[0].set_ylabel(_short(m.name), fontsize=7, rotation=0, ha="right", va="center", labelpad=8)
    left = len(view.maps) - len(maps), max(m.heads for m in view.maps) - columns
    missing = [f"{n} {what} left out" for n, what in zip(left, ("layers", "heads a layer"), strict=True) if n > 0]
    lines = [_fitted(readable(view.title, 120), int(11 * figure.get_figwidth())), *missing]
    figure.suptitle("\n".join(lines), fontsize=10, x=0.02, ha="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _name(ax: Axes, m: Map, view: View, *, first: bool) -> None:
    """Tokens along the sides."""
    ax.tick_params(length=0, labelsize=6, pad=1)
    rows, keys = _texts(view, m.side, m.rows), _texts(view, m.key_side, m.keys)
    ax.set_xticks([]) if len(keys) > NAMED else ax.set_xticks(range(len(keys)), keys, rotation=60)
    ax.set_yticks([]) if len(rows) > NAMED or not first else ax.set_yticks(range(len(rows)), rows)


def _texts(view: View, side: str, places: range) -> list[str]:
    texts: Sequence[str] = view.source if side == "source" else view.labels
    return [_fitted(readable(texts[i]), 8) if i < len(texts) else str(i) for i in places]


def _fitted(text: str, most: int) -> str:
    """As much of a text as `most` characters have room for, once it is drawable."""
    if len(drawable(text)) <= most:
        return drawable(text)
    while text and len(drawable(text)) >= most:
        text = text[:-1]
    return drawable(text + "…")


def _short(name: str) -> str:
    parts = [p for p in name.split(".") if p not in ("stack", "layers")]
    return drawable(cut(" ".join(parts), 28)).replace(" ", "\n", 1)


def drawable(text: str) -> str:
    """A text in characters that the fonts of pictures have; of others the number. A $ would begin a formula."""
    known = _known()
    return "".join(c if ord(c) in known else f"U+{ord(c):04X}" for c in text).replace("$", r"\$")


@cache
def _fonts() -> tuple[str, ...]:
    """matplotlib's own, and one with Chinese, Japanese and Korean where the system has one."""
    from matplotlib.font_manager import FontProperties, fontManager

    there = {font.name for font in fontManager.ttflist}
    return (FontProperties().get_name(), *[name for name in _EASTERN if name in there][:1])


@cache
def _known() -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset().union(*(get_font(findfont(FontProperties(family=[f]))).get_charmap() for f in _fonts()))
