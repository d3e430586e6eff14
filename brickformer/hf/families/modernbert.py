"""modernbert (arXiv 2412.13663): rotary positions, gated networks, norms before the branches, windows in most layers.

The first layer's attention has no norm of its own: what it reads was normed as it was embedded. Layers with a window
turn queries and keys at another rate than those without.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.embed import Embed, Head, Transform
from brickformer.feedforward import GLU
from brickformer.hf.config import Config
from brickformer.hf.family import Family, first
from brickformer.hf.table import Line, Tie, below, linear, tensor
from brickformer.hf.words import ACTIVATIONS, activation_word, attention_of, glu_of, sizes
from brickformer.layers import Layer
from brickformer.mask import FULL, Mask
from brickformer.mixers.attention import Attention
from brickformer.models import Encoder
from brickformer.norms import LayerNorm, NoNorm
from brickformer.positions import Rope

WHOLE, LOCAL = "full_attention", "sliding_attention"


def read(config: Config) -> Encoder:
    """Their configuration as ours."""
    vocab, dim, depth = sizes(config)
    config.only("tie_word_embeddings", True)
    norm = LayerNorm(config.get("norm_eps", float, 1e-5), config.get("norm_bias", bool, False))
    every = config.get("global_attn_every_n_layers", int, 3)
    kinds = _kinds(config, [LOCAL if i % every else WHOLE for i in range(depth)])
    window = Mask(causal=False, window=config.get("local_attention", int, 128) // 2 + 1)
    thetas = {WHOLE: _theta(config, WHOLE, "global"), LOCAL: _theta(config, LOCAL, "local")}
    heads, bias = config.count("num_attention_heads"), config.get("attention_bias", bool, False)
    dropout = config.get("attention_dropout", float, 0.0)
    glu = GLU(
        config.get("intermediate_size", int),
        config.choice("hidden_activation", ACTIVATIONS, "gelu"),
        config.get("mlp_bias", bool, False),
        config.get("mlp_dropout", float, 0.0),
    )
    layers = []
    for i, kind in enumerate(kinds):
        mask = window if kind == LOCAL else FULL
        attention = Attention(heads, position=Rope(thetas[kind]), mask=mask, bias=bias, dropout=dropout)
        layers.append(Layer(attention, glu, norm=norm, mixer_norm=None if i else NoNorm()))
    transform = Transform(
        config.choice("classifier_activation", ACTIVATIONS, "gelu"), norm, config.get("classifier_bias", bool, False)
    )
    head = Head(bias=config.get("decoder_bias", bool, True), transform=transform)
    embed = Embed(norm=norm, dropout=config.get("embedding_dropout", float, 0.0))
    return Encoder(vocab, dim, tuple(layers), embed, None if config.architecture == "ModernBertModel" else head)


def _kinds(config: Config, usual: list[str]) -> list[str]:
    if not config.has("layer_types"):
        return usual
    kinds = config.data["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != len(usual) or not set(kinds) <= {WHOLE, LOCAL}:
        raise config.refuse("layer_types", f"{len(usual)} of {WHOLE!r} and {LOCAL!r}")
    return kinds


def _theta(config: Config, kind: str, old: str) -> float:
    """The rate of one kind of layers, as it is written today or was before."""
    theta = config.get(f"{old}_rope_theta", float, 160_000.0 if kind == WHOLE else 10_000.0)
    if not config.has("rope_parameters"):
        return theta
    both = config.part("rope_parameters")
    both.skip(WHOLE, LOCAL)
    both.finish()
    if not both.has(kind):
        return theta
    own = both.part(kind)
    own.only("rope_type", "default")
    theta = own.get("rope_theta", float, theta)
    own.finish()
    return theta


def guess(spec: Encoder) -> dict[str, Any]:
    """Ours as theirs."""
    a, g, n = attention_of(spec), glu_of(spec), first(spec, LayerNorm, LayerNorm())
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
    thetas, half = {WHOLE: 160_000.0, LOCAL: 10_000.0}, 64
    for mixer in mixers:
        kind = WHOLE if mixer.mask.window is None else LOCAL
        thetas[kind] = first(mixer, Rope, Rope()).theta
        half = half if mixer.mask.window is None else mixer.mask.window - 1
    head = spec.head or Head(bias=True)
    transform = head.transform or Transform(norm=n, bias=False)
    return {
        "architectures": ["ModernBertModel" if spec.head is None else "ModernBertForMaskedLM"],
        "vocab_size": spec.vocab,
        "hidden_size": spec.dim,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": a.heads,
        "intermediate_size": g.hidden,
        "hidden_activation": activation_word(g.activation),
        "norm_eps": n.eps,
        "norm_bias": n.bias,
        "layer_types": [WHOLE if mixer.mask.window is None else LOCAL for mixer in mixers],
        "local_attention": 2 * half,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
        "attention_bias": a.bias,
        "attention_dropout": a.dropout,
        "mlp_bias": g.bias,
        "mlp_dropout": g.dropout,
        "embedding_dropout": spec.embed.dropout,
        "decoder_bias": head.bias,
        "classifier_activation": activation_word(transform.activation),
        "classifier_bias": transform.bias,
    }


def table(spec: Encoder) -> Iterator[Line]:
    """Names of tensors."""
    top, shift = "model." if spec.head else "", first(spec, LayerNorm, LayerNorm()).bias
    yield from linear("embed.tokens", top + "embeddings.tok_embeddings")
    yield from linear("embed.norm", top + "embeddings.norm", bias=shift)
    for i, layer in enumerate(spec.layers):
        assert isinstance(layer.mixer, Attention) and isinstance(layer.ffn, GLU)
        yield from below(
            f"stack.layers.{i}.",
            f"{top}layers.{i}.",
            linear("mixer.qkv", "attn.Wqkv", bias=layer.mixer.bias),
            linear("mixer.out", "attn.Wo", bias=layer.mixer.bias),
            linear("around_mixer.into", "attn_norm", bias=shift) if i else (),
            linear("ffn.gate_up", "mlp.Wi", bias=layer.ffn.bias),
            linear("ffn.out", "mlp.Wo", bias=layer.ffn.bias),
            linear("around_ffn.into", "mlp_norm", bias=shift),
        )
    yield from linear("stack.norm", top + "final_norm", bias=shift)
    if spec.head and spec.head.transform:
        yield from linear("head.transform.dense", "head.dense", bias=spec.head.transform.bias)
        yield from linear("head.transform.norm", "head.norm", bias=shift)
        yield Tie("decoder.weight", top + "embeddings.tok_embeddings.weight")
        if spec.head.bias:
            yield tensor("head.project.bias", "decoder.bias")


FAMILY = Family(
    "modernbert",
    "ModernBertForMaskedLM",
    read,
    guess,
    table,
    kind=Encoder,
    others=("ModernBertModel",),
    silent=tuple(
        "initializer_cutoff_factor classifier_pooling deterministic_flash_attn sparse_prediction reference_compile "
        "sparse_pred_ignore_index repad_logits_with_grad".split()
    ),
)
