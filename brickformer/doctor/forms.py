"""The forms in which people pass masks: shape, type and polarity. The adapter tries them; nobody guesses.

Shapes: valid (B, S), True at real tokens; T queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """A way to say what may be seen. keeps: True (or 1) means 'may be seen'."""

    name: str
    make: Callable[[Tensor, int], Tensor]
    keeps: bool


def _tril(valid: Tensor, queries: int) -> Tensor:
    return torch.ones(queries, queries, dtype=torch.bool).tril()


def _inf(blocked: Tensor) -> Tensor:
    return torch.zeros(blocked.shape).masked_fill(blocked, float("-inf"))


PADDING = (
    Form("(B, S) bool, True keeps", lambda v, q: v, True),
    Form("(B, S) bool, True blocks", lambda v, q: ~v, False),
    Form("(B, S) 1/0 integers, 1 keeps", lambda v, q: v.long(), True),
    Form("(B, 1, 1, S) bool, True keeps", lambda v, q: v[:, None, None], True),
    Form("(B, 1, S) bool, True keeps", lambda v, q: v[:, None], True),
    Form("(B, 1, 1, S) bool, True blocks", lambda v, q: ~v[:, None, None], False),
    Form("(B, S) 1/0 floats, 1 keeps", lambda v, q: v.float(), True),
    Form("(B, S) floats, -inf blocks", lambda v, q: _inf(~v), False),
    Form("(B,) lengths", lambda v, q: v.sum(1), True),
)

CAUSAL = (
    Form("(T, T) bool, True keeps", _tril, True),
    Form("(T, T) bool, True blocks", lambda v, q: ~_tril(v, q), False),
    Form("(T, T) floats, -inf blocks", lambda v, q: _inf(~_tril(v, q)), False),
    Form("(B, T, T) bool, True keeps", lambda v, q: _tril(v, q)[None] & v[:, None], True),
    Form("(B, 1, T, T) bool, True keeps", lambda v, q: (_tril(v, q) & v[:, None])[:, None], True),
    Form("(B, 1, T, T) bool, True blocks", lambda v, q: ~(_tril(v, q) & v[:, None])[:, None], False),
    Form("(T, T) 1/0 integers, 1 keeps", lambda v, q: _tril(v, q).long(), True),
)

OPEN = (
    Form("(S, S) bool, nothing blocked", lambda v, q: torch.zeros(q, q, dtype=torch.bool), False),
    Form("(S, S) bool, everything kept", lambda v, q: torch.ones(q, q, dtype=torch.bool), True),
)

SQUARE = (*CAUSAL, *OPEN)
"""Masks that speak of no padding."""


def by_name(name: str) -> tuple[Form, ...]:
    """The padding forms, the likeliest for this name first."""
    low = name.lower()
    if "attention_mask" in low or "attn_mask" in low:
        first = [PADDING[2]]
    elif "padding" in low or "pad" in low:
        first = [PADDING[1]]
    elif "len" in low:
        first = [PADDING[8]]
    else:
        first = []
    return (*first, *(f for f in PADDING if f not in first))


def says_keep(name: str) -> bool | None:
    """Whether a name promises a polarity: attention_mask keeps, key_padding_mask blocks; None: no promise."""
    low = name.lower()
    if low in ("attention_mask", "valid", "src_valid", "valid_mask", "keep_mask"):
        return True
    if "key_padding_mask" in low:
        return False
    return None
