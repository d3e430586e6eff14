"""Presets: models by name, as functions that return specs. Sized by arguments; what they return can be changed at will.

Every function takes keyword arguments only. A file states the paper and where the preset deviates from it.
"""

from collections.abc import Callable
from types import MappingProxyType

from brickformer.models import ModelSpec
from brickformer.presets.bert import bert
from brickformer.presets.gpt2 import gpt2
from brickformer.presets.llama import llama
from brickformer.presets.vaswani import vaswani, vaswani_small

PRESETS: MappingProxyType[str, Callable[..., ModelSpec]] = MappingProxyType(
    {"vaswani": vaswani, "vaswani_small": vaswani_small, "gpt2": gpt2, "llama": llama, "bert": bert}
)
"""Every preset by name: what `brick show NAME` knows."""

__all__ = ["PRESETS", "bert", "gpt2", "llama", "vaswani", "vaswani_small"]
