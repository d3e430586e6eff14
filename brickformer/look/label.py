"""What stands in the box of a brick in a drawing: its kind, and in a line what it is made of.

attention: heads, positions, mask. Experts: how many, how many of them a token uses. Else: in -> hidden -> out.
"""

from __future__ import annotations

from typing import Final

from torch import nn

from brickformer.look.tree import describe
from brickformer.mixers.shortconv import ShortConvMixer
from brickformer.moe import MoEFeedForward
from brickformer.positions import NoPosition


def labelled(brick: nn.Module, kind: str, *, feeds: bool) -> tuple[str, str]:
    """(kind, line) of a mixer or, where it `feeds`, a feed-forward."""
    inner, said = brick, [describe(brick)]
    if isinstance(brick, ShortConvMixer):  # what stands behind it is in the same box
        inner = brick.mixer
        kind += f" + {type(inner).__name__.removesuffix('Mixer').lower()}"
        said.append(describe(inner))
    parts = dict(inner.named_children())
    said += [_place(parts[name]) if name == "position" else describe(parts[name]) for name in _SAID if name in parts]
    if isinstance(brick, MoEFeedForward):
        shared = "" if brick.shared is None else ", 1 shared"
        said.append(f"{len(brick.experts)} experts, {brick.router.top_k} used{shared}")
    if feeds or not any(said):
        said.append(_hidden(brick))
    return kind, ", ".join(text for text in said if text and text not in (type(brick).__name__, kind.upper()))


_SAID: Final = ("position", "attend")


def _place(position: nn.Module) -> str:
    """What kind of positions attention has."""
    return "" if isinstance(position, NoPosition) else describe(position).split(",")[0].removesuffix("Position")


def _hidden(brick: nn.Module) -> str:
    """How wide it is inside: the shapes of its first and its last product; of experts, of one."""
    inner = brick.experts[0] if isinstance(brick, MoEFeedForward) else brick
    products = [m for m in inner.modules() if isinstance(m, nn.Linear)]
    return (
        "" if not products else f"{products[0].in_features} → {products[-1].in_features} → {products[-1].out_features}"
    )
