"""mistral (arXiv 2310.06825): llama whose tokens look back over a window."""

from __future__ import annotations

from typing import Any

from brickformer.hf.config import Config
from brickformer.hf.families import llama
from brickformer.hf.family import Family
from brickformer.hf.words import attention_of, sizes
from brickformer.layers import Layer, pattern
from brickformer.mask import Mask
from brickformer.models import Decoder
from brickformer.norms import RMSNorm


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab, dim, depth = sizes(config)
    mask = Mask(window=config.optional("sliding_window", int, 4096))
    attention = llama.attention(config, dim, groups=8, mask=mask)
    layer = Layer(attention, llama.glu(config), norm=RMSNorm(config.get("rms_norm_eps", float, 1e-6)))
    return Decoder(vocab, dim, pattern([layer], depth), head=llama.head(config))


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    return llama.fields(spec) | {"sliding_window": attention_of(spec).mask.window}


FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    read,
    guess,
    llama.table,
    others=("MistralModel",),
    ignored=llama.FAMILY.ignored,
)
