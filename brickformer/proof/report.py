"""The report of a proof: one row a property, and every failure with the brick, the property and the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from brickformer.errors import SpecError

Outcome = Literal["holds", "broken", "not owed"]


@dataclass(frozen=True)
class Row:
    """A property of a model. name: in a word or two. outcome; detail: what was tried, or the numbers, or why not owed.

    where, kind: the brick that breaks it.
    """

    name: str
    outcome: Outcome
    detail: str
    where: str = ""
    kind: str = ""

    def failure(self) -> str:
        """``layers.2.mixer (mamba): causal: changing token 7 changed the output at token 3 by 0.013, ...``."""
        place = f"{self.where} ({self.kind})" if self.where else self.kind
        return f"{place}: {self.name}: {self.detail}"


@dataclass(frozen=True)
class Report:
    """What was proved of a model. kind: what it is. layers: how many it has; distinct: how many of them differ."""

    kind: str
    layers: int
    distinct: int
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether every property that is owed holds."""
        return not self.failures

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows that are broken."""
        return tuple(row for row in self.rows if row.outcome == "broken")

    def line(self) -> str:
        """``11 properties of 4 layers``: how many were tried, of how much."""
        tried = sum(row.outcome != "not owed" for row in self.rows)
        return f"{tried} properties of {self.layers} layer{'s' if self.layers != 1 else ''}"

    def verdict(self) -> str:
        """``2 of 11 properties do not hold.``"""
        tried = sum(row.outcome != "not owed" for row in self.rows)
        return f"{len(self.failures)} of {tried} properties do not hold."

    def __str__(self) -> str:
        """The table."""
        return "\n".join(self.table())

    def table(self) -> list[str]:
        """One line a row, then one a failure."""
        names = max(len(row.name) for row in self.rows)
        lines = [f"{row.name:<{names}}  {row.outcome:<8}  {_cell(row)}".rstrip() for row in self.rows]
        return lines + ([""] if self.failures else []) + [row.failure() for row in self.failures]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        rows = [
            {"property": r.name, "outcome": r.outcome, "detail": r.detail, "where": r.where, "kind": r.kind}
            for r in self.rows
        ]
        return {"model": self.kind, "layers": self.layers, "distinct": self.distinct, "ok": self.ok, "properties": rows}

    def raise_if_broken(self) -> None:
        """Errors: SpecError with the first failure, and how many more there are."""
        if self.failures:
            more = f" (and {len(self.failures) - 1} more)" if len(self.failures) > 1 else ""
            raise SpecError(f"{self.failures[0].failure()}{more}")


def _cell(row: Row) -> str:
    return row.where or row.kind if row.outcome == "broken" else row.detail
