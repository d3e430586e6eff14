"""The assembled model as a table: one line a brick, layers that are alike folded into one.

brick (its path in the model)     what it is     parameters     floating-point operations and cache bytes of a token
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from brickformer.attend import Attend
from brickformer.embed import Embedding, LogitHead
from brickformer.feedforward import GLUFeedForward, MLPFeedForward
from brickformer.layers import Residual
from brickformer.linear import FusedLinear
from brickformer.look.amounts import amount, cut
from brickformer.look.costs import Cost, cost
from brickformer.mixers.attention import AttentionMixer
from brickformer.mixers.cross import CrossAttention
from brickformer.mixers.shortconv import ShortConvMixer
from brickformer.moe import MoEFeedForward
from brickformer.norms import OffsetRootMeanSquare
from brickformer.positions import NoPosition, RopePosition, SinusoidPosition


@dataclass(frozen=True)
class Node:
    """One brick. name: its path below the parent. what: its size in words. params: with those of its parts, each once.

    tied: a parameter was counted before. attends: where queries meet keys. times: neighbours that are exactly alike.
    active: how many of them a token uses, where that is not all.
    """

    name: str
    what: str
    params: int
    tied: bool
    cost: Cost
    parts: tuple[Node, ...] = ()
    attends: bool = False
    times: int = 1
    active: int | None = None


def tree(model: nn.Module, tokens: int, dim: int, name: str) -> Node:
    """The bricks of a model, at `tokens` tokens of context."""
    return _node(model, tokens, dim, name, set())


def _node(module: nn.Module, tokens: int, dim: int, name: str, seen: set[int]) -> Node:
    parameters = list(module.parameters())
    fresh = [p for p in parameters if id(p) not in seen]
    tied = len(fresh) < len({id(p) for p in parameters})
    parts: list[Node] = []
    for child_name, child in module.named_children():
        if isinstance(child, nn.ModuleList):  # its layers stand directly below the stack
            layers = [_node(m, tokens, dim, n, seen) for n, m in child.named_children()]
            parts += [replace(n, name=f"{child_name}.{n.name}") for n in _folded(layers)]
        elif not _is_nothing(child):
            parts.append(_node(child, tokens, dim, child_name, seen))
    seen.update(id(p) for p in parameters)
    whole, what = cost(module, tokens, dim), describe(module)
    params = sum(p.numel() for p in fresh)
    if len(parts) == 1 and parts[0].times == 1 and params == parts[0].params:  # a holder is shown as what it holds
        return replace(parts[0], name=f"{name}.{parts[0].name}", what=", ".join(filter(None, (parts[0].what, what))))
    if isinstance(module, CrossAttention):
        parts = [replace(p, what=f"{p.what}, once") if p.name == "kv" else p for p in parts]
    if isinstance(module, MoEFeedForward):
        k = module.router.top_k
        parts = [replace(p, what=f"{p.what}, {k} used", active=k) if p.times > 1 else p for p in parts]
    parts = [_attending(part, _between(whole, parts)) if part.attends else part for part in parts]
    return Node(name, what, params, tied, whole, tuple(parts), attends=isinstance(module, Attend))


def _between(whole: Cost, parts: list[Node]) -> int:
    """What a brick does between its parts: products of queries and keys, sums of values."""
    return whole.flops + whole.source_flops - sum(p.cost.flops + p.cost.source_flops for p in parts)


def _attending(node: Node, flops: int) -> Node:
    return replace(node, cost=Cost(flops=flops))


def _folded(nodes: list[Node]) -> Iterator[Node]:
    """Runs of equal neighbours, or of an equal pattern of neighbours, as one (each)."""
    bare = [replace(n, name="") for n in nodes]
    count = len(bare)
    periods = range(1, count // 2 + 1)
    period = next((p for p in periods if count % p == 0 and bare == bare[:p] * (count // p)), count)
    if period < count:
        for i in range(period):
            names = [nodes[j].name for j in range(i, count, period)]
            yield replace(nodes[i], name=_range(names, period), times=count // period)
        return
    i = 0
    while i < count:
        j = i
        while j < count and bare[j] == bare[i]:
            j += 1
        yield replace(nodes[i], name=_range([n.name for n in nodes[i:j]], 1), times=j - i)
        i = j


def _range(names: list[str], period: int) -> str:
    """0-5, or 0,2,..,10 when every second one is alike."""
    if len(names) < 3:
        return ",".join(names)
    return f"{names[0]}-{names[-1]}" if period == 1 else f"{names[0]},{names[1]},..,{names[-1]}"


def _is_nothing(module: nn.Module) -> bool:
    """Bricks that do nothing are not shown; dropout is said of the brick that holds it."""
    return isinstance(module, nn.Identity | NoPosition | nn.Dropout)


def describe(module: nn.Module) -> str:
    """Shapes and choices of one brick; empty for a plain holder of other bricks."""
    match module:
        case FusedLinear() if len(set(module.parts)) == 1:
            return f"{module.in_features} → {len(module.parts)} × {module.parts[0]}{_bias(module)}"
        case FusedLinear():
            return f"{module.in_features} → {' + '.join(map(str, module.parts))}{_bias(module)}"
        case nn.Linear():
            return f"{module.in_features} → {module.out_features}{_bias(module)}"
        case nn.Embedding():
            return f"{module.num_embeddings} × {module.embedding_dim}"
        case nn.LayerNorm() | nn.RMSNorm():
            name = "RMSNorm" if isinstance(module, nn.RMSNorm) else "LayerNorm"
            return f"{name} {'×'.join(map(str, module.normalized_shape))}"
        case OffsetRootMeanSquare():
            return f"OffsetRMSNorm {len(module.weight)}"
        case AttentionMixer():
            shared = f" over {module.kv_heads}" if module.kv_heads != module.qkv.parts[0] // module.width else ""
            return f"{module.qkv.parts[0] // module.width}{shared} heads × {module.width}"
        case ShortConvMixer():
            return f"convolution of {len(module.weight)}"
        case CrossAttention():
            return f"{module.q.out_features // module.width} heads × {module.width}"
        case Attend():
            return _mask(module)
        case MLPFeedForward() | GLUFeedForward():
            return ("GLU" if isinstance(module, GLUFeedForward) else "MLP") + _drop(module.drop, ", ")
        case Residual():
            return _drop(module.drop)
        case RopePosition():
            return f"rotary, {2 * len(module.rates[torch.float32])} channels"
        case SinusoidPosition():
            return f"sin, cos {' × '.join(map(str, module.table.shape))}"
        case Embedding():
            scaled = [f"× {module.scale:.4g}"] if module.scale != 1.0 else []
            return ", ".join([*scaled, *filter(None, [_drop(module.drop)])])
        case LogitHead():
            return f"cap {module.softcap:g}" if module.softcap is not None else ""
        case _:
            return "" if any(True for _ in module.children()) else type(module).__name__


def _drop(drop: nn.Dropout, gap: str = "") -> str:
    return f"{gap}drop {drop.p:g}" if drop.p > 0.0 else ""


def _bias(module: nn.Linear) -> str:
    return "" if module.bias is None else " + bias"


def _mask(attend: Attend) -> str:
    said = ["causal" if attend.mask.causal else "sees all"]
    if attend.mask.window is not None:
        said.append(f"window {attend.mask.window}")
    if attend.softcap is not None:
        said.append(f"cap {attend.softcap:g}")
    if attend.dropout > 0.0:
        said.append(f"drop {attend.dropout:g}")
    return ", ".join(said)


def table(root: Node, width: int) -> list[str]:
    """Lines at most `width` wide (and at least 60)."""
    rows = [("brick", "", "params", "FLOPs", "KV bytes"), *_rows(root, "", "")]
    right = [max(len(row[i]) for row in rows) for i in (2, 3, 4)]
    room = max(width, 60) - sum(right) - 2 * 3 - 2
    left = min(max(len(row[0]) for row in rows), room * 3 // 5)
    middle = min(max(len(row[1]) for row in rows), room - left)
    lines = []
    for name, what, params, flops, kv in rows:
        line = f"{cut(name, left):{left}}  {cut(what, middle):{middle}}"
        line += f"  {params:>{right[0]}}  {flops:>{right[1]}}  {kv:>{right[2]}}"
        lines.append(line.rstrip())
    return lines


def _rows(node: Node, head: str, below: str) -> Iterator[tuple[str, str, str, str, str]]:
    many = f"{node.times} × " if node.times > 1 else ""
    what = f"{many}{node.what or ('layer' if node.times > 1 else '')}"
    if node.tied and not node.parts:
        what += ", tied"
    c, times = node.cost, node.times if node.active is None else node.active
    yield (
        f"{head}{node.name}",
        what,
        amount(node.params * node.times) if node.params else "",
        ("" if c.known else "≥ ") + amount(c.flops * times) if c.flops or not c.known else "",
        amount(c.kv_bytes * times) if c.kv_bytes else "",
    )
    for i, part in enumerate(node.parts):
        last = i == len(node.parts) - 1
        yield from _rows(part, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))
