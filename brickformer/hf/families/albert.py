"""albert (arXiv 1909.11942): bert with a narrow table that is widened once, and one layer gone through many times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.embed import Head, Transform
from brickformer.feedforward import MLP
from brickformer.hf.config import Config
from brickformer.hf.families.bert import COUNTED, OTHER_TASKS, embed_names, embed_of, fields, head_names, layer_of
from brickformer.hf.family import Family
from brickformer.hf.table import Line, below, linear
from brickformer.hf.words import sizes
from brickformer.layers import pattern
from brickformer.models import Encoder
from brickformer.positions import Learned


def read(config: Config) -> Encoder:
    """Their configuration as ours. A group of several layers is gone through as one."""
    vocab, dim, depth = sizes(config)
    norm, layer = layer_of(config, act="gelu_new", dropped=0.0)
    config.only("num_hidden_groups", 1, do="Layers of one group come round again; no brick has several such groups.")
    width = config.get("embedding_size", int, 128)
    embed = embed_of(config, norm, Learned(config.get("max_position_embeddings", int, 512)), layer.dropout, width)
    headless = config.architecture == "AlbertModel"
    assert isinstance(layer.ffn, MLP)
    return Encoder(
        vocab,
        dim,
        pattern([layer], config.count("inner_group_num", 1)),
        embed,
        None if headless else Head(bias=True, transform=Transform(layer.ffn.activation, norm)),
        loops=depth,
        pooler=headless and (not config.tensors or any("pooler" in name for name in config.tensors)),
    )


def guess(spec: Encoder) -> dict[str, Any]:
    """Ours as theirs."""
    return fields(spec, ("AlbertForMaskedLM", "AlbertModel")) | {
        "embedding_size": spec.embed.width or spec.dim,
        "num_hidden_layers": spec.loops,
        "inner_group_num": len(spec.layers),
    }


def table(spec: Encoder) -> Iterator[Line]:
    """Names of tensors."""
    top = "albert." if spec.head else ""
    yield from embed_names(top + "embeddings.")
    yield from linear("embed.project", top + "encoder.embedding_hidden_mapping_in", bias=True)
    for i in range(len(spec.layers)):
        yield from below(
            f"stack.layers.{i}.",
            f"{top}encoder.albert_layer_groups.0.albert_layers.{i}.",
            linear("mixer.qkv", "attention.query", "attention.key", "attention.value", bias=True),
            linear("mixer.out", "attention.dense", bias=True),
            linear("around_mixer.after", "attention.LayerNorm", bias=True),
            linear("ffn.into", "ffn", bias=True),
            linear("ffn.out", "ffn_output", bias=True),
            linear("around_ffn.after", "full_layer_layer_norm", bias=True),
        )
    if spec.pooler:
        yield from linear("pooler", top + "pooler", bias=True)
    if spec.head:
        yield from head_names("predictions.", "dense", "LayerNorm", top)


FAMILY = Family(
    "albert",
    "AlbertForMaskedLM",
    read,
    guess,
    table,
    body="albert.",
    kind=Encoder,
    others=("AlbertModel",),
    silent=tuple(
        "classifier_dropout_prob down_scale_factor gap_size net_structure_type num_memory_blocks num_labels "
        "output_past eos_token_ids".split()
    ),
    ignored=(*OTHER_TASKS, COUNTED, r"sop_classifier\..*"),
)
