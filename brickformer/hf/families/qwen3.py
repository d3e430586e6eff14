"""qwen3 (arXiv 2505.09388): a norm of each head's queries and keys, no biases, heads of any width."""

from __future__ import annotations

from typing import Any

from brickformer.hf.config import Config
from brickformer.hf.families import llama, qwen2
from brickformer.hf.family import Family
from brickformer.hf.words import attention_of
from brickformer.models import Decoder
from brickformer.norms import RMSNorm


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    norm = RMSNorm(config.get("rms_norm_eps", float, 1e-6))
    return qwen2.layered(config, qk_norm=norm, width=128, bias=config.get("attention_bias", bool, False))


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    return llama.fields(spec) | qwen2.layer_fields(spec) | {"attention_bias": attention_of(spec).bias}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", read, guess, llama.table, others=("Qwen3Model",))
