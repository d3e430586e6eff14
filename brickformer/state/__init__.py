"""State: what a model remembers between calls: an argument, owned by the caller, changed in place by its mixer only."""

from brickformer.state.base import State
from brickformer.state.kv import KV, RingKV, kv_for
from brickformer.state.stack import CacheType, CrossKV, LayerState, StackState, check_cache

__all__ = ["KV", "CacheType", "CrossKV", "LayerState", "RingKV", "StackState", "State", "check_cache", "kv_for"]
