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
_PIECE: Final = 2**17  # numbers that stay in a core's cache between two passes over them
_NARROW: Final = (torch.float32, torch.bfloat16, torch.float16)


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
    if kept.device.type == "cpu" and not torch.compiler.is_compiling() and dtype in _NARROW:
        return _expand_in_pieces(kept, scale, width, dtype)
    return (kept[..., :width].float() * scale).to(dtype)


def _expand_in_pieces(kept: Tensor, scale: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The same numbers without a second large tensor: each is a fresh one of the system, page by page.

    At 4096 tokens of the 134 M decoder 153 ms a token instead of 237, at 1024 as much as at once.
    """
    batch, heads, tokens, _ = kept.shape
    out = torch.empty(batch, heads, tokens, width, dtype=dtype)
    step = max(64, _PIECE // (heads * width))
    for row in range(batch):
        for at in range(0, tokens, step):
            piece = out[row, :, at : at + step]
            piece.copy_(kept[row, :, at : at + step, :width]).mul_(scale[row, :, at : at + step])
    return out
