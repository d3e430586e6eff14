"""The receipt of a quantization: what it cost, in numbers, as a table, as JSON and as a picture.

every matrix    kind, error, bytes before and after
the whole       bytes of coded matrices and of the file, loss, bits a byte or exact match, milliseconds a token
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, final

from brickformer.quant.quantize import Matrix

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@final
@dataclass(frozen=True, slots=True)
class Receipt:
    """method: how it was rounded, in words. before, after: measured alike, as far as there are such: "loss", "bits a
    byte", "exact", "ms a token", "file bytes"."""

    method: str
    matrices: list[Matrix]
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)

    @property
    def coded(self) -> list[Matrix]:
        """Those that were coded."""
        return [m for m in self.matrices if m.kind != "kept"]

    @property
    def ratio(self) -> float:
        """Bytes of the coded matrices, scales included, as a part of what they took before."""
        return sum(m.after for m in self.coded) / max(1, sum(m.before for m in self.coded))

    def worst(self, count: int) -> list[str]:
        """The names of the matrices with the largest errors, the worst first."""
        ranked = sorted(self.coded, key=lambda m: -m.error)
        return [m.name for m in ranked if m.after][:count]

    def table(self) -> str:
        """For people: how it was done, every matrix on a line, then the whole."""
        width = max(len(m.name) for m in self.matrices)
        lines = [self.method, "", f"{'matrix':<{width}}  {'shape':>13}  {'kind':<9}   error      bytes      before"]
        for m in self.matrices:
            shape = f"{m.shape[0]} × {m.shape[1]}"
            error = "" if m.kind == "kept" else f"{m.error:.4f}"
            lines.append(f"{m.name:<{width}}  {shape:>13}  {m.kind:<9}  {error:>6} {m.after:>10,}  {m.before:>10,}")
        before, after = sum(m.before for m in self.coded), sum(m.after for m in self.coded)
        lines += ["", f"{len(self.coded)} matrices in {after:,} bytes of {before:,}, {self.ratio:.3f} ×"]
        for name in self.before:
            if name in self.after:
                lines.append(_compared(name, self.before[name], self.after[name]))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """As data."""
        return {
            "method": self.method,
            "ratio": self.ratio,
            "before": dict(self.before),
            "after": dict(self.after),
            "matrices": [asdict(m) for m in self.matrices],
        }

    def picture(self) -> Figure:
        """Bars: the error of each matrix, in the model's order; what was kept has none and says so."""
        from matplotlib.figure import Figure

        shown = [m for m in self.matrices if m.after]
        title = textwrap.fill(self.method, 90, break_on_hyphens=False)
        height = min(40.0, 1.2 + 0.22 * len(shown) + 0.17 * title.count("\n"))
        figure = Figure(figsize=(8.0, height), dpi=120, layout="constrained")
        ax = figure.subplots()
        ax.barh(range(len(shown)), [m.error for m in shown], color="#4878a8")
        for at, m in enumerate(shown):
            if m.kind == "kept":
                ax.annotate(
                    "kept", (0.0, at), (4, 0), textcoords="offset points", va="center", fontsize=7, color="#666"
                )
        ax.set_yticks(range(len(shown)), [m.name for m in shown], fontsize=7)
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xlabel("relative error of its outputs (of its weights where no data was read)")
        ax.set_title(title, fontsize=10)
        return figure


def _compared(name: str, before: float, after: float) -> str:
    match name:
        case "file bytes":
            return f"{name:<11} {before:,.0f} → {after:,.0f} ({after / before:.3f} ×)"
        case "exact":
            return f"{name:<11} {100 * before:.1f} % → {100 * after:.1f} %"
        case "ms a token":
            return f"{name:<11} {before:.2f} → {after:.2f}"
        case _:
            return f"{name:<11} {before:.4f} → {after:.4f} ({after - before:+.4f})"
