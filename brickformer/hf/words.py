"""Words and fields that many families share: names of activations, dropout, the sizes of a decoder."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from brickformer.feedforward import GLU, MLP, Activation
from brickformer.hf.config import Config
from brickformer.hf.family import first
from brickformer.mixers.attention import Attention
from brickformer.spec import Spec

ACTIVATIONS: Final[MappingProxyType[str, Activation]] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "relu": "relu",
        "relu2": "relu2",
    }
)
"""Their names of activations -> ours."""


def activation_word(ours: Activation, gelu_tanh: str = "gelu_pytorch_tanh") -> str:
    """Our name of an activation as theirs. gelu_tanh: the one of its names that the family uses."""
    return gelu_tanh if ours == "gelu_tanh" else ours


def sizes(config: Config) -> tuple[int, int, int]:
    """(V, D, number of layers), by their usual names."""
    return config.get("vocab_size", int), config.get("hidden_size", int), config.count("num_hidden_layers")


def attention_of(spec: Spec) -> Attention:
    """The first attention in a spec, else some."""
    return first(spec, Attention, Attention(1))


def glu_of(spec: Spec) -> GLU:
    """The first gated network in a spec, else some."""
    return first(spec, GLU, GLU(1))


def mlp_of(spec: Spec) -> MLP:
    """The first plain network in a spec, else some."""
    return first(spec, MLP, MLP(1))


def dropout_of(spec: Any) -> float:
    """What the first layer drops of each branch."""
    return float(spec.layers[0].dropout)


def check_width(config: Config, dim: int) -> None:
    """Errors: SpecError: a width that their class refuses, though heads have a width of their own."""
    heads = config.count("num_attention_heads")
    if dim % heads:
        raise config.refuse("hidden_size", f"a multiple of num_attention_heads={heads}")


def checked_width(spec: Any) -> dict[str, int]:
    """The nearest width that `check_width` takes."""
    heads = attention_of(spec).heads
    return {"hidden_size": max(heads, spec.dim - spec.dim % heads)}
