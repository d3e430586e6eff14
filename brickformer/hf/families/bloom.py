"""bloom (arXiv 2211.05100): ALiBi, a norm after the embedding, everything with a bias, a tied head.

The rows of q, k and v lie head by head in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.embed import Embed
from brickformer.feedforward import MLP
from brickformer.hf.config import Config
from brickformer.hf.family import Family, first
from brickformer.hf.table import Line, Tie, below, interleaved, linear
from brickformer.hf.words import attention_of, dropout_of
from brickformer.layers import Layer, pattern
from brickformer.mixers.attention import Attention
from brickformer.models import Decoder
from brickformer.norms import LayerNorm
from brickformer.positions import Alibi


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab, dim = config.get("vocab_size", int), config.get("hidden_size|n_embed|n_embd", int)
    config.only("apply_residual_connection_post_layernorm", False)
    config.only("slow_but_exact", False, do="With it theirs leaves two biases of each layer out.")
    config.only("tie_word_embeddings", True)
    attention = Attention(
        config.count("n_head|num_attention_heads"),
        position=Alibi(),
        bias=True,
        dropout=config.get("attention_dropout", float, 0.0),
    )
    norm = LayerNorm(config.get("layer_norm_epsilon", float, 1e-5))
    dropout = config.get("hidden_dropout", float, 0.0)
    layer = Layer(attention, MLP(4 * dim, "gelu_tanh"), norm=norm, dropout=dropout)
    depth = config.count("n_layer|num_hidden_layers")
    return Decoder(vocab, dim, pattern([layer], depth), embed=Embed(norm=norm))


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    a = attention_of(spec)
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.dim,
        "n_layer": len(spec.layers),
        "n_head": a.heads,
        "layer_norm_epsilon": first(spec, LayerNorm, LayerNorm()).eps,
        "attention_dropout": a.dropout,
        "hidden_dropout": dropout_of(spec),
    }


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    heads = attention_of(spec).heads
    rows = interleaved(heads, *[spec.dim // heads] * 3)
    for i in range(len(spec.layers)):
        yield from below(
            f"stack.layers.{i}.",
            f"transformer.h.{i}.",
            linear("mixer.qkv", "self_attention.query_key_value", bias=True, rows=rows),
            linear("mixer.out", "self_attention.dense", bias=True),
            linear("around_mixer.into", "input_layernorm", bias=True),
            linear("around_ffn.into", "post_attention_layernorm", bias=True),
            linear("ffn.into", "mlp.dense_h_to_4h", bias=True),
            linear("ffn.out", "mlp.dense_4h_to_h", bias=True),
        )
    yield from linear("embed.tokens", "transformer.word_embeddings")
    yield from linear("embed.norm", "transformer.word_embeddings_layernorm", bias=True)
    yield from linear("stack.norm", "transformer.ln_f", bias=True)
    yield Tie("lm_head.weight", "transformer.word_embeddings.weight")


FAMILY = Family(
    "bloom",
    "BloomForCausalLM",
    read,
    guess,
    table,
    body="transformer.",
    others=("BloomModel",),
    silent=("unk_token_id", "seq_length", "skip_bias_add", "skip_bias_add_qkv", "bias_dropout_fusion", "offset_alibi"),
)
