"""Every family of decoders against the transformers library: logits, padding, caches, files. One list of cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as t
from hf.cases import NO_IDS, Case, V, proves

from brickformer.hf import FAMILIES
from brickformer.models import Decoder

pytestmark = pytest.mark.unchecked

SIZES = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **NO_IDS,
}


def llama(name: str, **options: Any) -> Case:
    return Case(f"llama-{name}", t.LlamaForCausalLM, SIZES | options)


def rope(kind: str, theta: float = 1000.0, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **options}}


def gpt2(name: str, **options: Any) -> Case:
    sizes = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, **NO_IDS}
    return Case(f"gpt2-{name}", t.GPT2LMHeadModel, sizes | options)


def sized(name: str, kind: Any, **options: Any) -> Case:
    return Case(name, kind, SIZES | options)


def neox(name: str, **options: Any) -> Case:
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    return Case(f"gpt_neox-{name}", t.GPTNeoXForCausalLM, sizes | options)


def falcon(name: str, **options: Any) -> Case:
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "intermediate_size")}
    return Case(f"falcon-{name}", t.FalconForCausalLM, sizes | options)


def bloom(name: str, **options: Any) -> Case:
    sizes = {"vocab_size": V, "hidden_size": 16, "n_layer": 2, "n_head": 4, **NO_IDS}
    return Case(f"bloom-{name}", t.BloomForCausalLM, sizes | options, takes_positions=False)


def mpt(name: str, **options: Any) -> Case:
    sizes = {"vocab_size": V, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}
    return Case(f"mpt-{name}", t.MptForCausalLM, sizes | options, takes_positions=False)


EXPERTS = {"head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}


def deepseek(name: str, **options: Any) -> Case:
    sizes = {
        **SIZES,
        "num_key_value_heads": 4,
        "q_lora_rank": 5,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 10,
        "first_k_dense_replace": 1,
    }
    return Case(f"deepseek_v3-{name}", t.DeepseekV3ForCausalLM, sizes | options)


# Where its projections have a bias, their state spaces read padding on the left as tokens: the mask comes before them.
def mamba(name: str, **options: Any) -> Case:
    sizes = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, **NO_IDS}
    return Case(
        f"mamba-{name}",
        t.MambaForCausalLM,
        sizes | options,
        takes_positions=False,
        noise=0.7,
        pads_left="use_bias" not in options,
    )


def mamba2(name: str, **options: Any) -> Case:
    heads = {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
    sizes = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, **heads, **NO_IDS}
    return Case(
        f"mamba2-{name}",
        t.Mamba2ForCausalLM,
        sizes | options,
        takes_positions=False,
        noise=0.7,
        pads_left="use_bias" not in options,
    )


def jamba(name: str, **options: Any) -> Case:
    sizes = {k: v for k, v in SIZES.items() if k != "max_position_embeddings"}
    state = {
        "mamba_d_state": 4,
        "num_hidden_layers": 4,
        "num_experts": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
    }
    return Case(
        f"jamba-{name}",
        t.JambaForCausalLM,
        sizes | state | options,
        takes_positions=False,
        noise=0.7,
        pads_left="mamba_proj_bias" not in options,
    )


CASES = [
    llama("plain"),
    llama("biases", attention_bias=True, mlp_bias=True, num_key_value_heads=4, tie_word_embeddings=True),
    llama("wide heads", head_dim=6, rms_norm_eps=1e-2, hidden_act="gelu_pytorch_tanh", **rope("default", 500.0)),
    llama("linear", **rope("linear", factor=3.0)),
    llama("dynamic", **rope("dynamic", factor=3.0)),
    llama("yarn", **rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=0.5)),
    llama(
        "yarn mscale", **rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.1)
    ),
    llama(
        "llama3",
        **rope("llama3", factor=8.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    gpt2("plain"),
    gpt2(
        "scales", scale_attn_by_inverse_layer_idx=True, n_inner=20, activation_function="relu", layer_norm_epsilon=0.1
    ),
    gpt2("unscaled", scale_attn_weights=False, activation_function="gelu"),
    sized("mistral-plain", t.MistralForCausalLM, sliding_window=None),
    sized(
        "mistral-window", t.MistralForCausalLM, sliding_window=3, head_dim=6, num_key_value_heads=1, **rope("default")
    ),
    sized("qwen2-plain", t.Qwen2ForCausalLM),
    sized("qwen2-windows", t.Qwen2ForCausalLM, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    sized("qwen3-plain", t.Qwen3ForCausalLM, head_dim=6, attention_bias=True),
    sized(
        "qwen3-windows",
        t.Qwen3ForCausalLM,
        head_dim=4,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=True,
        rms_norm_eps=1e-2,
    ),
    sized("gemma-plain", t.GemmaForCausalLM, head_dim=6, **rope("default")),
    sized("gemma-untied", t.GemmaForCausalLM, head_dim=4, attention_bias=True, tie_word_embeddings=False),
    sized("gemma2-plain", t.Gemma2ForCausalLM, head_dim=6, sliding_window=3, query_pre_attn_scalar=9),
    sized(
        "gemma2-caps",
        t.Gemma2ForCausalLM,
        head_dim=4,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention"],
        query_pre_attn_scalar=5,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.5,
    ),
    sized(
        "gemma2-uncapped", t.Gemma2ForCausalLM, head_dim=4, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    sized("phi3-plain", t.Phi3ForCausalLM),
    sized("phi3-window", t.Phi3ForCausalLM, sliding_window=3, **rope("default", partial_rotary_factor=0.5)),
    sized("olmo2-plain", t.Olmo2ForCausalLM),
    sized("olmo2-biases", t.Olmo2ForCausalLM, attention_bias=True, rms_norm_eps=1e-2, **rope("default")),
    neox("plain", **rope("default", partial_rotary_factor=0.5)),
    neox(
        "serial",
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="relu",
        **rope("linear", factor=2.0, partial_rotary_factor=1.0),
    ),
    bloom("plain"),
    bloom("odd heads", n_head=6, hidden_size=24, layer_norm_epsilon=1e-2),
    mpt("plain"),
    mpt("odd heads", n_heads=6, d_model=24, attn_config={"softmax_scale": 0.3}),
    falcon("one key head"),
    falcon("all heads", multi_query=False, bias=True, parallel_attn=False, **rope("default")),
    falcon("parallel", multi_query=False, tie_word_embeddings=False, activation="relu"),
    falcon("groups", new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=20),
    falcon("one norm", new_decoder_architecture=True, num_kv_heads=1, num_ln_in_parallel_attn=1),
    sized("mixtral-plain", t.MixtralForCausalLM, num_local_experts=4),
    sized("mixtral-window", t.MixtralForCausalLM, num_local_experts=3, num_experts_per_tok=1, sliding_window=3),
    sized("qwen3_moe-plain", t.Qwen3MoeForCausalLM, **EXPERTS, num_hidden_layers=3, mlp_only_layers=[1]),
    sized("qwen3_moe-normed", t.Qwen3MoeForCausalLM, **EXPERTS, norm_topk_prob=True, decoder_sparse_step=2),
    deepseek("plain"),
    deepseek("groups", n_group=2, topk_group=1, norm_topk_prob=False, rope_interleave=False, q_lora_rank=None),
    deepseek(
        "yarn",
        n_shared_experts=2,
        routed_scaling_factor=0.7,
        first_k_dense_replace=0,
        **rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.6, mscale_all_dim=0.8),
    ),
    mamba("plain"),
    mamba("biases", use_bias=True, use_conv_bias=False, expand=1, time_step_rank=3, conv_kernel=2, state_size=5),
    mamba("untied", tie_word_embeddings=False, layer_norm_epsilon=1e-2),
    mamba2("plain"),
    jamba("plain"),
    jamba(
        "biases",
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_expand=1,
        mamba_dt_rank=3,
        mamba_d_conv=2,
        expert_layer_period=3,
        expert_layer_offset=0,
        num_experts_per_tok=1,
        rms_norm_eps=1e-2,
        tie_word_embeddings=True,
    ),
    jamba("dense", num_experts=1, attn_layer_period=2, attn_layer_offset=0),
    mamba2("groups", n_groups=2, use_bias=True, use_conv_bias=False, conv_kernel=3, tie_word_embeddings=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_family(case: Case, tmp_path: Path) -> None:
    proves(case, tmp_path)


def test_every_decoder_has_its_cases() -> None:
    decoders = {name for name, family in FAMILIES.items() if family.kind is Decoder}
    assert decoders == {case.family for case in CASES}
