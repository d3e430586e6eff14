"""Models: an embedding, a stack, a head.

    Decoder          ids -> logits of the next token           causal layers
    Encoder          ids -> vectors                            two-way layers
    EncoderDecoder   source ids, target ids -> logits          an Encoder's memory, read by a Decoder's cross-attention

A decode step is the same call as a training step, with one token and a state. Losses live in `train`.
Shapes: ids, src, tgt (B, T); h (B, T, D); logits (B, T, V).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from brickformer.embed import Embed, Embedding, Head, LogitHead, TokenEmbedding, check_ids
from brickformer.errors import SpecError, StateError
from brickformer.init import initialize
from brickformer.layers import Layer, Stack
from brickformer.linear import Linear
from brickformer.mask import Span
from brickformer.mixers.cross import Memory
from brickformer.ranges import MOST, affordable, check_width
from brickformer.spec import Spec, spec
from brickformer.state import CacheType, StackState

SMALLER = "Lower vocab, dim, the width of a brick or the number of layers."


class ModelSpec(Spec):
    """Slot: whole models."""

    __slots__ = ()

    @abstractmethod
    def build(self) -> AnyModel:
        """The model, initialised."""


def _check_places(kind: str, embed: Embed, layers: tuple[Layer, ...]) -> None:
    """Errors: SpecError when places are drawn and no brick reads them."""
    if embed.randomized is not None and not any(p.reads_places for part in (embed, *layers) for p in part.parts()):
        raise SpecError(
            f"{kind}.embed.randomized: got {embed.randomized!r}, but no brick reads places. Give attention "
            "position=Rope(), or the embedding a table (Learned, Sinusoid), or leave it out."
        )


@spec("decoder")
class Decoder(ModelSpec):
    """A causal model of one sequence. vocab: V; dim: D, which flows down to every layer.

    loops: how often the layers are gone through, with the same weights.
    """

    vocab: int
    dim: int
    layers: tuple[Layer, ...]
    embed: Embed = Embed()
    head: Head = Head()
    loops: int = 1

    def check(self) -> None:
        """Something to choose from, some width, some layer."""
        check_width(self, "vocab", self.vocab)
        check_width(self, "dim", self.dim)
        check_width(self, "loops", self.loops, MOST)

    def build(self) -> DecoderModel:
        """The model, initialised. Errors: SpecError for a layer that needs a memory or that sees the future."""
        for i, layer in enumerate(self.layers):
            if layer.cross is not None:
                raise SpecError(
                    f"decoder.layers.{i}.cross: there is no memory to read. Use EncoderDecoder, or remove it."
                )
        with affordable(self.kind, SMALLER):
            model = self.assemble(self.embed.table(self.vocab, self.dim))
            initialize(model.embed, model.stack, model.head)
        return model

    def assemble(self, tokens: TokenEmbedding) -> DecoderModel:
        """The model on a given token table, not yet initialised."""
        _check_places(self.kind, self.embed, self.layers)
        stack = Stack.of(self.layers, self.dim, loops=self.loops)
        model = DecoderModel(self, self.embed.build(tokens, self.dim), stack, self.head.build(tokens, self.dim))
        for i, mixer in enumerate(model.stack.mixers()):
            if not mixer.causal:
                raise SpecError(
                    f"decoder.layers.{i}.mixer: sees the future, which a decoder must not. Use mask=Mask(causal=True) "
                    f"(the default), or an Encoder."
                )
        return model


@final
class DecoderModel(nn.Module):
    """ids -> logits of each next token."""

    def __init__(self, spec: Decoder, embed: Embedding, stack: Stack, head: LogitHead) -> None:
        super().__init__()
        self.spec, self.embed, self.stack, self.head = spec, embed, stack, head

    def hidden(
        self,
        ids: Int[Tensor, "B T"],
        at: Span | None = None,
        state: StackState | None = None,
        memory: Memory | None = None,
    ) -> Float[Tensor, "B T D"]:
        """(B, T) ids -> (B, T, D). at: where they sit, default after what the state has seen."""
        check_ids(ids, "decoder", self.spec.vocab)
        if at is None:
            at = Span(0, ids.shape[1]) if state is None else state.next(ids.shape[1])
        at.check(ids)
        at = self.embed.place(at)
        return self.stack(self.embed(ids, at), at, state, memory)

    def logits(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """(B, T, D) -> (B, T, V)."""
        return self.head(h)

    def forward(
        self, ids: Int[Tensor, "B T"], at: Span | None = None, state: StackState | None = None
    ) -> Float[Tensor, "B T V"]:
        """(B, T) ids -> (B, T, V)."""
        return self.logits(self.hidden(ids, at, state))

    def init_state(
        self,
        batch: int,
        max_len: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        cache: CacheType = "float",
    ) -> StackState:
        """An empty state for `batch` rows of at most `max_len` tokens; default: the model's device and type.

        cache: "int8" keeps keys and values in a quarter of the bytes, off by at most 1/254 of a vector's largest.
        """
        weight = self.embed.tokens.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        if batch < 0 or max_len < 0:
            raise StateError(f"init_state(): got {batch} rows of {max_len} tokens, expected 0 or more of each.")
        with affordable("init_state()", "Lower batch or max_len, or use cache='int8'.", StateError):
            return self.stack.init_state(batch, max_len, device=device, dtype=dtype, cache=cache)


@spec("encoder")
class Encoder(ModelSpec):
    """A two-way model of one sequence. head: logits of each token (masked language models). loops: as in Decoder.

    pooler: one vector for the whole text, tanh(W h_0 + b) of its first token (BERT); see `EncoderModel.pooled`.
    one_way: allow mixers that see the past only (a plain LSTM or Mamba); refused by default, because a causal mask in
    an encoder is nearly always a slip.
    """

    vocab: int
    dim: int
    layers: tuple[Layer, ...]
    embed: Embed = Embed()
    head: Head | None = None
    loops: int = 1
    one_way: bool = False
    pooler: bool = False

    def check(self) -> None:
        """Something to read, some width."""
        check_width(self, "vocab", self.vocab)
        check_width(self, "dim", self.dim)
        check_width(self, "loops", self.loops, MOST)

    def build(self) -> EncoderModel:
        """The model, initialised. Errors: SpecError for cross-attention, or a causal mixer without one_way."""
        with affordable(self.kind, SMALLER):
            model = self.assemble(self.embed.table(self.vocab, self.dim))
            initialize(model.embed, model.stack, model.head)
        return model

    def assemble(self, tokens: TokenEmbedding, *, readers: int = 0) -> EncoderModel:
        """The model on a given token table, not yet initialised. readers: layers of the decoder that reads it."""
        _check_places(self.kind, self.embed, self.layers)
        for i, layer in enumerate(self.layers):
            if layer.cross is not None:
                raise SpecError(f"encoder.layers.{i}.cross: an encoder has no memory to read. Remove it.")
        head = self.head.build(tokens, self.dim) if self.head else None
        pooler = Linear(self.dim, self.dim) if self.pooler else None
        stack = Stack.of(self.layers, self.dim, loops=self.loops, readers=readers)
        model = EncoderModel(self, self.embed.build(tokens, self.dim), stack, head, pooler)
        for i, mixer in enumerate(model.stack.mixers()):
            if mixer.causal and not self.one_way:
                raise SpecError(
                    f"encoder.layers.{i}.mixer: sees the past only. Give it mask=FULL (in JSON: mask.causal false), or "
                    f"say one_way=True if that is meant."
                )
        return model


@final
class EncoderModel(nn.Module):
    """ids -> one vector a token, or logits when there is a head."""

    def __init__(
        self, spec: Encoder, embed: Embedding, stack: Stack, head: LogitHead | None, pooler: nn.Linear | None = None
    ) -> None:
        super().__init__()
        self.spec, self.embed, self.stack, self.head, self.pooler = spec, embed, stack, head, pooler

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        valid: Bool[Tensor, "B T"] | None = None,
        segment: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """(B, T) ids -> (B, T, D). valid: True at real tokens; None when there is no padding. segment: see `Span`."""
        return self.encode(ids, valid, segment).value

    def encode(
        self,
        ids: Int[Tensor, "B T"],
        valid: Bool[Tensor, "B T"] | None = None,
        segment: Int[Tensor, "B T"] | None = None,
    ) -> Memory:
        """(B, T) ids -> their vectors and where they sit."""
        check_ids(ids, "encoder", self.spec.vocab)
        at = replace(Span.of(ids, valid=valid), segment=segment)
        at.check(ids)
        at = self.embed.place(at)
        return Memory(self.stack(self.embed(ids, at), at), at)

    def logits(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """(B, T, D) -> (B, T, V). Errors: SpecError when the encoder was built without a head."""
        if self.head is None:
            raise SpecError("encoder.head: this encoder has none. Build it with head=Head().")
        return self.head(h)

    def pooled(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"]:
        """(B, T, D) -> (B, D), of the first token. Errors: SpecError when the encoder was built without a pooler."""
        if self.pooler is None:
            raise SpecError("encoder.pooler: this encoder has none. Build it with pooler=True.")
        return torch.tanh(self.pooler(h[:, 0]))


@spec("encoder_decoder")
class EncoderDecoder(ModelSpec):
    """Reads a source, writes a target. shared: one token table for both sides (equal vocabularies)."""

    encoder: Encoder
    decoder: Decoder
    shared: bool = False

    def check(self) -> None:
        """Both sides have one width; a shared table needs one vocabulary; the decoder reads the memory."""
        e, d = self.encoder, self.decoder
        if e.dim != d.dim:
            raise SpecError(
                f"encoder_decoder: encoder.dim is {e.dim}, decoder.dim {d.dim}; expected one width for both."
            )
        if self.shared and e.vocab != d.vocab:
            raise self.refuse("shared", f"False: the vocabularies differ ({e.vocab} and {d.vocab})")
        if self.shared and e.embed.width != d.embed.width:
            raise self.refuse("shared", f"False: the tables' widths differ ({e.embed.width} and {d.embed.width})")
        if all(layer.cross is None for layer in d.layers):
            raise SpecError(
                "encoder_decoder.decoder.layers: no layer has cross-attention, so the source would be ignored. "
                "Give layers cross=Cross(heads=...)."
            )

    def build(self) -> EncoderDecoderModel:
        """The model, initialised. Errors: SpecError from either side."""
        e, d = self.encoder, self.decoder
        with affordable(self.kind, SMALLER):
            source = e.embed.table(e.vocab, e.dim)
            target = source if self.shared else d.embed.table(d.vocab, d.dim)
            encoder = e.assemble(source, readers=len(d.layers) * d.loops)
            model = EncoderDecoderModel(self, encoder, d.assemble(target))
            for side in (model.encoder, model.decoder):
                initialize(side.embed, side.stack, side.head)
        return model


@final
class EncoderDecoderModel(nn.Module):
    """source, target -> logits of each next target token."""

    def __init__(self, spec: EncoderDecoder, encoder: EncoderModel, decoder: DecoderModel) -> None:
        super().__init__()
        self.spec, self.encoder, self.decoder = spec, encoder, decoder

    def encode(self, src: Int[Tensor, "B S"], valid: Bool[Tensor, "B S"] | None = None) -> Memory:
        """(B, S) source ids -> their memory. valid: True at real tokens; None when there is no padding."""
        return self.encoder.encode(src, valid)

    def decode(
        self,
        tgt: Int[Tensor, "B T"],
        memory: Memory | None,
        at: Span | None = None,
        state: StackState | None = None,
    ) -> Float[Tensor, "B T V"]:
        """(B, T) target ids -> (B, T, V). memory may be None once the state holds it."""
        if memory is not None and len(memory.value) != len(tgt):
            raise StateError(f"decode(): {len(tgt)} target rows for a memory of {len(memory.value)}; expected as many.")
        return self.decoder.logits(self.decoder.hidden(tgt, at, state, memory))

    def forward(
        self, src: Int[Tensor, "B S"], tgt: Int[Tensor, "B T"], src_valid: Bool[Tensor, "B S"] | None = None
    ) -> Float[Tensor, "B T V"]:
        """Teacher forcing: (B, S) source and (B, T) target ids -> (B, T, V), position t from targets up to t."""
        return self.decode(tgt, self.encode(src, src_valid))

    def init_state(
        self,
        batch: int,
        max_len: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        cache: CacheType = "float",
    ) -> StackState:
        """An empty state of the decoder for `batch` rows of at most `max_len` target tokens."""
        return self.decoder.init_state(batch, max_len, device=device, dtype=dtype, cache=cache)


AnyModel = DecoderModel | EncoderModel | EncoderDecoderModel
