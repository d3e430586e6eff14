"""A map: who looks at whom in one layer. Collected row by row, whatever the calls were: whole, in chunks, step by step.

Rows and columns are absolute positions, so that a prompt read at once and tokens read one by one through a cache, a
ring or padding give the same map. Only the rows asked for are computed, tile by tile: at most TILE scores are held.
Shapes: H heads, T rows shown, S keys shown; B batch, G key heads, K width of a query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from brickformer.attend import Attend
from brickformer.errors import DataError, nearest
from brickformer.look.stats import HeadStats, alike, means, row_stats
from brickformer.mask import EMPTY, Span

TILE: Final = 2**20
"""Scores computed at once: 4 MB of float32, and several such on the way from scores to statistics."""

MOST: Final = 384
"""Tokens shown at most: more are neither seen nor read by anyone."""

Kind = Literal["self", "cross"]
What = Literal["attention", "hidden", "gradient"]


@dataclass(frozen=True, slots=True)
class Pick:
    """What is asked for; the less, the cheaper.

    rows: positions of queries, half open, None for all. only: beginnings of module paths or of their short forms, none
    for all; a path may be followed by heads, as in layers.1.mixer:1,3. batch: which row of the batch. keys: positions
    of source tokens kept in cross-attention.
    """

    rows: tuple[int, int] | None = None
    only: tuple[str, ...] = ()
    batch: int = 0
    keys: tuple[int, int] | None = None

    def wants(self, path: str) -> bool:
        """Whether a module is asked for."""
        return not self.only or bool(self._said(path))

    def heads(self, path: str, labels: Sequence[str]) -> list[int]:
        """Which heads of a module are asked for, by their places among its labels. Errors: DataError: no such head."""
        said = self._said(path)
        if not said or "" in said:
            return list(range(len(labels)))
        asked = [name.strip() for names in said for name in names.split(",")]
        for name in asked:
            if name not in labels:
                raise DataError(f"look: got head {name!r} of {path}, expected one of {', '.join(labels)}.")
        return [i for i, label in enumerate(labels) if label in asked]

    def _said(self, path: str) -> list[str]:
        """What follows the paths that hold this one: heads, or nothing."""
        parts = [p.partition(":") for p in self.only]
        return [heads for p, _, heads in parts if any(f"{name}.".startswith(f"{p}.") for name in (path, short(path)))]


def short(path: str) -> str:
    """A path as the table names it: decoder.1.cross for decoder.stack.layers.1.cross."""
    return path.replace(".stack.layers.", ".").removeprefix("stack.layers.")


@dataclass(slots=True)
class Map:
    """One layer's map. weights: (H, T, S) of the rows and keys shown; what is missing to 1 went to keys not shown.

    what: attention; the hidden attention of a recurrence; or the influence of inputs. side, key_side: whose tokens rows
    and keys are. rows, keys: the positions shown. stats: over these rows, over all keys. labels: names of the heads.
    """

    name: str
    kind: Kind
    what: What
    weights: Float[Tensor, "H T S"]
    rows: range
    keys: range
    side: Literal["source", "target"]
    key_side: Literal["source", "target"]
    stats: list[HeadStats]
    labels: list[str]
    numbers: list[int] = field(default_factory=list)  # which heads of the module these are; none: all

    @property
    def heads(self) -> int:
        """H."""
        return len(self.labels)

    @property
    def places(self) -> Sequence[int]:
        """Where these heads are among all heads of the module."""
        return self.numbers or range(self.heads)

    def alike(self) -> list[tuple[int, int]]:
        """Pairs of heads that look at the same."""
        return alike(self.weights)


@final
@dataclass(slots=True)
class Sheet:
    """A map while it is collected: rows by position, the last one that was met of each."""

    name: str
    kind: Kind
    what: What
    pick: Pick
    side: Literal["source", "target"] = "target"
    q_ids: Sequence[int] | None = None
    k_ids: Sequence[int] | None = None
    labels: list[str] | None = None
    chosen: list[int] | None = None  # heads asked for, known when the first rows are met
    most: int = 0  # keys seen so far
    number: int = 0  # of the call, where a module may be called twice
    tokens: int = 0  # queries there are, shown or not; known of foreign models
    _rows: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def add(
        self, weights: Float[Tensor, "H T S"], q_pos: Int[Tensor, " T"], k_pos: Int[Tensor, " S"], keys: int
    ) -> None:
        """Note rows. keys: how many there are in all."""
        self.most = max(self.most, keys)
        stats = row_stats(
            weights,
            q_pos,
            k_pos,
            keys=len(self.k_ids) if self.k_ids is not None else keys,
            q_ids=self.q_ids,
            k_ids=self.k_ids,
            cross=self.kind == "cross",
        )
        span = self.pick.rows if self.kind == "self" else self.pick.keys
        if span is not None:
            shown = (k_pos >= span[0]) & (k_pos < span[1])
            weights, k_pos = weights[..., shown], k_pos[shown]
        for i, position in enumerate(q_pos.tolist()):
            self._rows[position] = weights[:, i].clone(), k_pos, stats[:, i]

    def heads(self, path: str, count: int) -> list[int]:
        """Which of the heads of the module at `path` are asked for."""
        if self.chosen is None:
            labels = self.labels or [str(h + 1) for h in range(count)]
            self.chosen = self.pick.heads(path, labels)
            self.labels = [labels[h] for h in self.chosen]
        return self.chosen

    def wants(self, q_pos: Int[Tensor, " T"]) -> Tensor:
        """Which of the queries are asked for."""
        if self.pick.rows is None:
            return torch.ones_like(q_pos, dtype=torch.bool)
        return (q_pos >= self.pick.rows[0]) & (q_pos < self.pick.rows[1])

    def map(self) -> Map | None:
        """All rows side by side; None when none was met. Errors: DataError: weights that are not finite."""
        if not self._rows:
            return None
        positions = sorted(self._rows)
        rows = range(positions[0], positions[-1] + 1)
        span = self.pick.rows if self.kind == "self" else self.pick.keys
        keys = range(self.most) if span is None else range(min(span[0], self.most), min(span[1], self.most))
        heads = len(self._rows[positions[0]][0])
        out = torch.zeros(heads, len(rows), len(keys))
        for position in positions:
            weights, k_pos, _ = self._rows[position]
            out[:, position - rows.start, k_pos - keys.start] = weights
        if not bool(torch.isfinite(out).all()):
            raise DataError(
                f"look: {self.name}: its weights are not finite. Was the model trained to NaN? Check its loss."
            )
        stats = torch.stack([self._rows[p][2] for p in positions], 1)
        key_side: Literal["source", "target"] = "source" if self.kind == "cross" else self.side
        labels = self.labels or [str(h + 1) for h in range(heads)]
        made = Map(self.name, self.kind, self.what, out, rows, keys, self.side, key_side, means(stats), labels)
        made.numbers = self.chosen or []
        return made


def shown(count: int, rows: tuple[int, int] | None, left: list[tuple[str, str]]) -> tuple[int, int] | None:
    """The positions to show of `count`, None for all; what is not shown goes to `left`. Errors: DataError: no such."""
    if rows is None and count <= MOST:
        return None
    start, stop = rows or (count - MOST, count)
    if not 0 <= start < min(stop, count):
        raise DataError(f"look: got tokens {start}:{stop}, expected a part of 0:{count}, the {count} tokens there are.")
    stop = min(stop, count, start + MOST)
    for a, b in ((0, start), (stop, count)):
        if a < b:
            left.append(left_out(f"tokens {a} to {b - 1} of {count}", f"共 {count} 个词元中的第 {a} 到 {b - 1} 个"))
    return start, stop


def picked(
    count: int, sources: int, rows: tuple[int, int] | None, only: Sequence[str], left: list[tuple[str, str]]
) -> Pick:
    """What to show of so many tokens and source tokens; what is not goes to `left`. Errors: as `shown`."""
    pick = Pick(shown(count, rows, left), only=tuple(only), keys=(0, MOST) if sources > MOST else None)
    if sources > MOST:
        left.append(left_out(f"source tokens {MOST} to {sources - 1}", f"源端第 {MOST} 到 {sources - 1} 个词元"))
    return pick


def elsewhere(pick: Pick, paths: Sequence[str]) -> str:
    """What to say when none of the paths is asked for; nothing where one is, or where there are none."""
    if not paths or any(map(pick.wants, paths)):
        return ""
    asked = pick.only[0].partition(":")[0]
    return f"look: got {asked!r} to look at, expected the path of a part; {nearest(asked, paths)}"


def left_out(english: str, chinese: str) -> tuple[str, str]:
    """A sentence for people about what is not shown, in both languages."""
    return f"Left out: {english}.", f"未显示：{chinese}。"


def attended(
    sheet: Sheet,
    path: str,
    attend: Attend,
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    q_at: Span,
    k_at: Span,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Recompute what one call of attention looked at, as far as it is asked for, and note it on the sheet."""
    b = sheet.pick.batch
    q_pos, k_pos = positions(q_at, b, q.device), positions(k_at, b, q.device)
    real = k_pos != EMPTY
    rows = (q_pos != EMPTY) & sheet.wants(q_pos)
    keys = int(k_pos[real].max()) + 1 if bool(real.any()) else 0
    asked, shared = sheet.heads(path, q.shape[1]), q.shape[1] // k.shape[1]
    for i, j in _runs(rows, max(1, TILE // (max(1, k.shape[2]) * len(asked)))):
        here = part(q_at, b, i, j), part(k_at, b, 0, k.shape[2])
        extra = None if bias is None else bias[min(b, len(bias) - 1), None, :, i:j]
        found = []
        for g in range(k.shape[1]):  # one key head at a time: the queries that share it
            mine = [h for h in asked if h // shared == g]
            if not mine:
                continue
            own = extra if extra is None or extra.shape[1] == 1 else extra[:, mine]
            sink = None if sinks is None else sinks[mine]
            found.append(attend.weights(q[b, None, mine, i:j], k[b, None, g, None], *here, own, sink)[0])
        weights = torch.cat(found).float().cpu()
        sheet.add(weights[..., real.cpu()], q_pos[i:j].cpu(), k_pos[real].cpu(), keys)


def positions(at: Span, b: int, device: torch.device) -> Int[Tensor, " N"]:
    """Where the tokens of one row of the batch are."""
    pos = at.positions(device)
    return pos[b if len(pos) > 1 else 0]


def part(at: Span, b: int, i: int, j: int) -> Span:
    """Tokens i to j of one row of the batch."""
    pos, doc = (None if x is None else x[b if len(x) > 1 else 0, None, i:j] for x in (at.pos, at.doc))
    return Span(at.start + i, j - i, pos, doc)


def _runs(wanted: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """Neighbours that are wanted, at most so many at once."""
    places = wanted.nonzero()[:, 0].tolist()
    i = 0
    while i < len(places):
        j = i + 1
        while j < len(places) and places[j] == places[j - 1] + 1 and j - i < most:
            j += 1
        yield places[i], places[j - 1] + 1
        i = j
