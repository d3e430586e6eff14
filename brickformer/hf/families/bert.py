"""bert (arXiv 1810.04805) and roberta (arXiv 1907.11692): encoders that see both ways.

    layer   LayerNorm(x + attention(x)),   LayerNorm(x + MLP(x))
    embed   LayerNorm(token + segment + position);   roberta's table of positions begins after the id of its padding
    head    LayerNorm(gelu(W h + b)), then the table of tokens and a bias; or none, and a pooler

A checkpoint of the head for masked words may hold a pooler and a head for next sentences, which serve other tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from brickformer.embed import Embed, Head, Transform
from brickformer.feedforward import MLP
from brickformer.hf.config import Config
from brickformer.hf.family import Family, first
from brickformer.hf.table import Line, Tie, below, linear, tensor
from brickformer.hf.words import ACTIVATIONS, activation_word, attention_of, dropout_of, mlp_of, sizes
from brickformer.layers import Layer, pattern
from brickformer.mask import FULL
from brickformer.mixers.attention import Attention
from brickformer.models import Encoder
from brickformer.norms import LayerNorm
from brickformer.positions import Learned

SELF = ("attention.self.query", "attention.self.key", "attention.self.value")


def read(config: Config, *, body: str = "BertModel", skips: bool = False) -> Encoder:
    """Their configuration as ours. body: the class without a head.

    skips: as roberta, whose positions begin after the id of padding, and whose head is a gelu whatever the layers are.
    """
    vocab, dim, depth = sizes(config)
    norm, layer = layer_of(config)
    rows = config.get("max_position_embeddings", int, 512)
    skip = config.get("pad_token_id", int, 1) + 1 if skips else 0
    if vocab <= skip:
        raise config.refuse("vocab_size", f"more than {skip}: every token is padding, or comes before it")
    embed = embed_of(config, norm, Learned(rows - skip, skip), layer.dropout)
    headless = config.architecture == body
    return Encoder(
        vocab,
        dim,
        pattern([layer], depth),
        embed,
        None if headless else Head(bias=True, transform=Transform("gelu" if skips else _mlp(layer).activation, norm)),
        pooler=headless and (not config.tensors or any("pooler" in name for name in config.tensors)),
    )


def layer_of(config: Config, *, act: str = "gelu", dropped: float = 0.1) -> tuple[LayerNorm, Layer]:
    """The norm, and a layer after whose branches it comes. act, dropped: the family's own defaults."""
    norm = LayerNorm(config.get("layer_norm_eps", float, 1e-12))
    config.only("position_embedding_type", "absolute")
    config.only("tie_word_embeddings", True)
    attention = Attention(
        config.count("num_attention_heads"),
        mask=FULL,
        bias=True,
        dropout=config.get("attention_probs_dropout_prob", float, dropped),
    )
    mlp = MLP(config.get("intermediate_size", int), config.choice("hidden_act", ACTIVATIONS, act))
    dropout = config.get("hidden_dropout_prob", float, dropped)
    return norm, Layer(attention, mlp, norm=norm, place="post", dropout=dropout)


def embed_of(config: Config, norm: LayerNorm, position: Learned, dropout: float, width: int | None = None) -> Embed:
    """Tokens, segments and positions, normed together."""
    segments = config.count("type_vocab_size", 2)
    return Embed(position, norm=norm, dropout=dropout, width=width, segments=segments)


def _mlp(layer: Layer) -> MLP:
    assert isinstance(layer.ffn, MLP)
    return layer.ffn


def guess(spec: Encoder, *, names: tuple[str, str] = ("BertForMaskedLM", "BertModel")) -> dict[str, Any]:
    """Ours as theirs. names: their classes with and without a head."""
    position = first(spec, Learned, Learned())
    # where rows are skipped, one of them is that of padding
    return fields(spec, names) | ({"pad_token_id": position.skip - 1} if position.skip else {})


def fields(spec: Encoder, names: tuple[str, str]) -> dict[str, Any]:
    """The fields that bert and its descendants have in common."""
    a, m, position = attention_of(spec), mlp_of(spec), first(spec, Learned, Learned())
    return {
        "architectures": [names[spec.head is None]],
        "vocab_size": spec.vocab,
        "hidden_size": spec.dim,
        "num_hidden_layers": len(spec.layers) * spec.loops,
        "num_attention_heads": a.heads,
        "intermediate_size": m.hidden,
        "hidden_act": activation_word(m.activation),
        "max_position_embeddings": position.max_len + position.skip,
        "type_vocab_size": max(1, spec.embed.segments),
        "layer_norm_eps": first(spec, LayerNorm, LayerNorm()).eps,
        "attention_probs_dropout_prob": a.dropout,
        "hidden_dropout_prob": dropout_of(spec),
    }


def table(spec: Encoder, *, body: str = "bert.") -> Iterator[Line]:
    """Names of tensors. body: the prefix of everything but the head; a model without one has no prefix."""
    top = body if spec.head else ""
    yield from embed_names(top + "embeddings.")
    for i in range(len(spec.layers)):
        yield from below(
            f"stack.layers.{i}.",
            f"{top}encoder.layer.{i}.",
            linear("mixer.qkv", *SELF, bias=True),
            linear("mixer.out", "attention.output.dense", bias=True),
            linear("around_mixer.after", "attention.output.LayerNorm", bias=True),
            linear("ffn.into", "intermediate.dense", bias=True),
            linear("ffn.out", "output.dense", bias=True),
            linear("around_ffn.after", "output.LayerNorm", bias=True),
        )
    if spec.pooler:
        yield from linear("pooler", f"{top}pooler.dense", bias=True)
    if spec.head and body == "bert.":
        yield from head_names("cls.predictions.", "transform.dense", "transform.LayerNorm", top)
    elif spec.head:
        yield from head_names("lm_head.", "dense", "layer_norm", top)


def embed_names(theirs: str) -> Iterator[Line]:
    """Tables of tokens, positions and segments, and their norm."""
    return below(
        "embed.",
        theirs,
        linear("tokens", "word_embeddings"),
        linear("position.table", "position_embeddings"),
        linear("segments", "token_type_embeddings"),
        linear("norm", "LayerNorm", bias=True),
    )


def head_names(theirs: str, dense: str, norm: str, top: str) -> Iterator[Line]:
    """A layer, the tied table, and a bias that the file may hold twice."""
    yield from linear("head.transform.dense", theirs + dense, bias=True)
    yield from linear("head.transform.norm", theirs + norm, bias=True)
    yield tensor("head.project.bias", theirs + "bias")
    yield Tie(theirs + "decoder.weight", top + "embeddings.word_embeddings.weight")
    yield Tie(theirs + "decoder.bias", theirs + "bias")


OTHER_TASKS = (r"cls\.seq_relationship\..*", r"(bert|roberta|albert)\.pooler\..*")
COUNTED = r"((bert|roberta|albert|distilbert)\.)?embeddings\.position_ids"

FAMILY = Family(
    "bert",
    "BertForMaskedLM",
    read,
    guess,
    table,
    body="bert.",
    kind=Encoder,
    others=("BertModel",),
    ignored=(*OTHER_TASKS, COUNTED),
)
_names = ("RobertaForMaskedLM", "RobertaModel")
_read: Callable[[Config], Encoder] = partial(read, body="RobertaModel", skips=True)
ROBERTA = Family(
    "roberta",
    "RobertaForMaskedLM",
    _read,
    partial(guess, names=_names),
    partial(table, body="roberta."),
    body="roberta.",
    kind=Encoder,
    others=("RobertaModel",),
    ignored=(*OTHER_TASKS, COUNTED),
)
