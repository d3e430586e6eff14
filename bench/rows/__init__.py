"""The rows of docs/claims.md, each a function without arguments that measures one claim and returns a `Row`."""

from collections.abc import Callable

from rows import attention, inference, learning, size
from rows.row import FOUND, PICTURES, Row

ROWS: dict[str, Callable[[], Row]] = {
    "mask": attention.mask,
    "scale": attention.scale,
    "split": attention.split,
    "heads": attention.heads,
    "tables": attention.tables,
    "beyond": learning.beyond,
    "placement": learning.placement,
    "gelu": learning.gelu,
    "ffn": size.ffn,
    "memory": learning.memory,
    "padding": learning.padding,
    "reversal": learning.reversal,
    "dropout": inference.dropout,
    "cache": inference.cache,
    "sdpa": inference.sdpa,
    "moe": size.moe,
    "bits": size.bits,
    "mamba": inference.mamba,
}

__all__ = ["FOUND", "PICTURES", "ROWS", "Row"]
