"""gemma (arXiv 2403.08295): llama with wide heads, GeGLU, embeddings times √D, gains stored as g - 1, a tied head."""

from __future__ import annotations

from typing import Any

from brickformer.embed import Embed
from brickformer.feedforward import GLU
from brickformer.hf.config import Config
from brickformer.hf.families import llama
from brickformer.hf.family import Family, first
from brickformer.hf.words import attention_of, sizes
from brickformer.layers import Layer, pattern
from brickformer.models import Decoder
from brickformer.norms import OffsetRMSNorm


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab, dim, depth = sizes(config)
    causal_only(config)
    attention = llama.attention(config, dim, width=256, groups=16, bias=config.get("attention_bias", bool, False))
    layer = Layer(attention, glu(config), norm=OffsetRMSNorm(config.get("rms_norm_eps", float, 1e-6)))
    return Decoder(vocab, dim, pattern([layer], depth), embed=Embed(scaled=True), head=llama.head(config, tied=True))


def causal_only(config: Config) -> None:
    """Errors: SpecError where the model is meant to see the future."""
    config.only("use_bidirectional_attention", None, False)


def glu(config: Config) -> GLU:
    """The gated network; "gelu" means its tanh formula here, and the older field is the same one."""
    word = config.get("hidden_activation", str, None) or config.get("hidden_act", str, "gelu_pytorch_tanh")
    config.skip("hidden_act")
    if word not in ("gelu", "gelu_pytorch_tanh", "gelu_new"):
        raise config.refuse("hidden_act", "'gelu_pytorch_tanh'")
    return GLU(config.get("intermediate_size", int), "gelu_tanh")


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    eps = first(spec, OffsetRMSNorm, OffsetRMSNorm()).eps
    return llama.fields(spec) | {"rms_norm_eps": eps, "attention_bias": attention_of(spec).bias}


FAMILY = Family("gemma", "GemmaForCausalLM", read, guess, llama.table, others=("GemmaModel",))
