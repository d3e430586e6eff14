"""Layers: the whole skeleton on one screen.

A branch is joined to the stream of vectors by one formula, every placement of the norm included:

    Residual    after(skip · x + drop(out(f(into(x)))))        skip = 1 but for deepnorm

    pre     into = norm                    x + f(norm(x))             arXiv 2002.04745; trains without warm-up
    post    after = norm                   norm(x + f(x))             arXiv 1706.03762, the original
    peri    into = norm, out = norm        x + norm(f(norm(x)))       arXiv 2502.02732; Gemma 2
    branch  out = norm                     x + norm(f(x))             arXiv 2501.00656; OLMo 2
    deep    after = norm, skip = α         norm(α x + f(x))           arXiv 2203.00555; DeepNorm

LayerScale (arXiv 2103.17239) is a gain at the end of `out`.

    Layer       mixer, then cross-attention where there is a memory, then feed-forward; each in its Residual
    Stack       layers, one after another, and a last norm where the placement leaves the stream unnormed; looped, the
                same layers are met again (arXiv 1807.03819), and one layer in a loop is ALBERT (arXiv 1909.11942)

Shapes: x (B, T, D) everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, assert_never, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.errors import SpecError, StateError
from brickformer.feedforward import FeedForward, FeedForwardSpec
from brickformer.mask import Span
from brickformer.mixers.base import Mixer, MixerSpec, wants_values
from brickformer.mixers.cross import Cross, CrossAttention, Memory
from brickformer.norms import LayerScale, NoNorm, NormSpec, RMSNorm
from brickformer.positions.base import one_stack
from brickformer.ranges import MOST, check_dropout, check_size
from brickformer.spec import Spec, spec
from brickformer.state import CacheType, CrossKV, LayerState, StackState, check_cache

Place = Literal["pre", "post", "peri", "branch", "deep"]


@final
class Residual(nn.Module):
    """after(skip · x + drop(out(f(into(x)))))."""

    def __init__(
        self, into: nn.Module, out: nn.Module, after: nn.Module, *, skip: float = 1.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.into, self.out, self.after, self.skip, self.drop = into, out, after, skip, nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "B T D"], f: Callable[[Tensor], Tensor]) -> Float[Tensor, "B T D"]:
        """x joined with the branch f."""
        skipped = x if self.skip == 1.0 else self.skip * x
        return self.after(skipped + self.branch(x, f))

    def branch(self, x: Float[Tensor, "B T D"], f: Callable[[Tensor], Tensor]) -> Float[Tensor, "B T D"]:
        """What the branch adds: drop(out(f(into(x))))."""
        return self.drop(self.out(f(self.into(x))))


@spec("layer")
class Layer(Spec):
    """One layer.

    ffn: None for a layer of the mixer alone, as in stacks of Mamba. cross: cross-attention, in decoders of an
    EncoderDecoder. norm, place: which norm and where (see above). arrange: "parallel" lets mixer and feed-forward read
    the same input and adds both (GPT-J, PaLM: arXiv 2204.02311); "parallel_norms" gives each a norm of its own
    (GPT-NeoX: arXiv 2204.06745; Falcon 40B). layerscale: where the gains of each branch start, for example 0.1; None
    for none. dropout: on what a branch adds. mixer_norm: the norm around the mixer where it is another one than `norm`,
    as NoNorm() in a first layer whose input is normed already (ModernBERT).
    """

    mixer: MixerSpec
    ffn: FeedForwardSpec | None = None
    cross: Cross | None = None
    norm: NormSpec = RMSNorm()
    place: Place = "pre"
    arrange: Literal["serial", "parallel", "parallel_norms"] = "serial"
    layerscale: float | None = None
    dropout: float = 0.0
    mixer_norm: NormSpec | NoNorm | None = None

    def check(self) -> None:
        """Parallel branches need one input: a pre-norm, and no cross-attention between them."""
        check_dropout(self, self.dropout)
        check_size(self, "layerscale", self.layerscale)
        if self.arrange != "serial" and self.place != "pre":
            raise self.refuse("place", f"'pre' when arrange is {self.arrange!r}: both branches read a normed input")
        if self.arrange == "parallel" and self.mixer_norm is not None:
            raise self.refuse("mixer_norm", "none when arrange is 'parallel': mixer and feed-forward share one norm")
        if self.arrange != "serial" and self.ffn is None:
            raise self.refuse("arrange", "'serial' without a feed-forward: there is nothing beside the mixer")
        if self.arrange != "serial" and self.cross is not None:
            raise self.refuse("arrange", "'serial' when there is cross-attention: it reads what the mixer wrote")

    def build(self, dim: int, depth: int, readers: int = 0) -> StackLayer:
        """The module, one of `depth` layers. readers: layers of the decoder that reads an encoder."""

        def residual(norm: NormSpec | NoNorm = self.norm) -> Residual:
            return self.residual(dim, depth, readers, norm)

        mixer, around_mixer = self.mixer.build(dim), residual(self.mixer_norm or self.norm)
        if self.arrange == "parallel" and self.ffn:
            return ParallelLayer(mixer, self.ffn.build(dim), around_mixer)
        feeding = (self.ffn.build(dim), residual()) if self.ffn else None
        if self.arrange == "parallel_norms" and feeding:
            return ParallelNormsLayer(mixer, around_mixer, *feeding)
        crossing = (self.cross.build(dim), residual()) if self.cross else None
        return TransformerLayer(mixer, around_mixer, feeding, crossing)

    def residual(self, dim: int, depth: int, readers: int, norm: NormSpec | NoNorm) -> Residual:
        """A residual with its norms where `place` says. depth, readers: as in `build`."""
        into: nn.Module = nn.Identity()
        out: nn.Module = nn.Identity()
        after: nn.Module = nn.Identity()
        skip = 1.0
        match self.place:
            case "pre":
                into = norm.build(dim)
            case "post":
                after = norm.build(dim)
            case "peri":
                into, out = norm.build(dim), norm.build(dim)
            case "branch":
                out = norm.build(dim)
            case "deep":
                branches = 1.0 + (self.cross is not None) + (self.ffn is not None)
                after, skip = norm.build(dim), (branches * depth) ** 0.25
                if readers:  # Table 1 of the paper: a decoder of M layers reads N of these
                    skip = 0.81 * (depth**4 * readers) ** (1 / 16)
            case other:
                assert_never(other)
        if self.layerscale is not None:
            out = nn.Sequential(out, LayerScale(dim, self.layerscale))
        return Residual(into, out, after, skip=skip, dropout=self.dropout)


class StackLayer(nn.Module, ABC):
    """Slot: one layer of a stack."""

    mixer: Mixer
    cross: CrossAttention | None

    @abstractmethod
    def branches(self) -> list[tuple[Residual, nn.Module]]:
        """Each residual with what runs inside it, in the order in which a vector meets them."""

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "B T D"], at: Span, state: LayerState | None = None, memory: Memory | None = None
    ) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""

    def values(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B G T K"] | None:
        """The values of its mixer, for later layers."""
        around, _ = self.branches()[0]
        return self.mixer.values(around.into(x))

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> LayerState:
        """An empty state for this layer."""
        mixer = self.mixer.init_state(batch, max_len, device=device, dtype=dtype)
        return LayerState(mixer, None if self.cross is None else CrossKV())


@final
class TransformerLayer(StackLayer):
    """Mixer, cross-attention and feed-forward where there are such: one after another."""

    def __init__(
        self,
        mixer: Mixer,
        around_mixer: Residual,
        feeding: tuple[FeedForward, Residual] | None = None,
        crossing: tuple[CrossAttention, Residual] | None = None,
    ) -> None:
        super().__init__()
        self.mixer, self.around_mixer = mixer, around_mixer
        self.cross = crossing[0] if crossing else None
        self.around_cross = crossing[1] if crossing else None
        self.ffn = feeding[0] if feeding else None
        self.around_ffn = feeding[1] if feeding else None

    def branches(self) -> list[tuple[Residual, nn.Module]]:
        """Mixer, cross-attention, feed-forward."""
        met: list[tuple[Residual, nn.Module]] = [(self.around_mixer, self.mixer)]
        others = ((self.around_cross, self.cross), (self.around_ffn, self.ffn))
        return met + [(around, part) for around, part in others if around is not None and part is not None]

    def forward(
        self, x: Float[Tensor, "B T D"], at: Span, state: LayerState | None = None, memory: Memory | None = None
    ) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""
        x = self.around_mixer(x, lambda h: self.mixer(h, at, state.mixer if state else None))
        cross = self.cross
        if cross is not None and self.around_cross is not None:
            x = self.around_cross(x, lambda h: cross(h, at, memory, state.cross if state else None))
        if self.ffn is not None and self.around_ffn is not None:
            x = self.around_ffn(x, self.ffn)
        return x


@final
class ParallelLayer(StackLayer):
    """x + mixer(norm(x)) + ffn(norm(x)): both branches read the same input."""

    def __init__(self, mixer: Mixer, ffn: FeedForward, around: Residual) -> None:
        super().__init__()
        self.mixer, self.ffn, self.around, self.cross = mixer, ffn, around, None

    def branches(self) -> list[tuple[Residual, nn.Module]]:
        """Mixer and feed-forward share one residual."""
        return [(self.around, self.mixer), (self.around, self.ffn)]

    def forward(
        self, x: Float[Tensor, "B T D"], at: Span, state: LayerState | None = None, memory: Memory | None = None
    ) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""
        return self.around(x, lambda h: self.mixer(h, at, state.mixer if state else None) + self.ffn(h))


@final
class ParallelNormsLayer(StackLayer):
    """x + mixer(norm(x)) + ffn(norm'(x)): both branches read the same input, each through a norm of its own."""

    def __init__(self, mixer: Mixer, around_mixer: Residual, ffn: FeedForward, around_ffn: Residual) -> None:
        super().__init__()
        self.mixer, self.around_mixer, self.cross = mixer, around_mixer, None
        self.ffn, self.around_ffn = ffn, around_ffn

    def branches(self) -> list[tuple[Residual, nn.Module]]:
        """Mixer, feed-forward."""
        return [(self.around_mixer, self.mixer), (self.around_ffn, self.ffn)]

    def forward(
        self, x: Float[Tensor, "B T D"], at: Span, state: LayerState | None = None, memory: Memory | None = None
    ) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""
        mixed = self.around_mixer.branch(x, lambda h: self.mixer(h, at, state.mixer if state else None))
        return x + mixed + self.around_ffn.branch(x, self.ffn)


@final
class Stack(nn.Module):
    """Layers one after another, `loops` times round with the same weights, then a last norm. Values of the first layer,
    where a mixer takes them, are computed before it and told to all in the span."""

    def __init__(self, layers: Sequence[StackLayer], norm: nn.Module, *, loops: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm, self.loops = norm, loops
        self.tells = wants_values([layer.mixer for layer in layers])

    @classmethod
    @one_stack()
    def of(cls, layers: Sequence[Layer], dim: int, *, loops: int = 1, readers: int = 0) -> Stack:
        """Build the layers. The last norm is the last layer's; none where it ends in one. readers: as in `Layer`."""
        if not layers:
            raise SpecError("layers: got none, expected at least one. Use pattern([Layer(...)], depth=...).")
        built = []
        for i, layer in enumerate(layers):
            try:
                built.append(layer.build(dim, len(layers) * loops, readers))
            except SpecError as e:
                raise SpecError(f"layers.{i}: {e}") from None
        last = layers[-1]
        ends_normed = last.place in ("post", "deep")
        return cls(built, nn.Identity() if ends_normed else last.norm.build(dim), loops=loops)

    def forward(
        self, x: Float[Tensor, "B T D"], at: Span, state: StackState | None = None, memory: Memory | None = None
    ) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D). The state learns the tokens at `at` and moves its clock."""
        passes = self.passes()
        told = replace(at, values=passes[0].values(x)) if self.tells else at
        if state is None:
            for layer in passes:
                x = layer(x, told, None, memory)
            return self.norm(x)
        if len(state.layers) != len(passes):
            raise StateError(
                f"the state has {len(state.layers)} layers, the model {len(passes)}. "
                "Make it with this model's init_state()."
            )
        state.check_next(at)
        for layer, layer_state in zip(passes, state.layers, strict=True):
            x = layer(x, told, layer_state, memory)
        state.advance(at)
        return self.norm(x)

    def mixers(self) -> list[Mixer]:
        """The mixer of each layer, in order."""
        return [layer.mixer for layer in self.passes()[: len(self.layers)]]

    def branches(self) -> list[tuple[Residual, nn.Module]]:
        """The residuals of all layers with what runs inside them, each once, in order."""
        return [branch for layer in self.passes()[: len(self.layers)] for branch in layer.branches()]

    def passes(self) -> list[StackLayer]:
        """The layers in the order in which a vector meets them."""
        return list(self.layers) * self.loops  # type: ignore[return-value]

    def init_state(
        self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype, cache: CacheType = "float"
    ) -> StackState:
        """An empty state for `batch` rows of at most `max_len` tokens. Errors: StateError where a mixer keeps none."""
        check_cache(cache)
        made = []
        for i, layer in enumerate(self.passes()):
            try:
                own = layer.init_state(batch, max_len, device=device, dtype=dtype)
            except StateError as e:
                raise StateError(f"layers.{i}.{e}") from None
            made.append(LayerState(own.mixer.in_int8(), own.cross) if cache == "int8" else own)
        return StackState(made)


def pattern(unit: Sequence[Layer], depth: int) -> tuple[Layer, ...]:
    """`unit` repeated to `depth` layers: per-layer difference is data. Errors: SpecError when it does not come out."""
    if not unit or not 1 <= depth <= MOST or depth % len(unit):
        raise SpecError(
            f"pattern(): got depth={depth} for a unit of {len(unit)}, expected a positive multiple of the unit, "
            f"at most {MOST:,}."
        )
    return tuple(unit) * (depth // len(unit))
