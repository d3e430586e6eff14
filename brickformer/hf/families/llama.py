"""llama (arXiv 2302.13971, 2307.09288, 2407.21783): what most later families vary.

    layer   x + attention(RMSNorm(x)),   x + GLU(RMSNorm(x))

Rotary halves as ours; q, k, v and gate, up are apart in the file and one product here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.embed import Head
from brickformer.feedforward import GLU
from brickformer.hf.config import Config
from brickformer.hf.family import Family, first
from brickformer.hf.rope import read_rope, rope_fields
from brickformer.hf.table import Line, Tie, below, linear
from brickformer.hf.words import ACTIVATIONS, activation_word, attention_of, check_width, checked_width, glu_of, sizes
from brickformer.layers import Layer, pattern
from brickformer.mixers.attention import Attention
from brickformer.models import Decoder
from brickformer.norms import RMSNorm
from brickformer.positions import Rope

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab, dim, depth = sizes(config)
    check_width(config, dim)
    bias = config.get("attention_bias", bool, False)
    layer = Layer(
        attention(config, dim, bias=bias),
        glu(config, bias=config.get("mlp_bias", bool, False)),
        norm=RMSNorm(config.get("rms_norm_eps", float, 1e-6)),
    )
    return Decoder(vocab, dim, pattern([layer], depth), head=head(config))


def attention(
    config: Config,
    dim: int,
    *,
    theta: float = 10_000.0,
    part: float | None = None,
    width: int | None = None,
    groups: int | None = None,
    **more: Any,
) -> Attention:
    """Attention of llama's kind. theta, part, width (of a head), groups (key heads): the family's own defaults.

    more: what it varies.
    """
    heads, width = config.count("num_attention_heads"), config.get("head_dim", int, width)
    return Attention(
        heads,
        kv_heads=config.optional("num_key_value_heads", int, groups),
        head_dim=width,
        position=read_rope(config, width or dim // heads, theta=theta, part=part),
        dropout=config.get("attention_dropout", float, 0.0),
        **more,
    )


def glu(config: Config, *, bias: bool = False) -> GLU:
    """The gated network."""
    return GLU(config.get("intermediate_size", int), config.choice("hidden_act", ACTIVATIONS, "silu"), bias)


def head(config: Config, *, tied: bool = False) -> Head:
    """The head, tied or not. tied: the family's default."""
    return Head(tied=config.get("tie_word_embeddings", bool, tied))


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    a, g = attention_of(spec), glu_of(spec)
    return fields(spec) | checked_width(spec) | {"attention_bias": a.bias, "mlp_bias": g.bias}


def fields(spec: Decoder) -> dict[str, Any]:
    """The fields that llama and its descendants have in common."""
    a, g, n = attention_of(spec), glu_of(spec), first(spec, RMSNorm, RMSNorm())
    width = a.head_dim or max(1, spec.dim // a.heads)
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.dim,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads or a.heads,
        "head_dim": width,
        "intermediate_size": g.hidden,
        "hidden_act": activation_word(g.activation),
        "rms_norm_eps": n.eps,
        "attention_dropout": a.dropout,
        "tie_word_embeddings": spec.head.tied,
        **rope_fields(first(spec, Rope, Rope()), width),
    }


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    for i, layer in enumerate(spec.layers):
        yield from below(
            f"stack.layers.{i}.", f"model.layers.{i}.", attention_names(layer), norm_names(), glu_names(layer)
        )
    yield from rest(spec)


def attention_names(layer: Layer) -> Iterator[Line]:
    """Self-attention, with norms of each head where there are."""
    a = layer.mixer
    assert isinstance(a, Attention)
    yield from linear("mixer.qkv", *QKV, bias=a.bias)
    yield from linear("mixer.out", "self_attn.o_proj", bias=a.bias if a.out_bias is None else a.out_bias)
    if a.qk_norm is not None:
        yield from linear("mixer.q_norm", "self_attn.q_norm")
        yield from linear("mixer.k_norm", "self_attn.k_norm")


def norm_names() -> Iterator[Line]:
    """The norms before each branch."""
    yield from linear("around_mixer.into", "input_layernorm")
    yield from linear("around_ffn.into", "post_attention_layernorm")


def glu_names(layer: Layer, mlp: str = "mlp") -> Iterator[Line]:
    """The gated network."""
    g = layer.ffn
    assert isinstance(g, GLU)
    yield from linear("ffn.gate_up", f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=g.bias)
    yield from linear("ffn.out", f"{mlp}.down_proj", bias=g.bias)


def rest(spec: Decoder) -> Iterator[Line]:
    """Table of tokens, last norm, head."""
    yield from linear("embed.tokens", "model.embed_tokens")
    yield from linear("stack.norm", "model.norm")
    if spec.head.tied:
        yield Tie("lm_head.weight", "model.embed_tokens.weight")
    else:
        yield from linear("head.project", "lm_head")


FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    read,
    guess,
    table,
    others=("LlamaModel",),
    ignored=(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
