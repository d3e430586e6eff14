"""Which layers look back over a window only: `layer_types` of today, and the rules that stood for it before.

read_windows(config, depth)   ->  the window of each layer, None where it sees everything
window_fields(spec)           ->  layer_types, sliding_window
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from brickformer.hf.config import Config
from brickformer.mixers.attention import Attention
from brickformer.models import Decoder

SLIDING, FULL = "sliding_attention", "full_attention"


def read_windows(config: Config, depth: int, *, default: Callable[[int], bool]) -> list[int | None]:
    """default: whether layer i has a window where no layer_types say so. Errors: SpecError: another type, no window."""
    window = config.optional("sliding_window", int, 4096)
    kinds = config.get("layer_types", list, None)
    if kinds is None:
        slides = [default(i) for i in range(depth)]
    elif len(kinds) != depth or not set(kinds) <= {SLIDING, FULL}:
        raise config.refuse("layer_types", f"{depth} of {SLIDING!r} and {FULL!r}")
    else:
        slides = [kind == SLIDING for kind in kinds]
    return [window if slide else None for slide in slides]


def windows_of(spec: Decoder) -> list[int | None]:
    """The window of each layer."""
    return [layer.mixer.mask.window if isinstance(layer.mixer, Attention) else None for layer in spec.layers]


def window_fields(spec: Decoder) -> dict[str, Any]:
    """Every layer's type, and the window there is (one at most can be said)."""
    windows = windows_of(spec)
    return {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
    }
