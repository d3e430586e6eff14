"""mamba2 (arXiv 2405.21060): a stack of Mamba-2 mixers, each with a norm before it, no feed-forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.embed import Head
from brickformer.hf.config import Config
from brickformer.hf.families import mamba
from brickformer.hf.family import Family, first
from brickformer.hf.table import Line, below, linear, tensor
from brickformer.hf.words import sizes
from brickformer.layers import Layer, pattern
from brickformer.mixers.mamba2 import Mamba2
from brickformer.models import Decoder
from brickformer.norms import RMSNorm

UNLIMITED = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], [0, float("inf")])
"""How a step size without limits is written."""


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab, dim, depth = sizes(config)
    config.only("hidden_act", "silu", "swish")
    config.only("time_step_limit", *UNLIMITED)
    eps, heads, width = config.get("layer_norm_epsilon", float, 1e-5), config.count("num_heads"), None
    width = config.get("head_dim", int, 64)
    if config.get("expand", float, 2.0) * dim != heads * width:
        raise config.refuse("num_heads", f"expand · hidden_size / head_dim, with head_dim {width}")
    mixer = Mamba2(
        heads=heads,
        head_dim=width,
        state=config.get("state_size", int, 128),
        groups=config.get("n_groups", int, 8),
        conv=config.get("conv_kernel", int, 4),
        eps=eps,
        bias=config.get("use_bias", bool, False),
        conv_bias=config.get("use_conv_bias", bool, True),
    )
    head = Head(tied=config.get("tie_word_embeddings", bool, False))
    return Decoder(vocab, dim, pattern([Layer(mixer, norm=RMSNorm(eps))], depth), head=head)


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    m = first(spec, Mamba2, Mamba2(heads=1))
    heads = m.heads or max(1, 2 * spec.dim // m.head_dim)
    expand = max(1, heads * m.head_dim // spec.dim)  # a whole number there
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.dim,
        "num_hidden_layers": len(spec.layers),
        "num_heads": expand * spec.dim // m.head_dim,
        "head_dim": m.head_dim,
        "state_size": m.state,
        "n_groups": m.groups,
        "expand": expand,
        "conv_kernel": m.conv,
        "use_bias": m.bias,
        "use_conv_bias": m.conv_bias,
        "layer_norm_epsilon": m.eps,
        "tie_word_embeddings": spec.head.tied,
    }


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    m = first(spec, Mamba2, Mamba2())
    for i in range(len(spec.layers)):
        yield from below(
            f"stack.layers.{i}.",
            f"backbone.layers.{i}.",
            linear("around_mixer.into", "norm"),
            linear("mixer.into", "mixer.in_proj", bias=m.bias),
            linear("mixer.conv", "mixer.conv1d", bias=m.conv_bias),
            linear("mixer.norm", "mixer.norm"),
            linear("mixer.out", "mixer.out_proj", bias=m.bias),
            [tensor(f"mixer.{name}", f"mixer.{name}") for name in ("A_log", "D", "dt_bias")],
        )
    yield from mamba.rest(spec)


FAMILY = Family(
    "mamba2",
    "Mamba2ForCausalLM",
    read,
    guess,
    table,
    body="backbone.",
    others=("Mamba2Model",),
    silent=(*mamba.TRAINING, "chunk_size", "time_step_rank"),
)
