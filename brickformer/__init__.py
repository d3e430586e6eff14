"""brickformer: a construction kit for Transformers in PyTorch.

    from brickformer import Attention, Decoder, GLU, Layer, Rope, pattern

    spec = Decoder(vocab=100, dim=64, layers=pattern([Layer(Attention(heads=4, position=Rope()), GLU(176))], depth=4))
    model = spec.build()

The names below are the public interface. They are imported when they are first used, so that `import brickformer` and
`brick --help` do not wait for torch. `from brickformer.spec import spec` is the decorator for bricks of your own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brickformer.doctor import diagnose
    from brickformer.embed import Embed, Head
    from brickformer.errors import BrickError, DataError, RunError, SpecError, StateError
    from brickformer.feedforward import GLU, MLP
    from brickformer.generate import Sampling, Stop
    from brickformer.layers import Layer, pattern
    from brickformer.mask import CAUSAL, FULL, Mask, Span
    from brickformer.mixers.attention import Attention
    from brickformer.mixers.cross import Cross
    from brickformer.models import (
        Decoder,
        DecoderModel,
        Encoder,
        EncoderDecoder,
        EncoderDecoderModel,
        EncoderModel,
    )
    from brickformer.norms import LayerNorm, RMSNorm
    from brickformer.positions import Alibi, Learned, Rope, Sinusoid, T5Bias
    from brickformer.presets import bert, gpt2, llama, vaswani
    from brickformer.proof import check
    from brickformer.recipes import Run, Session, Trained
    from brickformer.recipes.published import load, save
    from brickformer.spec import Spec
    from brickformer.tasks import Pairs, Reverse, Text
    from brickformer.train import AdamW, Muon, Training

_WHERE = {
    "doctor": "diagnose",
    "embed": "Embed Head",
    "errors": "BrickError DataError RunError SpecError StateError",
    "feedforward": "GLU MLP",
    "generate": "Sampling Stop",
    "layers": "Layer pattern",
    "mask": "CAUSAL FULL Mask Span",
    "mixers.attention": "Attention",
    "mixers.cross": "Cross",
    "models": "Decoder DecoderModel Encoder EncoderDecoder EncoderDecoderModel EncoderModel",
    "norms": "LayerNorm RMSNorm",
    "positions": "Alibi Learned Rope Sinusoid T5Bias",
    "presets": "bert gpt2 llama vaswani",
    "proof": "check",
    "recipes": "Run Session Trained",
    "recipes.published": "load save",
    "spec": "Spec",
    "tasks": "Pairs Reverse Text",
    "train": "AdamW Muon Training",
}
_HOME = {name: module for module, names in _WHERE.items() for name in names.split()}

__all__ = [
    "AdamW",
    "Alibi",
    "Attention",
    "BrickError",
    "CAUSAL",
    "Cross",
    "DataError",
    "Decoder",
    "DecoderModel",
    "Embed",
    "Encoder",
    "EncoderDecoder",
    "EncoderDecoderModel",
    "EncoderModel",
    "FULL",
    "GLU",
    "Head",
    "Layer",
    "LayerNorm",
    "Learned",
    "MLP",
    "Mask",
    "Muon",
    "Pairs",
    "RMSNorm",
    "Reverse",
    "Rope",
    "Run",
    "RunError",
    "Sampling",
    "Session",
    "Sinusoid",
    "Span",
    "Spec",
    "SpecError",
    "StateError",
    "Stop",
    "T5Bias",
    "Text",
    "Trained",
    "Training",
    "bert",
    "check",
    "diagnose",
    "gpt2",
    "llama",
    "load",
    "pattern",
    "save",
    "vaswani",
]


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'brickformer' has no attribute {name!r}")
    value = getattr(import_module(f"brickformer.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
