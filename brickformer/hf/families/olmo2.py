"""olmo2 (arXiv 2501.00656): llama with the norm after each branch, and all queries (all keys) normed together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.hf.config import Config
from brickformer.hf.families import llama
from brickformer.hf.family import Family
from brickformer.hf.table import Line, below, linear
from brickformer.hf.words import attention_of, sizes
from brickformer.layers import Layer, pattern
from brickformer.models import Decoder
from brickformer.norms import RMSNorm


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab, dim, depth = sizes(config)
    norm = RMSNorm(config.get("rms_norm_eps", float, 1e-5))
    attention = llama.attention(config, dim, bias=config.get("attention_bias", bool, False), qk_norm_all=norm)
    layer = Layer(attention, llama.glu(config), norm=norm, place="branch")
    return Decoder(vocab, dim, pattern([layer], depth), head=llama.head(config))


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    return llama.fields(spec) | {"attention_bias": attention_of(spec).bias}


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    for i, layer in enumerate(spec.layers):
        yield from below(
            f"stack.layers.{i}.",
            f"model.layers.{i}.",
            llama.attention_names(layer),
            llama.glu_names(layer),
            linear("mixer.q_norm_all", "self_attn.q_norm"),
            linear("mixer.k_norm_all", "self_attn.k_norm"),
            linear("around_mixer.out", "post_attention_layernorm"),
            linear("around_ffn.out", "post_feedforward_layernorm"),
        )
    yield from llama.rest(spec)


FAMILY = Family("olmo2", "Olmo2ForCausalLM", read, guess, table, others=("Olmo2Model",))
