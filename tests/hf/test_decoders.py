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
        "scales", scale_attn_by_inverse_layer_idx=True, n_inner=20, activation_function="relu", layer_norm_epsilon=1e-2
    ),
    gpt2("unscaled", scale_attn_weights=False, activation_function="gelu"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_family(case: Case, tmp_path: Path) -> None:
    proves(case, tmp_path)


def test_every_decoder_has_its_cases() -> None:
    decoders = {name for name, family in FAMILIES.items() if family.kind is Decoder}
    assert decoders == {case.family for case in CASES}
