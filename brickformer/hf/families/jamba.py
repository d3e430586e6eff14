"""jamba (arXiv 2403.19887): Mamba with norms inside, attention in every n-th layer, mixtures in every m-th.

    layer   x + mixer(RMSNorm(x)),   x + GLU(RMSNorm(x)) or a mixture of GLUs

Attention has no position at all: the state spaces around it know the order. The weights of the chosen experts are
their shares of the softmax over all, not made to sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from brickformer.feedforward import GLU, FeedForwardSpec
from brickformer.hf.config import Config
from brickformer.hf.families import llama, mamba, mixtral
from brickformer.hf.family import Family, first
from brickformer.hf.table import Line, Tie, below, linear
from brickformer.hf.words import attention_of, glu_of, sizes
from brickformer.layers import Layer
from brickformer.mixers.attention import Attention
from brickformer.mixers.base import MixerSpec
from brickformer.mixers.mamba import Mamba
from brickformer.models import Decoder
from brickformer.moe import MoE, Router
from brickformer.norms import RMSNorm


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab, dim, depth = sizes(config)
    config.only(
        "hidden_act", "silu", "swish", do="It is the activation inside Mamba too, where a brick knows only silu."
    )
    config.only("mamba_inner_layernorms", True)
    config.only("sliding_window", None)
    norm, glu = RMSNorm(config.get("rms_norm_eps", float, 1e-6)), GLU(config.get("intermediate_size", int))
    attention = Attention(
        config.count("num_attention_heads"),
        kv_heads=config.optional("num_key_value_heads", int, 8),
        dropout=config.get("attention_dropout", float, 0.0),
    )
    recurrent = Mamba(
        state=config.get("mamba_d_state", int, 16),
        inner=config.get("mamba_expand", int, 2) * dim,
        conv=config.get("mamba_d_conv", int, 4),
        rank=mamba.rank(config, "mamba_dt_rank", dim),
        bias=config.get("mamba_proj_bias", bool, False),
        conv_bias=config.get("mamba_conv_bias", bool, True),
        inner_norm=norm,
    )
    experts, ffn = config.count("num_experts|num_local_experts", 16), glu
    chosen, balance = config.get("num_experts_per_tok", int, 2), config.get("router_aux_loss_coef", float, 0.001)
    mixed: FeedForwardSpec = glu
    if experts != 1:
        mixed = MoE(experts, glu, Router(chosen, normalize=False, balance=balance))
    attends, mixes = _every(config, "attn_layer", 8, 4), _every(config, "expert_layer", 2, 1)
    if not any(map(attends, range(depth))):  # theirs counts the tokens in its first cache of keys
        raise config.refuse("attn_layer_offset", f"one of the {depth} layers: without attention theirs does not run.")
    layers = []
    for i in range(depth):
        mixer: MixerSpec = attention if attends(i) else recurrent
        layers.append(Layer(mixer, mixed if mixes(i) else ffn, norm=norm))
    return Decoder(vocab, dim, tuple(layers), head=llama.head(config))


def _every(config: Config, what: str, period: int, offset: int) -> Any:
    """Whether layer i is one of those that come every `period` layers from the one numbered `offset` on."""
    period, offset = config.get(f"{what}_period", int, period), config.get(f"{what}_offset", int, offset)
    if not 0 <= offset < period:
        raise config.refuse(f"{what}_offset", f"0 to {period - 1}, as {what}_period is {period}")
    return lambda i: i % period == offset


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    a, m, moe = attention_of(spec), first(spec, Mamba, Mamba()), first(spec, MoE, MoE(1, GLU(1), Router(1)))
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.dim,
        "num_hidden_layers": len(spec.layers),
        "intermediate_size": glu_of(spec).hidden,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads or a.heads,
        "attention_dropout": a.dropout,
        "rms_norm_eps": first(spec.layers[0].norm, RMSNorm, RMSNorm()).eps,
        "mamba_d_state": m.state,
        "mamba_expand": max(1, (m.inner or 2 * spec.dim) // spec.dim),
        "mamba_d_conv": m.conv,
        "mamba_dt_rank": m.rank or math.ceil(spec.dim / 16),
        "mamba_proj_bias": m.bias,
        "mamba_conv_bias": m.conv_bias,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.router.top_k,
        "router_aux_loss_coef": moe.router.balance,
        **_where("attn_layer", [isinstance(layer.mixer, Attention) for layer in spec.layers]),
        **_where("expert_layer", [isinstance(layer.ffn, MoE) for layer in spec.layers]),
        "tie_word_embeddings": spec.head.tied,
    }


def _where(what: str, chosen: Sequence[bool]) -> dict[str, int]:
    """The period and the offset of the chosen layers, if they have any."""
    at = [i for i, one in enumerate(chosen) if one] or [len(chosen)]
    period = at[1] - at[0] if len(at) > 1 else len(chosen) + 1
    return {f"{what}_period": period, f"{what}_offset": at[0]}


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    for i, layer in enumerate(spec.layers):
        mixer: Iterator[Line]
        if isinstance(layer.mixer, Mamba):
            mixer = mamba.names(layer.mixer, "mamba")
        else:
            mixer = llama.attention_names(layer)
        yield from below(
            f"stack.layers.{i}.",
            f"model.layers.{i}.",
            mixer,
            linear("around_mixer.into", "input_layernorm"),
            linear("around_ffn.into", "pre_ff_layernorm"),
            ffn_names(layer),
        )
    yield from linear("embed.tokens", "model.embed_tokens")
    yield from linear("stack.norm", "model.final_layernorm")
    if spec.head.tied:
        yield Tie("lm_head.weight", "model.embed_tokens.weight")
    else:
        yield from linear("head.project", "lm_head")


def ffn_names(layer: Layer) -> Iterator[Line]:
    """A mixture, or one gated network."""
    if not isinstance(layer.ffn, MoE):
        yield from llama.glu_names(layer, "feed_forward")
        return
    yield from linear("ffn.router.project", "feed_forward.router")
    for e in range(layer.ffn.experts):
        yield from mixtral.expert_names(e, f"feed_forward.experts.{e}", "gate_proj", "up_proj", "down_proj")


FAMILY = Family(
    "jamba",
    "JambaForCausalLM",
    read,
    guess,
    table,
    others=("JambaModel",),
    silent=tuple(
        "use_mamba_kernels use_mambapy use_associative_scan num_logits_to_keep calc_logits_for_entire_prompt".split()
    ),
)
