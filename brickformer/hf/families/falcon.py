"""falcon (arXiv 2311.16867): attention and feed-forward side by side, few key heads, rotary positions, a tied head.

Three layouts of queries, keys and values in one matrix: one key head at the end (7 B); each head's three together
(1 B); each key head after the queries that share it, with a norm for either branch (40 B, 180 B).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from brickformer.embed import Head
from brickformer.feedforward import MLP
from brickformer.hf.config import Config
from brickformer.hf.family import Family, first
from brickformer.hf.rope import read_rope, rope_fields
from brickformer.hf.table import Line, Tie, below, interleaved, linear
from brickformer.hf.words import ACTIVATIONS, activation_word, attention_of, dropout_of, mlp_of
from brickformer.layers import Layer, pattern
from brickformer.mixers.attention import Attention
from brickformer.models import Decoder
from brickformer.norms import LayerNorm
from brickformer.positions import Rope

Arrange = Literal["serial", "parallel", "parallel_norms"]


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab = config.get("vocab_size", int)
    dim, depth = config.get("hidden_size|n_embed", int), config.count("num_hidden_layers|n_layer")
    heads = config.count("num_attention_heads|n_head")
    config.only("alibi", False, do="Its ALiBi is rounded to bfloat16 and scaled with the scores: no brick does that.")
    new, one = config.get("new_decoder_architecture", bool, False), config.get("multi_query", bool, True)
    few = config.get("num_kv_heads|n_head_kv", int, None)
    groups = (few or heads) if new else (1 if one else heads)
    norms = config.get("num_ln_in_parallel_attn", int, None) or (2 if new else 1)
    arrange: Arrange = "parallel" if config.get("parallel_attn", bool, True) else "serial"
    if new and arrange == "serial":
        raise config.refuse("parallel_attn", "true in the new architecture")
    if new and norms == 2:
        arrange = "parallel_norms"
    bias = config.get("bias", bool, False)
    attention = Attention(
        heads,
        kv_heads=groups,
        position=read_rope(config, dim // heads),
        dropout=config.get("attention_dropout", float, 0.0),
        bias=bias,
    )
    hidden = config.get("ffn_hidden_size", int, None) or 4 * dim
    layer = Layer(
        attention,
        MLP(hidden, config.choice("activation", ACTIVATIONS, "gelu"), bias),
        norm=LayerNorm(config.get("layer_norm_epsilon", float, 1e-5)),
        arrange=arrange,
        dropout=config.get("hidden_dropout", float, 0.0),
    )
    return Decoder(vocab, dim, pattern([layer], depth), head=Head(tied=config.get("tie_word_embeddings", bool, True)))


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    a, m, arrange = attention_of(spec), mlp_of(spec), spec.layers[0].arrange
    groups = a.kv_heads or a.heads
    new = arrange == "parallel_norms" or groups not in (1, a.heads)
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.dim,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": a.heads,
        "num_kv_heads": groups,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": (2 if arrange == "parallel_norms" else 1) if new else None,
        "multi_query": groups == 1 and not new,
        "parallel_attn": arrange != "serial",
        "alibi": False,
        "bias": a.bias,
        "ffn_hidden_size": m.hidden,
        "activation": activation_word(m.activation),
        "layer_norm_epsilon": first(spec, LayerNorm, LayerNorm()).eps,
        "attention_dropout": a.dropout,
        "hidden_dropout": dropout_of(spec),
        "tie_word_embeddings": spec.head.tied,
        **rope_fields(first(spec, Rope, Rope()), max(1, spec.dim // a.heads)),
    }


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    a, arrange = attention_of(spec), spec.layers[0].arrange
    width, groups = spec.dim // a.heads, a.kv_heads or a.heads
    rows = None if groups == 1 else interleaved(groups, a.heads // groups * width, width, width)
    norms: list[Iterator[Line]]
    match arrange:
        case "parallel_norms":
            names = {"around_mixer.into": "ln_attn", "around_ffn.into": "ln_mlp"}
        case "parallel":
            names = {"around.into": "input_layernorm"}
        case "serial":
            names = {"around_mixer.into": "input_layernorm", "around_ffn.into": "post_attention_layernorm"}
    for i in range(len(spec.layers)):
        norms = [linear(ours, theirs, bias=True) for ours, theirs in names.items()]
        yield from below(
            f"stack.layers.{i}.",
            f"transformer.h.{i}.",
            linear("mixer.qkv", "self_attention.query_key_value", bias=a.bias, rows=rows),
            linear("mixer.out", "self_attention.dense", bias=a.bias),
            *norms,
            linear("ffn.into", "mlp.dense_h_to_4h", bias=a.bias),
            linear("ffn.out", "mlp.dense_4h_to_h", bias=a.bias),
        )
    yield from linear("embed.tokens", "transformer.word_embeddings")
    yield from linear("stack.norm", "transformer.ln_f", bias=True)
    if spec.head.tied:
        yield Tie("lm_head.weight", "transformer.word_embeddings.weight")
    else:
        yield from linear("head.project", "lm_head")


FAMILY = Family(
    "falcon",
    "FalconForCausalLM",
    read,
    guess,
    table,
    body="transformer.",
    others=("FalconModel",),
)
