"""mpt (MosaicML 2023): ALiBi, no bias anywhere, not even in the norms, a tied head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.feedforward import MLP
from brickformer.hf.config import Config
from brickformer.hf.family import Family, first
from brickformer.hf.table import Line, Tie, below, linear
from brickformer.hf.words import attention_of
from brickformer.layers import Layer, pattern
from brickformer.mixers.attention import Attention
from brickformer.models import Decoder
from brickformer.norms import LayerNorm
from brickformer.positions import Alibi


def read(config: Config) -> Decoder:
    """Their configuration as ours. What their code does not read either (`emb_pdrop`, `init_config`) is silent."""
    dim = config.get("d_model", int)
    for name, value in (("expansion_ratio", 4), ("no_bias", True), ("embedding_fraction", 1.0), ("logit_scale", None)):
        config.only(name, value)
    config.only("tie_word_embeddings", True)
    scale, dropout = None, 0.0
    if config.has("attn_config"):
        inside = config.part("attn_config")
        for name, values in _ONLY.items():
            inside.only(name, *values)
        inside.skip("attn_impl", "attn_uses_sequence_id", "model_type")
        scale, dropout = inside.get("softmax_scale", float, None), inside.get("attn_pdrop", float, 0.0)
        inside.finish()
    attention = Attention(config.count("n_heads"), position=Alibi(), scale=scale, dropout=dropout)
    norm = LayerNorm(config.get("layer_norm_epsilon", float, 1e-5), bias=False)
    layer = Layer(attention, MLP(4 * dim, "gelu", bias=False), norm=norm, dropout=dropout)
    return Decoder(config.get("vocab_size", int), dim, pattern([layer], config.count("n_layers")))


_ONLY: dict[str, tuple[Any, ...]] = {
    "attn_type": ("multihead_attention",),
    "clip_qkv": (None,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "alibi": (True,),
    "alibi_bias_max": (8,),
}


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    a = attention_of(spec)
    return {
        "vocab_size": spec.vocab,
        "d_model": spec.dim,
        "n_layers": len(spec.layers),
        "n_heads": a.heads,
        "layer_norm_epsilon": first(spec, LayerNorm, LayerNorm()).eps,
        "attn_config": {"softmax_scale": a.scale},
    }


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    for i in range(len(spec.layers)):
        yield from below(
            f"stack.layers.{i}.",
            f"transformer.blocks.{i}.",
            linear("mixer.qkv", "attn.Wqkv"),
            linear("mixer.out", "attn.out_proj"),
            linear("around_mixer.into", "norm_1"),
            linear("around_ffn.into", "norm_2"),
            linear("ffn.into", "ffn.up_proj"),
            linear("ffn.out", "ffn.down_proj"),
        )
    yield from linear("embed.tokens", "transformer.wte")
    yield from linear("stack.norm", "transformer.norm_f")
    yield Tie("lm_head.weight", "transformer.wte.weight")


FAMILY = Family(
    "mpt",
    "MptForCausalLM",
    read,
    guess,
    table,
    body="transformer.",
    others=("MptModel", "MPTForCausalLM"),
    silent=tuple("max_seq_len resid_pdrop emb_pdrop init_device init_config norm_type learned_pos_emb verbose".split()),
)
