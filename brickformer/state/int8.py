"""Vectors of a cache as int8: a quarter of the bytes of float32, with one scale a token and head.

    s = max |x_i| / 127,    n_i = round(x_i / s),    x_i ≈ s · n_i        |error| ≤ max |x| / 254

Symmetric, rounded to nearest; a vector of zeros stays one, and one that is not finite stays not finite. The float32
scale lies in the last four bytes of its vector, so that whatever moves a vector moves its scale, and the rest of a
cache need not know. Numbers and scales depend on their own token alone: prefill, chunks and single steps keep the same.

Shapes: B batch, G key heads, T tokens, K width of a vector, P = K rounded up to a multiple of 4, and 4.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor

LEVELS: Final = 127
_SCALE: Final = torch.float32.itemsize


def packed_width(width: int) -> int:
    """Bytes of a packed vector: its numbers, padded so that the scale is aligned, and the scale."""
    return 0 if width == 0 else -(-width // _SCALE) * _SCALE + _SCALE


def shrink(x: Float[Tensor, "B G T K"]) -> Int8[Tensor, "B G T P"]:
    """Vectors as int8, each followed by its scale."""
    width = x.shape[-1]
    if width == 0:
        return x.to(torch.int8)
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / LEVELS
    numbers = (wide / torch.where(scale == 0.0, 1.0, scale)).round().to(torch.int8)
    numbers = F.pad(numbers, (0, packed_width(width) - _SCALE - width))
    return torch.cat([numbers, scale.view(torch.int8)], dim=-1)


def expand(kept: Int8[Tensor, "B G T P"], width: int, dtype: torch.dtype) -> Float[Tensor, "B G T K"]:
    """The vectors again, in `dtype`."""
    if width == 0:
        return kept.to(dtype)
    scale = kept[..., -_SCALE:].view(torch.float32)
    return (kept[..., :width].float() * scale).to(dtype)
