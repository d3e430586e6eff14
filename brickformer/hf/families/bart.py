"""bart (arXiv 1910.13461) and marian (arXiv 1804.00344): the Transformer of 2017 with norms after the branches.

bart    learned positions, of which the first two rows are not read, and a norm after the embedding
marian  fixed positions, all sines before all cosines, which are not in the file; the two sides may have two tables

Both add a bias to the logits that the file holds as a matrix of one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from brickformer.embed import Embed, Head
from brickformer.feedforward import MLP
from brickformer.hf.config import Config
from brickformer.hf.family import Family, first
from brickformer.hf.table import Line, Rule, Tie, below, linear, tensor
from brickformer.hf.words import ACTIVATIONS, activation_word
from brickformer.layers import Layer, pattern
from brickformer.mask import Mask
from brickformer.mixers.attention import Attention
from brickformer.mixers.cross import Cross
from brickformer.models import Decoder, Encoder, EncoderDecoder
from brickformer.norms import LayerNorm
from brickformer.positions import Learned, Sinusoid

KEPT = 2
"""Rows of bart's table of positions that no position reads."""


def read(config: Config, *, marian: bool = False) -> EncoderDecoder:
    """Their configuration as ours."""
    for name, value in (
        ("normalize_before", False),
        ("add_final_layer_norm", False),
        ("add_bias_logits", False),
        ("normalize_embedding", not marian),
        ("static_position_embeddings", marian),
        ("extra_pos_embeddings", KEPT),
        ("tie_word_embeddings", True),
        ("is_encoder_decoder", True),
    ):
        config.only(name, value)
    dim, source, length = (config.get(name, int) for name in ("d_model", "vocab_size", "max_position_embeddings"))
    shared = config.get("share_encoder_decoder_embeddings", bool, True) if marian else True
    target = config.get("decoder_vocab_size", int, None) if marian else None
    embed = Embed(
        Sinusoid(length, layout="halves") if marian else Learned(length, skip=KEPT),
        scaled=config.get("scale_embedding", bool, False),
        norm=None if marian else LayerNorm(),
        dropout=config.get("dropout", float, 0.1),
    )
    return EncoderDecoder(
        Encoder(source, dim, _layers(config, "encoder", causal=False), embed),
        Decoder(
            source if shared or target is None else target,
            dim,
            _layers(config, "decoder", causal=True),
            embed,
            Head(bias=True),
        ),
        shared=shared,
    )


def _layers(config: Config, side: str, *, causal: bool) -> tuple[Layer, ...]:
    heads, dropout = config.count(f"{side}_attention_heads"), config.get("attention_dropout", float, 0.0)
    mlp = MLP(
        config.get(f"{side}_ffn_dim", int),
        config.choice("activation_function", ACTIVATIONS, "gelu"),
        dropout=config.get("activation_dropout", float, 0.0),
    )
    layer = Layer(
        Attention(heads, mask=Mask(causal=causal), bias=True, dropout=dropout),
        mlp,
        cross=Cross(heads, bias=True, dropout=dropout) if causal else None,
        norm=LayerNorm(),
        place="post",
        dropout=config.get("dropout", float, 0.1),
    )
    return pattern([layer], config.count(f"{side}_layers"))


def guess(spec: EncoderDecoder, *, marian: bool = False) -> dict[str, Any]:
    """Ours as theirs."""
    fields: dict[str, Any] = {}
    for side, model in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        fields[f"{side}_layers"] = len(model.layers)
        fields[f"{side}_attention_heads"] = first(model, Attention, Attention(1)).heads
        fields[f"{side}_ffn_dim"] = first(model, MLP, MLP(1)).hidden
    a, m = first(spec.encoder, Attention, Attention(1)), first(spec.encoder, MLP, MLP(1))
    position = spec.encoder.embed.position
    if marian:
        fields |= {"share_encoder_decoder_embeddings": spec.shared, "decoder_vocab_size": spec.decoder.vocab}
        # ids of theirs that need not exist here; as numbers, because null is none of them
        fields |= {"pad_token_id": 0, "decoder_start_token_id": 0, "forced_eos_token_id": None}
    return fields | {
        "vocab_size": spec.encoder.vocab,
        "d_model": spec.encoder.dim,
        "max_position_embeddings": (position and position.limit()) or 1024,
        "activation_function": activation_word(m.activation, gelu_tanh="gelu_new"),
        "scale_embedding": spec.encoder.embed.scaled,
        "dropout": spec.encoder.layers[0].dropout,
        "attention_dropout": a.dropout,
        "activation_dropout": m.dropout,
    }


def table(spec: EncoderDecoder, *, marian: bool = False) -> Iterator[Line]:
    """Names of tensors."""
    if spec.shared:
        yield from linear("encoder.embed.tokens", "model.shared")
        yield Tie("model.encoder.embed_tokens.weight", "model.shared.weight")
        yield Tie("model.decoder.embed_tokens.weight", "model.shared.weight")
        yield Tie("lm_head.weight", "model.shared.weight")
    else:
        yield from linear("encoder.embed.tokens", "model.encoder.embed_tokens")
        yield from linear("decoder.embed.tokens", "model.decoder.embed_tokens")
        yield Tie("lm_head.weight", "model.decoder.embed_tokens.weight")
    yield replace(tensor("decoder.head.project.bias", "final_logits_bias"), row=True)
    for side, model in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        if not marian:
            yield from linear(f"{side}.embed.position.table", f"model.{side}.embed_positions")
            yield from linear(f"{side}.embed.norm", f"model.{side}.layernorm_embedding", bias=True)
        for i, layer in enumerate(model.layers):
            yield from below(
                f"{side}.stack.layers.{i}.",
                f"model.{side}.layers.{i}.",
                linear("mixer.qkv", *(f"self_attn.{x}_proj" for x in "qkv"), bias=True),
                linear("mixer.out", "self_attn.out_proj", bias=True),
                linear("around_mixer.after", "self_attn_layer_norm", bias=True),
                _cross() if layer.cross else (),
                linear("ffn.into", "fc1", bias=True),
                linear("ffn.out", "fc2", bias=True),
                linear("around_ffn.after", "final_layer_norm", bias=True),
            )


def _cross() -> Iterator[Rule]:
    yield from linear("cross.q", "encoder_attn.q_proj", bias=True)
    yield from linear("cross.kv", "encoder_attn.k_proj", "encoder_attn.v_proj", bias=True)
    yield from linear("cross.out", "encoder_attn.out_proj", bias=True)
    yield from linear("around_cross.after", "encoder_attn_layer_norm", bias=True)


_SILENT = (
    *"encoder_layerdrop decoder_layerdrop num_hidden_layers classif_dropout num_labels output_past".split(),
    "force_bos_token_to_be_generated",
)

FAMILY = Family(
    "bart",
    "BartForConditionalGeneration",
    read,
    guess,
    table,
    body="",
    kind=EncoderDecoder,
    silent=_SILENT,
    ignored=(r"model\.(encoder|decoder)\.version",),
)
MARIAN = Family(
    "marian",
    "MarianMTModel",
    partial(read, marian=True),
    partial(guess, marian=True),
    partial(table, marian=True),
    body="",
    kind=EncoderDecoder,
    silent=_SILENT,
    ignored=(r"model\.(encoder|decoder)\.embed_positions\.weight",),
)
