"""What a fused call of somebody else's model looked at: its weights, computed again when they are asked for.

    weights = softmax(q kᵀ · scale + mask);     weights · v must be what the call gave, or the map is not what was used

That is asked of one row of each call. It does not hold where the call drops weights at random, which
`scaled_dot_product_attention(dropout_p=...)` does in eval mode as well.
Shapes: B batch, H heads, G key heads, T queries, S keys, K width, V width of a value, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, final

import torch
from torch import Tensor

from brickformer.look.amounts import cut
from brickformer.look.page import readable

NEAR: Final = {torch.float32: 1e-3, torch.float64: 1e-6}
"""How far an answer may be from weights · v, in parts of the largest |v|; of half types HALF."""
HALF: Final = 0.03


@final
class Scores:
    """(B, H, T, S) weights of a call of q (B, H, T, K), k (B, G, S, K), v (B, G, S, V) that gave out (B, H, T, V)."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> None:
        self.q, self.k, self.v, self.out, self.mask, self.causal = q, k, v, out, mask, causal
        self.scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        self.shape = torch.Size((*q.shape[:3], k.shape[2]))

    def rows(self, b: int, rows: Tensor, heads: list[int]) -> Tensor:
        """(H, R, S) of some queries and heads of one row of the batch."""
        rows = rows.to(self.q.device)
        q, k = self.q[b, heads][:, rows].float(), self.k[b, self._shared(self.k, heads)].float()
        scores = q @ k.mT * self.scale
        if self.mask is not None:
            mask = self.mask.expand(self.shape)[b, heads][:, rows]
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.float()
        if self.causal:
            keys = torch.arange(self.shape[-1], device=rows.device)
            scores = scores.masked_fill(keys[None] > rows[:, None], -math.inf)
        return scores.softmax(-1).nan_to_num(0.0)

    def give_what_came_out(self, b: int, row: int, heads: list[int]) -> bool:
        """Whether the weights of one query, multiplied with the values, are what the call gave for it."""
        v = self.v[b, self._shared(self.v, heads)].float()
        found = self.rows(b, torch.tensor([row]), heads) @ v
        given = self.out[b, heads, row].float().nan_to_num(0.0)
        return float((found[:, 0] - given).abs().max()) <= NEAR.get(self.out.dtype, HALF) * float(v.abs().max())

    def _shared(self, x: Tensor, heads: list[int]) -> list[int]:
        """Which key heads some query heads read."""
        return [h // (self.shape[1] // x.shape[1]) for h in heads]


def something_else(paths: Iterable[str]) -> list[tuple[str, str]]:
    """A sentence about modules whose answers are not what their maps give, in both languages."""
    said = cut(", ".join(readable(p, 60) or "the model" for p in paths), 200)
    if not said:
        return []
    return [
        (
            f"Not what was used: the maps of {said} times the values are not what came out; dropout in eval mode, say.",
            f"与实际所用不符：{said} 的图乘以值不等于其输出，例如评估模式下仍有 dropout。",
        )
    ]
