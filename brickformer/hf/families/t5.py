"""t5 (arXiv 1910.10683) and its 1.1 form: relative biases of the first layer for all, no scale, RMSNorm, no biases.

1.1 has a gated network and a head of its own; the first form divides by √D before a tied head. What a configuration
says of this has changed with the library: today `tie_word_embeddings` is true in every file, and whether the head is
tied is told by the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.embed import Embed, Head
from brickformer.feedforward import GLU, MLP, FeedForwardSpec
from brickformer.hf.config import Config
from brickformer.hf.family import Family, first
from brickformer.hf.table import Line, Tie, below, linear
from brickformer.hf.words import ACTIVATIONS, activation_word, attention_of
from brickformer.layers import Layer, pattern
from brickformer.mask import Mask
from brickformer.mixers.attention import Attention
from brickformer.mixers.cross import Cross
from brickformer.models import Decoder, Encoder, EncoderDecoder
from brickformer.norms import RMSNorm
from brickformer.positions import T5Bias


def read(config: Config) -> EncoderDecoder:
    """Their configuration as ours."""
    vocab, dim = config.get("vocab_size", int), config.get("d_model|hidden_size", int)
    depth = config.count("num_layers|num_hidden_layers")
    heads, width = config.count("num_heads|num_attention_heads"), config.get("d_kv|head_dim", int)
    dropout = config.get("dropout_rate", float, 0.1)
    norm, ffn = RMSNorm(config.get("layer_norm_epsilon", float, 1e-6)), _network(config, dropout)
    bias = T5Bias(
        config.get("relative_attention_num_buckets", int, 32),
        config.get("relative_attention_max_distance", int, 128),
        shared=True,
    )

    def layer(causal: bool) -> Layer:
        mask, cross = Mask(causal=causal), Cross(heads, head_dim=width, scale=1.0, dropout=dropout)
        attention = Attention(heads, head_dim=width, scale=1.0, position=bias, mask=mask, dropout=dropout)
        return Layer(attention, ffn, cross=cross if causal else None, norm=norm, dropout=dropout)

    config.only("is_encoder_decoder", True)
    said = config.get("tie_word_embeddings", bool, True)
    scaled = config.get("scale_decoder_outputs", bool, said)
    tied = said and (scaled or not config.tensors or "lm_head.weight" not in config.tensors)
    after = config.count("num_decoder_layers") if config.has("num_decoder_layers") else None
    embed = Embed(dropout=dropout)
    return EncoderDecoder(
        Encoder(vocab, dim, pattern([layer(False)], depth), embed),
        Decoder(
            vocab, dim, pattern([layer(True)], depth if after is None else after), embed, Head(tied, scaled=scaled)
        ),
        shared=True,
    )


def _network(config: Config, dropout: float) -> FeedForwardSpec:
    """feed_forward_proj is an activation, or gated- and an activation; newer files spell out what follows from it."""
    told = config.get("feed_forward_proj", str, "relu")
    gated, word = told.startswith("gated-"), told.removeprefix("gated-")
    word = "gelu_new" if told == "gated-gelu" else word
    if word not in ACTIVATIONS:
        raise config.refuse("feed_forward_proj", f"one of {', '.join(ACTIVATIONS)}, or gated- and one of them")
    config.only("is_gated_act", gated)
    config.only("dense_act_fn", word)
    hidden = config.get("d_ff", int)
    if gated:
        return GLU(hidden, ACTIVATIONS[word], dropout=dropout)
    return MLP(hidden, ACTIVATIONS[word], bias=False, dropout=dropout)


def guess(spec: EncoderDecoder) -> dict[str, Any]:
    """Ours as theirs."""
    a, bias, head = attention_of(spec.encoder), first(spec, T5Bias, T5Bias()), spec.decoder.head
    ffn = spec.encoder.layers[0].ffn
    match ffn:
        case GLU():
            word, hidden = f"gated-{activation_word(ffn.activation, gelu_tanh='gelu')}", ffn.hidden
        case MLP():
            word, hidden = activation_word(ffn.activation, gelu_tanh="gelu_new"), ffn.hidden
        case _:
            word, hidden = "relu", 1
    return {
        "vocab_size": spec.encoder.vocab,
        "d_model": spec.encoder.dim,
        "d_kv": a.head_dim or max(1, spec.encoder.dim // a.heads),
        "d_ff": hidden,
        "num_layers": len(spec.encoder.layers),
        "num_decoder_layers": len(spec.decoder.layers),
        "num_heads": a.heads,
        "relative_attention_num_buckets": bias.buckets,
        "relative_attention_max_distance": bias.max_distance,
        "layer_norm_epsilon": first(spec, RMSNorm, RMSNorm()).eps,
        "feed_forward_proj": word,
        "dropout_rate": a.dropout,
        "tie_word_embeddings": head.tied,
        "scale_decoder_outputs": head.scaled,
    }


def table(spec: EncoderDecoder) -> Iterator[Line]:
    """Names of tensors."""
    yield from linear("encoder.embed.tokens", "shared")
    yield Tie("encoder.embed_tokens.weight", "shared.weight")
    yield Tie("decoder.embed_tokens.weight", "shared.weight")
    if spec.decoder.head.tied:
        yield Tie("lm_head.weight", "shared.weight")
    else:
        yield from linear("decoder.head.project", "lm_head")
    for side, model in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        held = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
        yield from linear(f"{side}.stack.layers.0.mixer.position.table", held)
        yield from linear(f"{side}.stack.norm", f"{side}.final_layer_norm")
        for i, layer in enumerate(model.layers):
            yield from below(f"{side}.stack.layers.{i}.", f"{side}.block.{i}.layer.", _layer(layer))


def _layer(layer: Layer) -> Iterator[Line]:
    yield from linear("mixer.qkv", *(f"0.SelfAttention.{x}" for x in "qkv"))
    yield from linear("mixer.out", "0.SelfAttention.o")
    yield from linear("around_mixer.into", "0.layer_norm")
    if layer.cross is not None:
        yield from linear("cross.q", "1.EncDecAttention.q")
        yield from linear("cross.kv", "1.EncDecAttention.k", "1.EncDecAttention.v")
        yield from linear("cross.out", "1.EncDecAttention.o")
        yield from linear("around_cross.into", "1.layer_norm")
    at = 1 if layer.cross is None else 2
    if isinstance(layer.ffn, GLU):
        yield from linear("ffn.gate_up", f"{at}.DenseReluDense.wi_0", f"{at}.DenseReluDense.wi_1")
    else:
        yield from linear("ffn.into", f"{at}.DenseReluDense.wi")
    yield from linear("ffn.out", f"{at}.DenseReluDense.wo")
    yield from linear("around_ffn.into", f"{at}.layer_norm")


FAMILY = Family(
    "t5",
    "T5ForConditionalGeneration",
    read,
    guess,
    table,
    body="",
    kind=EncoderDecoder,
    others=("T5WithLMHeadModel",),
    silent=("n_positions", "output_past", "initializer_factor", "classifier_dropout"),
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)
