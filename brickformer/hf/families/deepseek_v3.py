"""deepseek_v3 (arXiv 2412.19437): latent attention; dense layers first, then a sigmoid router over groups of experts.

The file keeps each head's queries as [position-free, rotary] and each head's up-projection as [key, value]; ours keep
all of one kind together. Layers past the last are for predicting two tokens at once, and no part of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.feedforward import GLU, FeedForwardSpec
from brickformer.hf.config import Config
from brickformer.hf.families import llama, qwen3_moe
from brickformer.hf.family import Family, first
from brickformer.hf.rope import read_rope, rope_fields, sharpened
from brickformer.hf.table import Line, below, interleaved, linear, tensor
from brickformer.hf.words import ACTIVATIONS, activation_word, glu_of, sizes
from brickformer.layers import Layer
from brickformer.mixers.latent import LatentAttention
from brickformer.models import Decoder
from brickformer.moe import MoE, Router
from brickformer.norms import RMSNorm
from brickformer.positions import Rope, Yarn

INNER = RMSNorm(1e-6)
"""Of the compressed vectors, whatever the configuration says of the others."""


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab, dim, depth = sizes(config)
    config.only("attention_bias", False)
    config.skip("head_dim", "qk_head_dim", "num_key_value_heads")  # they follow from others
    config.only("topk_method", "noaux_tc")
    config.only("scoring_func", "sigmoid")
    config.only("moe_layer_freq", 1)
    layers = []
    dense, act = config.get("first_k_dense_replace", int, 3), config.choice("hidden_act", ACTIVATIONS, "silu")
    norm, mixer, moe = RMSNorm(config.get("rms_norm_eps", float, 1e-6)), _attention(config), _experts(config)
    plain = GLU(config.get("intermediate_size", int), act)
    for i in range(depth):
        ffn: FeedForwardSpec = plain if i < dense else moe
        layers.append(Layer(mixer, ffn, norm=norm))
    return Decoder(vocab, dim, tuple(layers), head=llama.head(config))


def _attention(config: Config) -> LatentAttention:
    width, turned = config.get("qk_nope_head_dim", int, 128), config.get("qk_rope_head_dim", int, 64)
    rope = read_rope(config, turned, layout="interleaved" if config.get("rope_interleave", bool, True) else "half")
    scaling = config.data.get("rope_parameters") or config.data.get("rope_scaling") or {}
    scale, strength = (width + turned) ** -0.5, scaling.get("mscale_all_dim")
    if strength and isinstance(rope.scaling, Yarn):
        scale *= sharpened(rope.scaling.factor, strength) ** 2
    return LatentAttention(
        config.count("num_attention_heads"),
        rank=config.get("kv_lora_rank", int, 512),
        rope_dim=turned,
        head_dim=width,
        v_dim=config.get("v_head_dim", int, 128),
        q_rank=config.optional("q_lora_rank", int, 1536),
        position=rope,
        norm=INNER,
        scale=scale,
        dropout=config.get("attention_dropout", float, 0.0),
    )


def _experts(config: Config) -> MoE:
    act, width = config.choice("hidden_act", ACTIVATIONS, "silu"), config.get("moe_intermediate_size", int, 2048)
    router = Router(
        config.get("num_experts_per_tok", int, 8),
        groups=config.get("n_group", int, 8),
        top_groups=config.get("topk_group", int, 4),
        score="sigmoid",
        normalize=config.get("norm_topk_prob", bool, True),
        scale=config.get("routed_scaling_factor", float, 2.5),
    )
    shared = GLU(width * config.count("n_shared_experts", 1), act)
    return MoE(config.count("n_routed_experts|num_local_experts", 256), GLU(width, act), router, shared=shared)


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    a = first(spec, LatentAttention, LatentAttention(1, 1, 2))
    width = a.head_dim or max(1, spec.dim // a.heads)
    moe = first(spec, MoE, MoE(2, GLU(1), shared=GLU(1)))
    inner = moe.expert.hidden if isinstance(moe.expert, GLU) else 1
    plain = next((layer.ffn for layer in spec.layers if isinstance(layer.ffn, GLU)), GLU(1, glu_of(spec).activation))
    rope, r = first(spec, Rope, Rope()), moe.router
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.dim,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.heads,
        "kv_lora_rank": a.rank,
        "q_lora_rank": a.q_rank,
        "qk_nope_head_dim": width,
        "qk_rope_head_dim": a.rope_dim,
        "v_head_dim": a.v_dim or width,
        "rope_interleave": rope.layout == "interleaved",
        "attention_bias": False,
        "attention_dropout": a.dropout,
        "intermediate_size": plain.hidden,
        "moe_intermediate_size": inner,
        "first_k_dense_replace": sum(isinstance(layer.ffn, GLU) for layer in spec.layers),
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared.hidden // inner if isinstance(moe.shared, GLU) else 1,
        "num_experts_per_tok": r.top_k,
        "n_group": r.groups,
        "topk_group": r.top_groups,
        "norm_topk_prob": r.normalize,
        "routed_scaling_factor": r.scale,
        "hidden_act": activation_word(glu_of(spec).activation),
        "rms_norm_eps": first(spec.layers[0].norm, RMSNorm, RMSNorm()).eps,
        "tie_word_embeddings": spec.head.tied,
        **_sharpened(rope_fields(rope, a.rope_dim), rope, (a.scale or 0.0) * (width + a.rope_dim) ** 0.5),
    }


def _sharpened(fields: dict[str, Any], rope: Rope, more: float) -> dict[str, Any]:
    """The same with `mscale_all_dim`, the field by which scores are `more` than usual."""
    if isinstance(rope.scaling, Yarn) and more > 1.0:
        strength = (more**0.5 - 1.0) / (sharpened(rope.scaling.factor) - 1.0)
        for name in ("rope_scaling", "rope_parameters"):
            fields[name] |= {"mscale_all_dim": strength, "attention_factor": rope.scaling.sharpen()}
    return fields


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    for i, layer in enumerate(spec.layers):
        a = layer.mixer
        assert isinstance(a, LatentAttention) and a.head_dim and a.v_dim
        ours, theirs = f"stack.layers.{i}.", f"model.layers.{i}."
        yield from below(ours, theirs, llama.norm_names(), qwen3_moe.ffn_names(layer))
        if isinstance(layer.ffn, MoE):
            bias = tensor("ffn.router.bias", "mlp.gate.e_score_correction_bias")
            shared = linear("ffn.shared.gate_up", "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
            yield from below(ours, theirs, [bias], shared, linear("ffn.shared.out", "mlp.shared_experts.down_proj"))
        queries = interleaved(a.heads, a.head_dim, a.rope_dim)
        if a.q_rank is None:
            yield from below(ours, theirs, linear("mixer.q_up", "self_attn.q_proj", rows=queries))
        else:
            down = linear("mixer.q_down.0", "self_attn.q_a_proj"), linear("mixer.q_down.1", "self_attn.q_a_layernorm")
            yield from below(ours, theirs, *down, linear("mixer.q_up", "self_attn.q_b_proj", rows=queries))
        yield from below(
            ours,
            theirs,
            linear("mixer.down", "self_attn.kv_a_proj_with_mqa"),
            linear("mixer.norm", "self_attn.kv_a_layernorm"),
            linear("mixer.up", "self_attn.kv_b_proj", rows=interleaved(a.heads, a.head_dim, a.v_dim)),
            linear("mixer.out", "self_attn.o_proj"),
        )
    yield from llama.rest(spec)


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    read,
    guess,
    table,
    others=("DeepseekV3Model",),
    silent=("num_nextn_predict_layers", "num_mtp_layers", "layer_types", "mlp_layer_types"),
    ignored=(r"model\.layers\.61\..*",),
)
