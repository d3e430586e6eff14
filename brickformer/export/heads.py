"""Heads in a graph, (1, T, H·K): filled up to the width that kernels want, cut again, shared by several queries."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from brickformer.export.graph import Graph
from brickformer.mixers.attention import AttentionMixer
from brickformer.positions import NoPosition
from brickformer.positions.rotary import RopePosition

HEAD: Final = 8
"""Kernels of attention take heads whose width is a multiple of this."""


def widen(g: Graph, x: str, heads: int, width: int, wide: int) -> str:
    """Zeros after each head."""
    if wide == width:
        return x
    cut = g.op("Reshape", x, g.ints(0, 0, heads, width))
    padded = g.op("Pad", cut, g.ints(0, 0, 0, 0, 0, 0, 0, wide - width))
    return str(g.op("Reshape", padded, g.ints(0, 0, heads * wide)))


def narrow(g: Graph, x: str, heads: int, width: int, wide: int) -> str:
    """Without the zeros."""
    if wide == width:
        return x
    cut = g.op("Reshape", x, g.ints(0, 0, heads, wide))
    return str(g.op("Reshape", g.op("Slice", cut, g.ints(0), g.ints(width), g.ints(3)), g.ints(0, 0, heads * width)))


def repeat(g: Graph, x: str, groups: int, heads: int, wide: int) -> str:
    """Key heads as often as query heads share them: (1, S, G·K) -> (1, S, H·K)."""
    if groups == heads:
        return x
    cut = g.op("Reshape", x, g.ints(0, 0, groups, 1, wide))
    many = g.op("Expand", cut, g.ints(1, 1, groups, heads // groups, wide))
    return str(g.op("Reshape", many, g.ints(0, 0, heads * wide)))


def plain(module: AttentionMixer) -> bool:
    """Whether the kernel can do with queries, keys and values as one product leaves them."""
    norms = (module.q_norm_all, module.k_norm_all, module.q_norm, module.k_norm)
    if not all(isinstance(norm, nn.Identity) for norm in norms):
        return False
    match module.position:
        case NoPosition():
            return module.width % HEAD == 0
        case RopePosition() as rope:
            return module.width == 2 * len(rope.rates[torch.float32]) and module.width % (2 * HEAD) == 0
        case _:
            return False
