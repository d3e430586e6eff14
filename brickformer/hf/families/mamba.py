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
    rank = config.data.get("time_step_rank", "auto")
    config.skip("time_step_rank")
    mamba = Mamba(
        state=config.get("state_size", int, 16),
        inner=int(config.get("expand", float, 2.0) * dim),
        conv=config.get("conv_kernel", int, 4),
        rank=math.ceil(dim / 16) if rank == "auto" else config.get("time_step_rank", int),
        bias=config.get("use_bias", bool, False),
        conv_bias=config.get("use_conv_bias", bool, True),
    )
    layer = Layer(mamba, norm=RMSNorm(config.get("layer_norm_epsilon", float, 1e-5)))
    head = Head(tied=config.get("tie_word_embeddings", bool, True))
    return Decoder(vocab, dim, pattern([layer], depth), head=head)


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
            linear("mixer.into", "mixer.in_proj", bias=m.bias),
            linear("mixer.conv", "mixer.conv1d", bias=m.conv_bias),
            linear("mixer.select", "mixer.x_proj"),
            linear("mixer.step", "mixer.dt_proj", bias=True),
            linear("mixer.out", "mixer.out_proj", bias=m.bias),
            [tensor("mixer.A_log", "mixer.A_log"), tensor("mixer.D", "mixer.D")],
        )
    yield from rest(spec)


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
