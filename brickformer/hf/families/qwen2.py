"""qwen2 (arXiv 2407.10671): llama with biases on queries, keys and values; later layers may have a window."""

from __future__ import annotations

from typing import Any

from brickformer.hf.config import Config
from brickformer.hf.families import llama
from brickformer.hf.family import Family
from brickformer.hf.windows import read_windows, window_fields
from brickformer.hf.words import sizes
from brickformer.layers import Layer
from brickformer.mask import Mask
from brickformer.models import Decoder
from brickformer.norms import NormSpec, RMSNorm


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    return layered(config, bias=True, out_bias=False)


def layered(config: Config, *, qk_norm: NormSpec | None = None, **attention: Any) -> Decoder:
    """A stack of llama's layers, each with its own window."""
    vocab, dim, depth = sizes(config)
    windowed, since = config.get("use_sliding_window", bool, False), config.get("max_window_layers", int, 28)
    windows = read_windows(config, depth, default=lambda i: i >= since)
    norm = RMSNorm(config.get("rms_norm_eps", float, 1e-6))
    layers = []
    for window in windows:
        mask = Mask(window=window if windowed else None)
        mixer = llama.attention(config, dim, groups=32, mask=mask, qk_norm=qk_norm, **attention)
        layers.append(Layer(mixer, llama.glu(config), norm=norm))
    return Decoder(vocab, dim, tuple(layers), head=llama.head(config))


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    fields = {name: value for name, value in llama.fields(spec).items() if name != "head_dim"}
    return fields | layer_fields(spec)


def layer_fields(spec: Decoder) -> dict[str, Any]:
    """The fields of windows."""
    windows = window_fields(spec)
    return windows | {"use_sliding_window": windows["sliding_window"] is not None, "max_window_layers": 0}


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read, guess, llama.table, others=("Qwen2Model",))
