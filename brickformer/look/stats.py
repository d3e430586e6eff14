"""What one head does, in numbers: means over its rows of what each row a (weights over S keys, Σ a ≤ 1) says.

    entropy     -Σ a ln a                    nats: 0 looks at one token, ln n at n alike
    distance    Σ a |i - j|                  tokens between query i and key j
    first       a at the first token         a sink, where it is large without reason (arXiv 2309.17453)
    previous    a at j = i - 1
    same_token  Σ a over j ≠ i with the token of i         induction starts from it (arXiv 2209.11895)
    diagonal    a at j = i                   the same place: copying
    anti        a at j = n - 1 - i           the mirrored place among n keys: reversing
    removed     how far the answers move when the head gives zeros (see ablate.py)

A row that cannot have a value (no previous token, no equal one) does not count in that mean.
Shapes: H heads, T rows, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

NAMES: Final = ("entropy", "distance", "first", "previous", "same_token", "diagonal", "anti")

DEAD: Final = 1e-3
"""A head whose removal moves the answers by less than this share of what the strongest head does is called dead."""
ALIKE: Final = 0.05
"""Two heads of a layer whose maps differ by less than this, ½ Σ |a - b| in the mean of the rows, are called alike."""


@dataclass(frozen=True, slots=True)
class HeadStats:
    """Means of one head; NaN where no row has a value. removed: NaN where it was not measured."""

    entropy: float
    distance: float
    first: float
    previous: float
    same_token: float
    diagonal: float
    anti: float
    removed: float = math.nan


def row_stats(
    weights: Float[Tensor, "H T S"],
    q_pos: Int[Tensor, " T"],
    k_pos: Int[Tensor, " S"],
    *,
    keys: int,
    q_ids: Sequence[int] | None = None,
    k_ids: Sequence[int] | None = None,
    cross: bool = False,
) -> Float[Tensor, "H T N"]:
    """The values of every row, in the order of NAMES. keys: n. q_ids, k_ids: the tokens at positions 0, 1, ..."""
    q, k = q_pos[:, None], k_pos[None, :]
    entropy = torch.special.entr(weights).sum(-1)
    distance = (weights * (q - k).abs()).sum(-1)
    first = _share(weights, k == 0, q >= (0 if cross else 1))
    previous = _share(weights, k == q - 1, q > 0)
    diagonal = _share(weights, k == q, q < keys)
    mirrored = k == keys - 1 - q
    anti = _share(weights, mirrored, (mirrored & (weights > 0).any(0)).any(1, keepdim=True))
    same = torch.full_like(entropy, math.nan)
    if q_ids is not None and k_ids is not None:
        own, there = _ids(q_ids, q_pos), _ids(k_ids, k_pos)
        equal = (own[:, None] == there[None, :]) & (own[:, None] >= 0)
        if not cross:
            equal &= k != q
        seen = equal & (weights > 0).any(0)
        same = _share(weights, equal, seen.any(1, keepdim=True))
    return torch.stack([entropy, distance, first, previous, same, diagonal, anti], -1)


def _share(weights: Tensor, where: Tensor, counts: Tensor) -> Float[Tensor, "H T"]:
    """The weight on the keys of `where`; NaN in rows that do not count."""
    return (weights * where).sum(-1).masked_fill(~counts[:, 0], math.nan)


def _ids(ids: Sequence[int], pos: Tensor) -> Tensor:
    """The token at each position, -1 where none is known."""
    table = torch.tensor([*ids, -1])
    return table[pos.clamp(max=len(ids))]


def means(rows: Float[Tensor, "H T N"]) -> list[HeadStats]:
    """One HeadStats a head."""
    return [HeadStats(*values) for values in torch.nanmean(rows.double(), 1).tolist()]


def dead(removed: Iterable[float]) -> list[int]:
    """Which heads of a model do nothing here: their removal moves the answers by next to nothing."""
    values = list(removed)
    most = max((v for v in values if not math.isnan(v)), default=0.0)
    return [i for i, v in enumerate(values) if not math.isnan(v) and v <= DEAD * most]


def alike(weights: Float[Tensor, "H T S"]) -> list[tuple[int, int]]:
    """Pairs of heads with the same map. Rows with a single key say nothing and are left out."""
    rows = (weights > 0).sum(-1).amax(0) > 1
    if not bool(rows.any()):
        return []
    w = weights[:, rows]
    pairs = []
    for i in range(len(w)):
        apart = 0.5 * (w[i + 1 :] - w[i]).abs().sum(-1).mean(-1)  # (H - i - 1)
        pairs += [(i, i + 1 + j) for j, d in enumerate(apart.tolist()) if d < ALIKE]
    return pairs
