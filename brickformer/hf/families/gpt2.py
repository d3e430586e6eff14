"""gpt2 (Radford et al. 2019): learned positions, LayerNorm before each branch, everything with a bias.

Their Conv1D stores the transpose of a matrix, with q, k and v side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.embed import Embed
from brickformer.feedforward import MLP
from brickformer.hf.config import Config
from brickformer.hf.family import Family, first
from brickformer.hf.table import Line, Tie, below, linear
from brickformer.hf.words import ACTIVATIONS, activation_word, attention_of, dropout_of, mlp_of
from brickformer.layers import Layer
from brickformer.mixers.attention import Attention
from brickformer.models import Decoder
from brickformer.norms import LayerNorm
from brickformer.positions import Learned


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    dim, heads = config.get("n_embd|hidden_size", int), config.count("n_head|num_attention_heads")
    depth = config.count("n_layer|num_hidden_layers")
    config.only("tie_word_embeddings", True)
    scale = None if config.get("scale_attn_weights", bool, True) else 1.0
    by_layer = config.get("scale_attn_by_inverse_layer_idx", bool, False)
    mlp = MLP(
        config.get("n_inner", int, None) or 4 * dim, config.choice("activation_function", ACTIVATIONS, "gelu_new")
    )
    norm = LayerNorm(config.get("layer_norm_epsilon", float, 1e-5))
    weights, branches = config.get("attn_pdrop", float, 0.1), config.get("resid_pdrop", float, 0.1)
    layers = []
    for i in range(depth):
        own = (scale or max(1, dim // heads) ** -0.5) / (i + 1) if by_layer else scale
        attention = Attention(heads, bias=True, dropout=weights, scale=own)
        layers.append(Layer(attention, mlp, norm=norm, dropout=branches))
    embed = Embed(position=Learned(config.get("n_positions", int, 1024)), dropout=config.get("embd_pdrop", float, 0.1))
    return Decoder(config.get("vocab_size", int), dim, tuple(layers), embed=embed)


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    a, m = attention_of(spec), mlp_of(spec)
    scales = [layer.mixer.scale for layer in spec.layers if isinstance(layer.mixer, Attention)]
    return {
        "vocab_size": spec.vocab,
        "n_embd": spec.dim,
        "n_layer": len(spec.layers),
        "n_head": a.heads,
        "n_inner": m.hidden,
        "n_positions": first(spec, Learned, Learned()).max_len,
        "activation_function": activation_word(m.activation, gelu_tanh="gelu_new"),
        "layer_norm_epsilon": first(spec, LayerNorm, LayerNorm()).eps,
        "scale_attn_weights": a.scale != 1.0,
        "scale_attn_by_inverse_layer_idx": len(set(scales)) > 1,
        "attn_pdrop": a.dropout,
        "resid_pdrop": dropout_of(spec),
        "embd_pdrop": spec.embed.dropout,
    }


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    for i in range(len(spec.layers)):
        yield from below(
            f"stack.layers.{i}.",
            f"transformer.h.{i}.",
            linear("mixer.qkv", "attn.c_attn", bias=True, turned=True),
            linear("mixer.out", "attn.c_proj", bias=True, turned=True),
            linear("around_mixer.into", "ln_1", bias=True),
            linear("around_ffn.into", "ln_2", bias=True),
            linear("ffn.into", "mlp.c_fc", bias=True, turned=True),
            linear("ffn.out", "mlp.c_proj", bias=True, turned=True),
        )
    yield from linear("embed.tokens", "transformer.wte")
    yield from linear("embed.position.table", "transformer.wpe")
    yield from linear("stack.norm", "transformer.ln_f", bias=True)
    yield Tie("lm_head.weight", "transformer.wte.weight")


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    read,
    guess,
    table,
    body="transformer.",
    others=("GPT2Model",),
    silent=("reorder_and_upcast_attn", "n_ctx"),
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_bias|bias)",),
)
