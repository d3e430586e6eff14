"""Losses: what training makes small.

    cross entropy       L = -Σ_t Σ_v q_t(v) · log softmax(z_t)_v        q_t = one at the target
    label smoothing ε   q_t = (1-ε) at the target + ε/V everywhere      arXiv 1512.00567, 7

Sums over tokens, not means, together with how many tokens were counted: sums of micro-batches add up to the sum of the
large batch however ragged their padding is, means do not. Losses live here, never in a model.
Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

IGNORE: Final = -100
"""The target of a token that has no loss: padding, a prompt."""


def cross_entropy(
    logits: Float[Tensor, "... V"], targets: Int[Tensor, "..."], smoothing: float = 0.0
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """(sum of the losses of all tokens in nats, how many tokens were counted); targets equal to IGNORE count nothing.

    Equal to `torch.nn.functional.cross_entropy(..., reduction="sum")`; half-precision logits are raised to float32.
    """
    flat = logits.flatten(0, -2)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    total = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, label_smoothing=smoothing, reduction="sum")
    return total, (targets != IGNORE).sum()
