"""mamba (arXiv 2312.00752): a stack of selective state spaces, each with a norm before it, no feed-forward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from brickformer.embed import Head
from brickformer.hf.config import Config
from brickformer.hf.family import Family, first
from brickformer.hf.table import Line, Tie, below, linear, tensor
from brickformer.hf.words import sizes
from brickformer.layers import Layer, pattern
from brickformer.mixers.mamba import Mamba
from brickformer.models import Decoder
from brickformer.norms import RMSNorm

TRAINING = tuple(
    "time_step_scale time_step_min time_step_max time_step_init_scheme time_step_floor rescale_prenorm_residual "
    "use_mambapy use_associative_scan residual_in_fp32 intermediate_size rms_norm fused_add_norm ssm_cfg".split()
)
"""Initial values, and kernels; `intermediate_size` follows from `expand`."""


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab, dim, depth = sizes(config)
    config.only("hidden_act", "silu", "swish")
    mamba = Mamba(
        state=config.get("state_size", int, 16),
        inner=int(config.get("expand", float, 2.0) * dim),
        conv=config.get("conv_kernel", int, 4),
        rank=rank(config, "time_step_rank", dim),
        bias=config.get("use_bias", bool, False),
        conv_bias=config.get("use_conv_bias", bool, True),
    )
    layer = Layer(mamba, norm=RMSNorm(config.get("layer_norm_epsilon", float, 1e-5)))
    head = Head(tied=config.get("tie_word_embeddings", bool, True))
    return Decoder(vocab, dim, pattern([layer], depth), head=head)


def rank(config: Config, name: str, dim: int) -> int:
    """The width of the step size's bottleneck, or "auto"."""
    if config.data.get(name, "auto") == "auto":
        config.skip(name)
        return math.ceil(dim / 16)
    return config.get(name, int)


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    m = first(spec, Mamba, Mamba())
    inner = m.inner or 2 * spec.dim
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.dim,
        "num_hidden_layers": len(spec.layers),
        "state_size": m.state,
        "expand": max(1, inner // spec.dim),  # a whole number there
        "intermediate_size": inner,
        "conv_kernel": m.conv,
        "time_step_rank": m.rank or math.ceil(spec.dim / 16),
        "use_bias": m.bias,
        "use_conv_bias": m.conv_bias,
        "layer_norm_epsilon": first(spec, RMSNorm, RMSNorm()).eps,
        "tie_word_embeddings": spec.head.tied,
    }


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    m = first(spec, Mamba, Mamba())
    for i in range(len(spec.layers)):
        yield from below(
            f"stack.layers.{i}.",
            f"backbone.layers.{i}.",
            linear("around_mixer.into", "norm"),
            names(m, "mixer"),
        )
    yield from rest(spec)


def names(m: Mamba, theirs: str) -> Iterator[Line]:
    """One selective state space."""
    yield from linear("mixer.into", f"{theirs}.in_proj", bias=m.bias)
    yield from linear("mixer.conv", f"{theirs}.conv1d", bias=m.conv_bias)
    yield from linear("mixer.select", f"{theirs}.x_proj")
    yield from linear("mixer.step", f"{theirs}.dt_proj", bias=True)
    yield from linear("mixer.out", f"{theirs}.out_proj", bias=m.bias)
    yield from [tensor("mixer.A_log", f"{theirs}.A_log"), tensor("mixer.D", f"{theirs}.D")]
    if m.inner_norm is not None:
        for ours, inner in (("step", "dt"), ("b", "b"), ("c", "c")):
            yield from linear(f"mixer.{ours}_norm", f"{theirs}.{inner}_layernorm")


def rest(spec: Decoder) -> Iterator[Line]:
    """Table of tokens, last norm, head."""
    yield from linear("embed.tokens", "backbone.embeddings")
    yield from linear("stack.norm", "backbone.norm_f")
    if spec.head.tied:
        yield Tie("lm_head.weight", "backbone.embeddings.weight")
    else:
        yield from linear("head.project", "lm_head")


FAMILY = Family(
    "mamba",
    "MambaForCausalLM",
    read,
    guess,
    table,
    body="backbone.",
    others=("MambaModel",),
    silent=(*TRAINING, "n_layer", "d_model", "d_inner"),
)
