"""Heads in a graph, (1, T, H·K): filled up to the width that kernels want, cut again, shared by several queries."""

from __future__ import annotations

from brickformer.export.graph import Graph


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
