"""Every family, one a file. A new one is imported and listed here; the first in this list that fits a spec gives it its
name on the way out, so that the plainest come first.
"""

from types import MappingProxyType

from brickformer.hf.families import (  # encoders and encoder-decoders
    albert,
    bart,
    bert,
    bloom,
    deepseek_v3,
    distilbert,
    falcon,
    gemma,
    gemma2,
    gpt2,
    gpt_neox,
    jamba,
    llama,
    mamba,
    mamba2,
    mistral,
    mixtral,
    modernbert,
    mpt,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    t5,
)
from brickformer.hf.family import Family

_ALL: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    phi3.FAMILY,
    olmo2.FAMILY,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
    bloom.FAMILY,
    mpt.FAMILY,
    falcon.FAMILY,
    mixtral.FAMILY,
    qwen3_moe.FAMILY,
    deepseek_v3.FAMILY,
    mamba.FAMILY,
    mamba2.FAMILY,
    jamba.FAMILY,
    bert.FAMILY,
    bert.ROBERTA,
    distilbert.FAMILY,
    albert.FAMILY,
    modernbert.FAMILY,
    t5.FAMILY,
    bart.FAMILY,
    bart.MARIAN,
)
FAMILIES: MappingProxyType[str, Family] = MappingProxyType({family.model_type: family for family in _ALL})
"""Family by model_type."""
assert len(FAMILIES) == len(_ALL), "two families of one name"
