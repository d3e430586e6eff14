"""gemma2 (arXiv 2408.00118): gemma with norms on both sides of a branch, soft caps, windows in every other layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.embed import Embed
from brickformer.feedforward import GLU
from brickformer.hf.config import Config
from brickformer.hf.families import gemma, llama
from brickformer.hf.family import Family
from brickformer.hf.table import Line, below, linear
from brickformer.hf.windows import read_windows, window_fields, windows_of
from brickformer.hf.words import ACTIVATIONS, activation_word, attention_of, check_width, checked_width, glu_of, sizes
from brickformer.layers import Layer
from brickformer.mask import Mask
from brickformer.models import Decoder
from brickformer.norms import OffsetRMSNorm


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab, dim, depth = sizes(config)
    check_width(config, dim)
    gemma.causal_only(config)
    config.skip("cache_implementation")
    bias, norm = config.get("attention_bias", bool, False), OffsetRMSNorm(config.get("rms_norm_eps", float, 1e-6))
    width = config.get("query_pre_attn_scalar", int, 256)
    if width <= 0:
        raise config.refuse("query_pre_attn_scalar", "above 0")
    cap = config.optional("attn_logit_softcapping", float, 50.0)
    config.skip("hidden_act")  # of its first files, which say the other field too
    act = config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    glu = GLU(config.get("intermediate_size", int), act)
    layers = []
    for window in read_windows(config, depth, default=lambda i: i % 2 == 0):
        mask = Mask(window=window)
        attention = llama.attention(
            config, dim, width=256, groups=4, mask=mask, softcap=cap, scale=width**-0.5, bias=bias
        )
        layers.append(Layer(attention, glu, norm=norm, place="peri"))
    head = llama.head(config, tied=True).but(softcap=config.optional("final_logit_softcapping", float, 30.0))
    return Decoder(vocab, dim, tuple(layers), embed=Embed(scaled=True), head=head)


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    a = attention_of(spec)
    scale = a.scale or (a.head_dim or spec.dim / a.heads) ** -0.5
    return (
        gemma.guess(spec)
        | window_fields(spec)
        | checked_width(spec)
        | {
            "sliding_window": next((w for w in windows_of(spec) if w is not None), UNUSED),
            "hidden_activation": activation_word(glu_of(spec).activation),
            "query_pre_attn_scalar": max(1, round(min(scale**-2, 1e9))),  # theirs wants a whole number
            "attn_logit_softcapping": a.softcap,
            "final_logit_softcapping": spec.head.softcap,
        }
    )


UNUSED = 4096
"""The window that no layer has: theirs wants a number even so."""


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    for i, layer in enumerate(spec.layers):
        yield from below(
            f"stack.layers.{i}.",
            f"model.layers.{i}.",
            llama.attention_names(layer),
            llama.glu_names(layer),
            linear("around_mixer.into", "input_layernorm"),
            linear("around_mixer.out", "post_attention_layernorm"),
            linear("around_ffn.into", "pre_feedforward_layernorm"),
            linear("around_ffn.out", "post_feedforward_layernorm"),
        )
    yield from llama.rest(spec)


FAMILY = Family("gemma2", "Gemma2ForCausalLM", read, guess, table, others=("Gemma2Model",))
