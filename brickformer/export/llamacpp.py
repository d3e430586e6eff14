"""What llama.cpp computes, family by family: its fields, its names of tensors, and what it stores otherwise.

    llama, mistral, qwen2, qwen3, olmo2, gemma, gemma2, gpt2

A checkpoint comes as the `transformers` library says it (configuration and named tensors, see the hf tables), since
llama.cpp's own names are made of those. Three things are stored otherwise there:

    llama, mistral   rows of q and k: rotary pairs are neighbours, (K/2, 2) where the checkpoint has (2, K/2)
    gemma, gemma2    gains of norms: g + 1, where the checkpoint has g
    gpt2             matrices as (out, in), where the checkpoint has the transpose

What llama.cpp does not compute is refused: it would read the file and answer something else. H heads, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from brickformer.errors import SpecError, nearest

Fields = Mapping[str, Any]


@final
@dataclass(frozen=True, slots=True)
class Architecture:
    """One family. name: llama.cpp's. activation: the one it has. only: fields that it has one value of (or none)."""

    name: str
    activation: str = "silu"
    only: tuple[tuple[str, Any], ...] = ()
    neighbours: bool = False
    offset: bool = False
    turned: bool = False


_NO_BIAS = (("attention_bias", False),)
_NO_WINDOW = (("use_sliding_window", False),)
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("llama", neighbours=True),
    "mistral": Architecture("llama", only=(("sliding_window", None),), neighbours=True),
    "qwen2": Architecture("qwen2", only=_NO_WINDOW),
    "qwen3": Architecture("qwen3", only=_NO_WINDOW + _NO_BIAS),
    "olmo2": Architecture("olmo2", only=_NO_BIAS),
    "gemma": Architecture("gemma", "gelu_tanh", only=_NO_BIAS, offset=True),
    "gemma2": Architecture("gemma2", "gelu_tanh", only=_NO_BIAS, offset=True),
    "gpt2": Architecture(
        "gpt2",
        "gelu_tanh",
        only=(("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)),
        turned=True,
    ),
}
_WORDS = {"silu": "silu", "swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_DEFAULT_EPS = 1e-6
_KNOWN = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor")
_YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
"""What llama.cpp's yarn takes for granted."""


def architecture(config: Fields) -> Architecture:
    """The family of a configuration. Errors: SpecError: llama.cpp has none, or computes a field otherwise."""
    kind = str(config.get("model_type"))
    if kind not in ARCHITECTURES:
        raise SpecError(
            f"gguf: llama.cpp's families that are written here have no {kind!r}; {nearest(kind, ARCHITECTURES)}"
        )
    known = ARCHITECTURES[kind]
    for name, value in known.only:
        if name in config and config[name] != value:
            raise _refused(kind, name, config[name], value)
    words = [config[n] for n in ("hidden_activation", "hidden_act", "activation_function") if config.get(n)]
    word = words[0] if words else None
    if word is not None and _WORDS.get(str(word)) != known.activation:
        raise _refused(kind, "activation", word, known.activation)
    if kind == "gemma2":
        _check_gemma2(config)
    return known


def _refused(kind: str, name: str, got: Any, expected: Any) -> SpecError:
    return SpecError(
        f"gguf: {name}: got {got!r}, but llama.cpp's {kind} computes with {expected!r} only. Share it as --to hf."
    )


def _check_gemma2(config: Fields) -> None:
    width = _head_width(config)
    if config.get("query_pre_attn_scalar", 256) != width:
        raise _refused("gemma2", "query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256), width)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if not config.get(name):
            raise _refused("gemma2", name, config.get(name), "a cap")
    kinds = config.get("layer_types")
    usual = [("sliding_attention", "full_attention")[i % 2] for i in range(_depth(config))]
    if kinds is not None and kinds != usual:
        raise _refused("gemma2", "layer_types", kinds, "a window in every other layer, the first included")


def fields(config: Fields, vocab: int) -> dict[str, Any]:
    """llama.cpp's fields by name, without the family's prefix: int, float, str or bool, as they are to be stored."""
    heads = int(_first(config, "num_attention_heads", "n_head"))
    dim = int(_first(config, "hidden_size", "n_embd"))
    out: dict[str, Any] = {
        "vocab_size": vocab,
        "context_length": int(_first(config, "max_position_embeddings", "n_positions", default=2048)),
        "embedding_length": dim,
        "block_count": _depth(config),
        "feed_forward_length": int(_first(config, "intermediate_size", "n_inner", default=4 * dim)),
        "attention.head_count": heads,
        "attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
    }
    if config["model_type"] == "gpt2":
        return out | {"attention.layer_norm_epsilon": float(config.get("layer_norm_epsilon", 1e-5))}
    width = _head_width(config)
    out |= {
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", _DEFAULT_EPS)),
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
        **_rope(config),
    }
    if config["model_type"] == "gemma2":
        out["attn_logit_softcapping"] = float(config["attn_logit_softcapping"])
        out["final_logit_softcapping"] = float(config["final_logit_softcapping"])
        out["attention.sliding_window"] = int(config.get("sliding_window") or out["context_length"])
    return out


def _rope(config: Fields) -> dict[str, Any]:
    theta, scaling = rope_of(config)
    out: dict[str, Any] = {"rope.freq_base": theta}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    extra = {name: value for name, value in scaling.items() if value is not None and value != _YARN.get(name)}
    extra = {name: value for name, value in extra.items() if name not in _KNOWN}
    match kind:
        case "default" | "llama3":  # llama3 is a table of factors, see `added`
            return out
        case "linear":
            return out | {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
        case "yarn" if not extra:
            original = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
            return out | {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(scaling["factor"]),
                "rope.scaling.original_context_length": int(original),
            }
        case _:
            more = f" with {min(extra)}" if extra else ""
            raise _refused(str(config["model_type"]), "rope scaling", f"{kind}{more}", "default, linear, yarn, llama3")


def rope_of(config: Fields) -> tuple[float, Fields]:
    """(theta, fields of the scaling), as they are written today or were before."""
    scaling: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    said = {**config, **scaling}
    if float(said.get("partial_rotary_factor", 1.0)) != 1.0:
        raise _refused(str(config["model_type"]), "partial_rotary_factor", "a part", "whole heads")
    return float(said.get("rope_theta", 10_000.0)), scaling


def added(config: Fields) -> dict[str, Tensor]:
    """Tensors that a checkpoint does not have: the factors by which llama3's scaling slows each rotation."""
    if config["model_type"] == "gpt2":
        return {}
    theta, scaling = rope_of(config)
    if scaling.get("rope_type", scaling.get("type")) != "llama3":
        return {}
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    width = _head_width(config)
    waves = 2 * math.pi * theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    smooth = ((original / waves - low) / (high - low)).clamp(0.0, 1.0)
    return {"rope_freqs.weight": (1.0 / ((1.0 - smooth) / factor + smooth)).float()}


def stored(name: str, tensor: Tensor, config: Fields, known: Architecture) -> Tensor:
    """A tensor of the checkpoint as llama.cpp stores it. name: the checkpoint's."""
    if known.neighbours and (".q_proj." in name or ".k_proj." in name):
        heads = int(config["num_attention_heads"])
        count = heads if ".q_proj." in name else int(config.get("num_key_value_heads") or heads)
        halves = tensor.view(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    if known.offset and name.endswith("norm.weight"):
        return tensor + 1.0
    if known.turned and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.T
    return tensor


def restored(name: str, tensor: Tensor, config: Fields, known: Architecture) -> Tensor:
    """What `stored` made of a tensor, as the checkpoint has it."""
    if known.neighbours and (".q_proj." in name or ".k_proj." in name):
        heads = int(config["num_attention_heads"])
        count = heads if ".q_proj." in name else int(config.get("num_key_value_heads") or heads)
        pairs = tensor.view(count, tensor.shape[0] // count // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)
    if known.offset and name.endswith("norm.weight"):
        return tensor - 1.0
    return stored(name, tensor, config, known)  # a transpose undoes itself


def _head_width(config: Fields) -> int:
    usual = 256 if str(config["model_type"]).startswith("gemma") else int(config["hidden_size"]) // _heads(config)
    return int(config.get("head_dim") or usual)


def _heads(config: Fields) -> int:
    return int(config["num_attention_heads"])


def _depth(config: Fields) -> int:
    return int(_first(config, "num_hidden_layers", "n_layer"))


def _first(config: Fields, *names: str, default: int | None = None) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), default)
