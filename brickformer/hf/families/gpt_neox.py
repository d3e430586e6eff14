"""gpt_neox (arXiv 2204.06745): attention and feed-forward side by side, a norm each; part of a head is turned.

The rows of q, k and v lie head by head in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.embed import Embed, Head
from brickformer.feedforward import MLP
from brickformer.hf.config import Config
from brickformer.hf.family import Family, first
from brickformer.hf.rope import read_rope, rope_fields
from brickformer.hf.table import Line, Tie, below, interleaved, linear
from brickformer.hf.words import ACTIVATIONS, activation_word, attention_of, dropout_of, mlp_of, sizes
from brickformer.layers import Layer, pattern
from brickformer.mixers.attention import Attention
from brickformer.models import Decoder
from brickformer.norms import LayerNorm
from brickformer.positions import Rope


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab, dim, depth = sizes(config)
    heads, dropout = config.count("num_attention_heads"), config.get("hidden_dropout", float, 0.0)
    theta, part = config.get("rotary_emb_base", float, 10_000.0), config.get("rotary_pct", float, 0.25)
    for new, old, value in (("rope_theta", "rotary_emb_base", theta), ("partial_rotary_factor", "rotary_pct", part)):
        if config.has(new) and config.get(new, float) != value:  # theirs reads the old names only
            raise config.refuse(new, f"{value:g}, as {old} says or leaves it")
    attention = Attention(
        heads,
        position=read_rope(config, dim // heads, theta=theta, part=part),
        dropout=config.get("attention_dropout", float, 0.0),
        bias=config.get("attention_bias", bool, True),
    )
    layer = Layer(
        attention,
        MLP(config.get("intermediate_size", int), config.choice("hidden_act", ACTIVATIONS, "gelu")),
        norm=LayerNorm(config.get("layer_norm_eps", float, 1e-5)),
        arrange="parallel_norms" if config.get("use_parallel_residual", bool, True) else "serial",
        dropout=dropout,
    )
    head = Head(tied=config.get("tie_word_embeddings", bool, False))
    return Decoder(vocab, dim, pattern([layer], depth), embed=Embed(dropout=dropout), head=head)


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    a, m = attention_of(spec), mlp_of(spec)
    rope = rope_fields(first(spec, Rope, Rope()), max(1, spec.dim // a.heads))
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.dim,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": a.heads,
        "intermediate_size": m.hidden,
        "hidden_act": activation_word(m.activation),
        "layer_norm_eps": first(spec, LayerNorm, LayerNorm()).eps,
        "attention_bias": a.bias,
        "attention_dropout": a.dropout,
        "hidden_dropout": dropout_of(spec),
        "use_parallel_residual": spec.layers[0].arrange == "parallel_norms",
        "tie_word_embeddings": spec.head.tied,
        "rotary_emb_base": rope["rope_theta"],
        "rotary_pct": rope.get("partial_rotary_factor", 1.0),
        "rope_scaling": rope["rope_scaling"],
        "rope_parameters": rope["rope_parameters"] | {"partial_rotary_factor": rope.get("partial_rotary_factor", 1.0)},
    }


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    a = attention_of(spec)
    rows = interleaved(a.heads, *[spec.dim // a.heads] * 3)
    for i in range(len(spec.layers)):
        yield from below(
            f"stack.layers.{i}.",
            f"gpt_neox.layers.{i}.",
            linear("mixer.qkv", "attention.query_key_value", bias=a.bias, rows=rows),
            linear("mixer.out", "attention.dense", bias=a.bias),
            linear("around_mixer.into", "input_layernorm", bias=True),
            linear("around_ffn.into", "post_attention_layernorm", bias=True),
            linear("ffn.into", "mlp.dense_h_to_4h", bias=True),
            linear("ffn.out", "mlp.dense_4h_to_h", bias=True),
        )
    yield from linear("embed.tokens", "gpt_neox.embed_in")
    yield from linear("stack.norm", "gpt_neox.final_layer_norm", bias=True)
    if spec.head.tied:
        yield Tie("embed_out.weight", "gpt_neox.embed_in.weight")
    else:
        yield from linear("head.project", "embed_out")


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    read,
    guess,
    table,
    body="gpt_neox.",
    others=("GPTNeoXModel",),
    ignored=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)
