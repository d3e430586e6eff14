"""Which fields of which specs an ONNX graph says.

    SAID     written into the graph
    QUIET    of training, or of how a kernel is chosen: they change no logit

A field that is in neither is refused unless it has its default, so that none is dropped, a new one least of all. Kinds
that are not here are refused where they stand.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Final

from brickformer.embed import Embed, Head
from brickformer.errors import SpecError
from brickformer.feedforward import GLU, MLP
from brickformer.layers import Layer
from brickformer.mask import Mask
from brickformer.mixers.attention import Attention
from brickformer.mixers.cross import Cross
from brickformer.mixers.pointwise import Pointwise
from brickformer.mixers.shortconv import ShortConv
from brickformer.models import Decoder, Encoder, EncoderDecoder
from brickformer.norms import DynamicTanh, LayerNorm, NoNorm, OffsetRMSNorm, RMSNorm, ScaleNorm
from brickformer.positions import Learned, Rope, Sinusoid
from brickformer.spec import Spec

Fields = MappingProxyType[type[Spec], frozenset[str]]


def _table(said: dict[type[Spec], str]) -> Fields:
    return MappingProxyType({kind: frozenset(names.split()) for kind, names in said.items()})


SAID: Final[Fields] = _table(
    {
        Decoder: "vocab dim layers embed head loops",
        Encoder: "vocab dim layers embed loops",
        EncoderDecoder: "encoder decoder shared",
        Embed: "position scaled norm width segments",
        Head: "tied bias softcap scaled",
        Learned: "max_len skip",
        Sinusoid: "max_len layout",
        Rope: "theta width layout scaling",
        Layer: "mixer ffn cross norm place arrange layerscale mixer_norm",
        Attention: "heads kv_heads head_dim position mask qk_norm qk_norm_all softcap scale bias out_bias gate",
        Cross: "heads kv_heads head_dim qk_norm bias scale",
        Mask: "causal window",
        ShortConv: "mixer kernel",
        Pointwise: "ffn",
        MLP: "hidden activation bias",
        GLU: "hidden activation bias",
        LayerNorm: "eps bias",
        RMSNorm: "eps",
        OffsetRMSNorm: "eps",
        ScaleNorm: "eps",
        DynamicTanh: "alpha",
        NoNorm: "",
    }
)
QUIET: Final[Fields] = _table(
    {
        Encoder: "head one_way pooler",  # what a decoder reads is the memory
        Embed: "dropout",
        Layer: "dropout",
        Attention: "dropout backend",
        Cross: "dropout backend",
        MLP: "dropout",
        GLU: "dropout",
    }
)


def check_said(spec: Spec) -> None:
    """Errors: SpecError naming a field that a graph does not know and its value."""
    for part in spec.parts():
        said = SAID.get(type(part))
        if said is None:
            continue
        for f in dataclasses.fields(part):  # type: ignore[arg-type]
            value = getattr(part, f.name)
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            if f.name not in said | QUIET.get(type(part), frozenset()) and value != default:
                told = "it left out" if default is dataclasses.MISSING else repr(default)
                raise SpecError(
                    f"export: {part.kind}.{f.name}={value!r} cannot be written as an ONNX graph; expected {told}."
                )
