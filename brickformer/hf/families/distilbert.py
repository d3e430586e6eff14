"""distilbert (arXiv 1910.01108): bert with half the layers, no segments, no pooler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.embed import Embed, Head, Transform
from brickformer.feedforward import MLP
from brickformer.hf.config import Config
from brickformer.hf.families.bert import COUNTED
from brickformer.hf.family import Family, first
from brickformer.hf.table import Line, Tie, below, linear, tensor
from brickformer.hf.words import ACTIVATIONS, activation_word, attention_of, dropout_of, mlp_of
from brickformer.layers import Layer, pattern
from brickformer.mask import FULL
from brickformer.mixers.attention import Attention
from brickformer.models import Encoder
from brickformer.norms import LayerNorm
from brickformer.positions import Learned

NORM = LayerNorm(1e-12)
"""Theirs has no field for it."""


def read(config: Config) -> Encoder:
    """Their configuration as ours."""
    config.only("tie_word_embeddings", True)
    config.skip("sinusoidal_pos_embds")  # how the table began: it is in the file
    dim, dropout = config.get("dim|hidden_size", int), config.get("dropout", float, 0.1)
    mlp = MLP(config.get("hidden_dim", int, 3072), config.choice("activation", ACTIVATIONS, "gelu"), dropout=dropout)
    attention = Attention(
        config.count("n_heads|num_attention_heads"),
        mask=FULL,
        bias=True,
        dropout=config.get("attention_dropout", float, 0.1),
    )
    layer = Layer(attention, mlp, norm=NORM, place="post")
    embed = Embed(Learned(config.get("max_position_embeddings", int, 512)), norm=NORM, dropout=dropout)
    head = Head(bias=True, transform=Transform(mlp.activation, NORM))
    return Encoder(
        config.get("vocab_size", int),
        dim,
        pattern([layer], config.count("n_layers|num_hidden_layers")),
        embed,
        None if config.architecture == "DistilBertModel" else head,
    )


def guess(spec: Encoder) -> dict[str, Any]:
    """Ours as theirs."""
    a, m = attention_of(spec), mlp_of(spec)
    return {
        "architectures": ["DistilBertModel" if spec.head is None else "DistilBertForMaskedLM"],
        "vocab_size": spec.vocab,
        "dim": spec.dim,
        "n_layers": len(spec.layers),
        "n_heads": a.heads,
        "hidden_dim": m.hidden,
        "activation": activation_word(m.activation),
        "max_position_embeddings": first(spec, Learned, Learned()).max_len,
        "attention_dropout": a.dropout,
        "dropout": m.dropout or dropout_of(spec),
    }


def table(spec: Encoder) -> Iterator[Line]:
    """Names of tensors."""
    top = "distilbert." if spec.head else ""
    yield from below(
        "embed.",
        top + "embeddings.",
        linear("tokens", "word_embeddings"),
        linear("position.table", "position_embeddings"),
        linear("norm", "LayerNorm", bias=True),
    )
    for i in range(len(spec.layers)):
        yield from below(
            f"stack.layers.{i}.",
            f"{top}transformer.layer.{i}.",
            linear("mixer.qkv", "attention.q_lin", "attention.k_lin", "attention.v_lin", bias=True),
            linear("mixer.out", "attention.out_lin", bias=True),
            linear("around_mixer.after", "sa_layer_norm", bias=True),
            linear("ffn.into", "ffn.lin1", bias=True),
            linear("ffn.out", "ffn.lin2", bias=True),
            linear("around_ffn.after", "output_layer_norm", bias=True),
        )
    if spec.head:
        yield from linear("head.transform.dense", "vocab_transform", bias=True)
        yield from linear("head.transform.norm", "vocab_layer_norm", bias=True)
        yield tensor("head.project.bias", "vocab_projector.bias")
        yield Tie("vocab_projector.weight", top + "embeddings.word_embeddings.weight")


FAMILY = Family(
    "distilbert",
    "DistilBertForMaskedLM",
    read,
    guess,
    table,
    body="distilbert.",
    kind=Encoder,
    others=("DistilBertModel",),
    silent=("qa_dropout", "seq_classif_dropout", "tie_weights_"),
    ignored=(COUNTED,),
)
