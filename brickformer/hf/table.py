"""Two-way tables of names: which tensors of a checkpoint make which of our parameters.

    ours[to[j]] = theirs_joined[j]          theirs_joined = cat(theirs_1, theirs_2, ...) along the rows

Everything a published checkpoint does to the shape of a weight is this one line: a new name (one of theirs, no `to`), a
fused projection of ours made of separate ones of theirs (several of theirs), heads that lie interleaved in the file (a
permutation `to`), a matrix stored as its transpose (`turned`). No number is changed, so reading and writing are each
other's inverse to the last bit, and one table serves both. A number that would have to change (a gain stored as g - 1)
is a brick's matter (`OffsetRMSNorm`), not a table's.

    linear("mixer.qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")     join
    linear("mixer.qkv", "attn.query_key_value", rows=interleaved(H, K, K, K))           permute
    linear("ffn.into", "mlp.c_fc", bias=True, turned=True)                              transpose
    Tie("lm_head.weight", "model.embed_tokens.weight")                                  stored once, or twice alike

Names are those of `state_dict`, ours on the left, theirs on the right. H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One of our parameters, and the tensors of theirs that it is made of.

    ours: its name. theirs: their names, in the order in which they are joined. to: row j of theirs joined is our row
    to[j]; None keeps the order. turned: each of theirs is a transpose. row: theirs is a matrix of one row.
    """

    ours: str
    theirs: tuple[str, ...]
    to: Tensor | None = None
    turned: bool = False
    row: bool = False

    def below(self, ours: str, theirs: str) -> Rule:
        """The same rule, further down in both trees."""
        return replace(self, ours=ours + self.ours, theirs=tuple(theirs + name for name in self.theirs))

    def renamed(self, name: Callable[[str], str]) -> Rule:
        """The same rule for a file that has other names."""
        return replace(self, theirs=tuple(map(name, self.theirs)))


@final
@dataclass(frozen=True, slots=True)
class Tie:
    """A second name in the file for a tensor it already holds: `name` may be missing, else it must equal `of`."""

    name: str
    of: str

    def below(self, ours: str, theirs: str) -> Tie:
        """The same tie, further down."""
        return Tie(theirs + self.name, theirs + self.of)

    def renamed(self, name: Callable[[str], str]) -> Tie:
        """The same tie for a file that has other names."""
        return Tie(name(self.name), name(self.of))


Line = Rule | Tie
Table = Iterable[Line]


def tensor(ours: str, *theirs: str, rows: Tensor | None = None, turned: bool = False) -> Rule:
    """One tensor of ours, made of one or more of theirs."""
    return Rule(ours, theirs, rows, turned)


def linear(
    ours: str, *theirs: str, bias: bool = False, rows: Tensor | None = None, turned: bool = False
) -> Iterator[Rule]:
    """The weight, and where there is one the bias, of a linear map or a norm."""
    yield tensor(f"{ours}.weight", *(f"{name}.weight" for name in theirs), rows=rows, turned=turned)
    if bias:
        yield tensor(f"{ours}.bias", *(f"{name}.bias" for name in theirs), rows=rows)


def below(ours: str, theirs: str, *tables: Table) -> Iterator[Line]:
    """Tables with a prefix on each side: ``below("stack.layers.0.", "model.layers.0.", ...)``."""
    for table in tables:
        for line in table:
            yield line.below(ours, theirs)


def interleaved(count: int, *widths: int) -> Tensor:
    """The permutation `to` for rows that lie head by head in the file, and projection by projection here.

    Theirs: for each of `count` heads (or groups of heads), widths[0] rows, then widths[1], ...; ours: the first of all
    heads, then the second of all, ...
    """
    first = 0
    blocks = []
    for width in widths:
        blocks.append(first + torch.arange(count * width).view(count, width))
        first += count * width
    return torch.cat(blocks, dim=1).flatten()
