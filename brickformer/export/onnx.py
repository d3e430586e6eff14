"""A decoder or an encoder-decoder as ONNX graphs, with caches as flat inputs and outputs.

    decoder   ids (1, T), positions (1, T), last (1,), total (1,), past.NAME ...
              ->  logits (1, V) of the last token, NAME ...
    encoder   ids (1, S)  ->  keys and values of the memory for each cross-attention of the decoder

last: slots filled after this call, minus 1; total: slots filled. A cache goes in as past.NAME, (1, G, P, K), and comes
out as NAME; where both are one buffer of P slots nothing is copied. One row at a time; prompts of several tokens and
single tokens go through the same graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

from torch import Tensor, nn

from brickformer.embed import Embedding
from brickformer.errors import SpecError
from brickformer.export.bricks import Matrix, Site, refused
from brickformer.export.fields import check_said
from brickformer.export.graph import Graph
from brickformer.layers import Layer, Stack
from brickformer.models import AnyModel, DecoderModel, EncoderDecoderModel, EncoderModel
from brickformer.positions.absolute import AbsolutePositionSpec, LearnedPosition, SinusoidPosition
from brickformer.positions.rotary import RopeScaling
from brickformer.spec import Spec

MAX_LEN: Final = 4096
"""Rows of rotary tables, unless said otherwise."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """Graphs as files, and what one must know to run them.

    graphs: "decoder", and "encoder" where there is one. caches: name -> shape, of the decoder; P is "past". crosses:
    names that the encoder gives and the decoder takes. vocab: V. max_len: the most slots. max_source: the most tokens
    that the encoder reads.
    """

    graphs: dict[str, bytes]
    caches: dict[str, list[int | str]]
    crosses: list[str]
    vocab: int
    max_len: int
    max_source: int

    def facts(self) -> dict[str, Any]:
        """All but the graphs, as data."""
        sizes = {"vocab": self.vocab, "max_len": self.max_len, "max_source": self.max_source}
        return {"caches": self.caches, "crosses": self.crosses, **sizes}


def export_onnx(model: AnyModel, matrix: Matrix, *, max_len: int = MAX_LEN) -> Exported:
    """Write the graphs. matrix: the weights of each linear map as they are to stand there. max_len: the most positions,
    where no table or scaling ends before.

    Errors: SpecError naming a brick or a field that a graph cannot say, or an encoder alone; BrickError: more weights
    than a file can hold.
    """
    check_said(model.spec)
    match model:
        case DecoderModel():
            decoder, encoder = model, None
        case EncoderDecoderModel():
            decoder, encoder = model.decoder, model.encoder
        case EncoderModel():
            raise SpecError("export: an encoder alone writes nothing. Export a Decoder or an EncoderDecoder.")
    slots, source = _limit(decoder.spec, max_len), 0
    site, crosses = _decoder(decoder, matrix, slots)
    graphs = {"decoder": site.graph.bytes("decoder")}
    if encoder is not None:
        source = _limit(encoder.spec, max_len)
        graphs["encoder"] = _encoder(encoder, decoder.stack, matrix, source)
    return Exported(graphs, dict(site.caches), crosses, decoder.spec.vocab, slots, source)


def _limit(side: Spec, most: int) -> int:
    """How many positions one side knows, at most `most`."""
    limits = [part.limit() for part in side.parts() if isinstance(part, AbsolutePositionSpec | RopeScaling)]
    return min([most, *(limit for limit in limits if limit is not None)])


def _decoder(model: DecoderModel, matrix: Matrix, max_len: int) -> tuple[Site, list[str]]:
    graph = Graph()
    site = Site(graph, matrix, cached=True, max_len=max_len)
    ids = graph.input("ids", [1, "tokens"], "INT64")
    site.positions = graph.input("positions", [1, "tokens"], "INT64")
    graph.input("last", [1], "INT32")
    graph.input("total", [1], "INT32")
    x = _layers(site, _embed(site, ids, model.embed), model.stack, model.spec.layers)
    x = graph.op("Gather", x, graph.weight("newest", _int(-1)), axis=1)  # (1, D)
    x = site.norm(x, model.stack.norm, "norm")
    logits = _head(site, x, model)
    if model.head.softcap is not None:
        cap = graph.number(model.head.softcap)
        logits = graph.op("Mul", graph.op("Tanh", graph.op("Div", logits, cap)), cap)
    graph.output(logits, "logits", [1, model.spec.vocab])
    crosses = [value.name for value in graph.inputs if ".cross." in value.name]
    return site, crosses


def _encoder(model: EncoderModel, readers: Stack, matrix: Matrix, max_len: int) -> bytes:
    """readers: the layers of the decoder, whose cross-attention reads the memory."""
    graph = Graph()
    site = Site(graph, matrix, cached=False, max_len=max_len)
    ids = graph.input("ids", [1, "source"], "INT64")
    site.positions = graph.input("positions", [1, "source"], "INT64")
    x = _layers(site, _embed(site, ids, model.embed), model.stack, model.spec.layers)
    memory = site.norm(x, model.stack.norm, "norm")
    for i, layer in enumerate(readers.passes()):
        if layer.cross is not None:
            site.project(memory, layer.cross, f"{i}.cross")
    return graph.bytes("encoder")


def _layers(site: Site, x: str, stack: Stack, specs: tuple[Layer, ...]) -> str:
    """All layers, without the last norm."""
    for i, layer in enumerate(stack.passes()):
        x = site.layer(x, specs[i % len(specs)], layer, str(i))
    return x


def _embed(site: Site, ids: str, embed: Embedding) -> str:
    graph = site.graph
    table = site.matrix(embed.tokens)
    x = graph.op("Gather", graph.weight("tokens", table), ids)  # type: ignore[arg-type]
    if embed.scale != 1.0:
        x = graph.op("Mul", x, graph.number(embed.scale))
    if embed.segments is not None:
        x = graph.add(x, graph.weight("segment", embed.segments.weight[0]))
    match embed.position:
        case None:
            pass
        case LearnedPosition() as learned:
            rows = learned.table.weight[learned.skip :]
            x = graph.add(x, graph.op("Gather", graph.weight("places", rows), site.positions))
        case SinusoidPosition() as waves:
            x = graph.add(x, graph.op("Gather", graph.weight("places", waves.table), site.positions))
        case other:
            raise refused(type(other).__name__, "Learned, Sinusoid or none at the embedding")
    x = site.norm(x, embed.norm, "embed_norm")
    return x if isinstance(embed.project, nn.Identity) else site.linear(x, embed.project, "embed_project")


def _head(site: Site, x: str, model: DecoderModel) -> str:
    """(1, D) -> (1, V). A tied one that is not coded reads the table."""
    project, graph = model.head.project, site.graph
    if model.head.scale != 1.0:
        x = str(graph.op("Mul", x, graph.number(model.head.scale)))
    weight = site.matrix(project)
    if not isinstance(weight, Tensor) or project.weight is not model.embed.tokens.weight:
        return site.linear(x, project, "head")
    bias = [] if project.bias is None else [graph.weight("head.bias", project.bias)]
    return str(graph.op("Gemm", x, graph.weight("tokens", weight), *bias, transB=1))


def _int(value: int) -> Any:
    import numpy as np

    return np.array(value, dtype=np.int64)
