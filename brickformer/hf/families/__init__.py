"""Every family, one a file. A new one is imported and listed here; the first in this list that fits a spec gives it its
name on the way out, so that the plainest come first.
"""

from types import MappingProxyType

from brickformer.hf.families import gpt2, llama
from brickformer.hf.family import Family

_ALL: tuple[Family, ...] = (
    llama.FAMILY,
    gpt2.FAMILY,
)
FAMILIES: MappingProxyType[str, Family] = MappingProxyType({family.model_type: family for family in _ALL})
"""Family by model_type."""
assert len(FAMILIES) == len(_ALL), "two families of one name"
