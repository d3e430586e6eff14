"""Planted bugs in models of ours: a finished model, and one of its parts exchanged."""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brickformer.doctor.mutants.bug import Planted
from brickformer.mask import CAUSAL, FULL
from brickformer.presets import bert, gpt2, llama, vaswani

_SIZES: Final[dict[str, Any]] = {"vocab": 40, "dim": 32, "depth": 2, "heads": 4}


def healthy(name: str) -> Any:
    """A small model of ours."""
    torch.manual_seed(0)
    match name:
        case "gpt2":
            return gpt2(**_SIZES, max_len=32).build()
        case "llama":
            return llama(**_SIZES, kv_heads=2).build()
        case "bert":
            return bert(**_SIZES, max_len=32).build()
        case _:
            return vaswani(**_SIZES).build()


class _OverTime(nn.Module):
    """A norm over time."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)


class _AlwaysDrops(nn.Module):
    """Dropout that does not know eval()."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.2, training=True)


class _Detaches(nn.Module):
    """A part that passes no gradient on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).detach()


def _sees_all(m: Any) -> None:
    m.stack.layers[0].mixer.attend.mask = FULL


def _no_scale(m: Any) -> None:
    m.stack.layers[1].mixer.attend.scale = 1.0


def _one_layer(m: Any) -> None:
    m.stack.layers[1] = m.stack.layers[0]


def _copied_head(m: Any) -> None:
    m.head.project.weight = nn.Parameter(m.head.project.weight.detach().clone())


def _over_time(m: Any) -> None:
    m.stack.norm = _OverTime()


def _drops(m: Any) -> None:
    m.stack.layers[0].ffn.drop = _AlwaysDrops()


def _no_position(m: Any) -> None:
    m.embed.position = None


def _causal_cross(m: Any) -> None:
    for layer in m.decoder.stack.layers:
        layer.cross.attend.mask = CAUSAL


def _cut_off(m: Any) -> None:
    m.stack.layers[1].ffn = _Detaches(copy.deepcopy(m.stack.layers[1].ffn))


def _ours(name: str, probe: str, preset: str, breaks: Any, at: str) -> Planted:
    return Planted(name, probe, preset, breaks=breaks, at=at)


BUGS: Final[list[Planted]] = [
    _ours("ours: a layer sees everything", "causality", "gpt2", _sees_all, "stack.layers.0.mixer"),
    _ours("ours: scores are not scaled", "scale", "llama", _no_scale, "stack.layers.1.mixer"),
    _ours("ours: one layer twice", "sharing", "gpt2", _one_layer, "stack.layers.1"),
    _ours("ours: the head is a copy", "tying", "gpt2", _copied_head, "head.project"),
    _ours("ours: a norm over time", "norm axis", "llama", _over_time, "stack.norm"),
    _ours("ours: dropout that goes on", "eval", "gpt2", _drops, "stack.layers.0.ffn"),
    _ours("ours: no position", "positions", "bert", _no_position, ""),
    _ours("ours: causal cross-attention", "memory", "vaswani", _causal_cross, "decoder.stack.layers.0.cross"),
    _ours("ours: a feed-forward that is cut off", "dead parameters", "gpt2", _cut_off, "stack.layers.1.ffn"),
]
