"""A batch: what a training step reads.

    inputs  (B,T)   what the model is fed            targets (B,T)   what it should say at each place; IGNORE: no loss
    src     (B,S)   what an encoder reads, or None   src_valid (B,S) True at tokens of src; None: nothing is padded
    valid   (B,T)   True at tokens of inputs; None: nothing is padded

Shapes: B batch, T target tokens, S source tokens. All padding is on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from brickformer.errors import DataError

IGNORE: Final = -100
"""A target that counts for nothing: the default ignore_index of torch's cross-entropy."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One batch on one device. tokens: how many targets count; counted from `targets` where it is not given."""

    inputs: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    src: Int[Tensor, "B S"] | None = None
    src_valid: Bool[Tensor, "B S"] | None = None
    valid: Bool[Tensor, "B T"] | None = None
    tokens: int = -1

    def __post_init__(self) -> None:
        if self.tokens < 0:
            object.__setattr__(self, "tokens", int((self.targets != IGNORE).sum()))

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        src, src_valid, valid = (None if t is None else t.to(device) for t in (self.src, self.src_valid, self.valid))
        return Batch(self.inputs.to(device), self.targets.to(device), src, src_valid, valid, tokens=self.tokens)


def pad(rows: Sequence[Sequence[int]], value: int) -> Int[Tensor, "B T"]:
    """Rows of ids side by side, filled up on the right with `value`: (B, longest row). Errors: DataError: no rows."""
    if not rows:
        raise DataError("pad: got no rows, expected at least one.")
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.long)
