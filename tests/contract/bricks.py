"""The table of bricks under contract. A new brick joins by adding one entry to its slot.

A slot has bricks, and entries of the same brick are its options. A `Cell` picks one entry of every slot and builds a
model of them. `star` puts every brick into every family under every placement; `pairs` makes a short list in which
every entry meets every brick of every other slot. What cannot meet is listed in `refusal` with its reason, never
left out in silence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import permutations, product
from typing import Any

import torch
from torch import nn

from brickformer.embed import Embed, Head, Transform
from brickformer.feedforward import GLU, MLP, FeedForwardSpec
from brickformer.layers import Layer
from brickformer.mask import Mask
from brickformer.mixers.attention import Attention
from brickformer.mixers.base import MixerSpec
from brickformer.mixers.cross import Cross
from brickformer.mixers.delta import GatedDelta
from brickformer.mixers.differential import DifferentialAttention
from brickformer.mixers.latent import LatentAttention
from brickformer.mixers.lstm import LSTM
from brickformer.mixers.mamba import Mamba
from brickformer.mixers.mamba2 import Mamba2
from brickformer.mixers.pointwise import Pointwise
from brickformer.mixers.shortconv import ShortConv
from brickformer.models import AnyModel, Decoder, Encoder, EncoderDecoder
from brickformer.moe import MoE, Router
from brickformer.norms import DynamicTanh, LayerNorm, NoNorm, NormSpec, OffsetRMSNorm, RMSNorm, ScaleNorm
from brickformer.positions import (
    AbsolutePositionSpec,
    Alibi,
    Dynamic,
    Learned,
    Linear,
    Llama3,
    Ntk,
    PositionSpec,
    Randomized,
    Rope,
    Sinusoid,
    T5Bias,
    Yarn,
)
from brickformer.spec import Spec

VOCAB, DIM, HEADS, WINDOW = 11, 16, 4, 3


@dataclass(frozen=True)
class Mix:
    """An entry of the mixer slot.

    make(causal, position) -> spec. takes_position: it has somewhere to put a rotary or a bias. two_way: it can see the
    future, as encoders want; a mixer that cannot is built into an encoder with one_way=True.
    """

    make: Callable[[bool, PositionSpec | None], MixerSpec]
    takes_position: bool = True
    two_way: bool = True


def attention(causal: bool, position: PositionSpec | None, window: int | None = None, **options: Any) -> MixerSpec:
    """Attention with some fields set."""
    return Attention(HEADS, position=position, mask=Mask(causal, window), **options)


def differential(causal: bool, position: PositionSpec | None, window: int | None = None, **options: Any) -> MixerSpec:
    """Differential attention with some fields set."""
    return DifferentialAttention(2, position=position, mask=Mask(causal, window), **options)


def latent(causal: bool, position: PositionSpec | None, window: int | None = None, **options: Any) -> MixerSpec:
    """Latent attention with some fields set; it is never without a position, and has a rotary one by default."""
    given = {} if position is None else {"position": position}
    return LatentAttention(HEADS, rank=6, rope_dim=2, mask=Mask(causal, window), **given, **options)


def shortconv(causal: bool, position: PositionSpec | None, window: int | None = None, **options: Any) -> MixerSpec:
    """Attention behind a short convolution."""
    return ShortConv(attention(causal, position, window), **options)


def recurrent(made: MixerSpec) -> Mix:
    """A mixer that has no position and no mask, and reads one way."""
    return Mix(lambda causal, position: made, takes_position=False, two_way=False)


MIXERS: Mapping[str, Mix] = {
    "mha": Mix(attention),
    "gqa": Mix(partial(attention, kv_heads=2)),
    "mqa": Mix(partial(attention, kv_heads=1)),
    "window": Mix(partial(attention, window=WINDOW)),
    "gqa_window": Mix(partial(attention, kv_heads=2, window=WINDOW, qk_norm=LayerNorm())),
    "normed": Mix(partial(attention, qk_norm=RMSNorm())),
    "normed_all": Mix(partial(attention, kv_heads=2, qk_norm_all=RMSNorm(), bias=True)),
    "capped": Mix(partial(attention, softcap=1.5, scale=0.7)),
    "wide": Mix(partial(attention, head_dim=6, bias=True, out_bias=False)),
    "written_out": Mix(partial(attention, kv_heads=2, backend="reference", bias=True, out_bias=True)),
    "sinks": Mix(partial(attention, kv_heads=2, sinks=True)),
    "sinks_window": Mix(partial(attention, window=WINDOW, sinks=True, backend="sdpa")),
    "residual": Mix(partial(attention, kv_heads=2, value_residual=True)),
    "residual_window": Mix(partial(attention, window=WINDOW, value_residual=True, bias=True)),
    "gated": Mix(partial(attention, gate=True)),
    "differential": Mix(differential),
    "differential_window": Mix(partial(differential, window=WINDOW, norm=LayerNorm(), lambda_init=0.3)),
    "latent": Mix(latent),
    "latent_full": Mix(partial(latent, q_rank=5, head_dim=6, v_dim=3, norm=LayerNorm(), scale=0.4)),
    "latent_window": Mix(partial(latent, window=WINDOW, backend="reference")),
    "shortconv": Mix(shortconv),
    "shortconv_window": Mix(partial(shortconv, window=WINDOW, kernel=2)),
    "pointwise": recurrent(ShortConv(Pointwise(MLP(12)), kernel=3)),
    "lstm": Mix(lambda causal, position: LSTM(bidirectional=not causal), takes_position=False),
    "lstm_one_way": recurrent(LSTM(hidden=12)),
    "mamba": recurrent(Mamba(state=3)),
    "mamba_full": recurrent(Mamba(state=2, inner=10, conv=2, rank=3, bias=True, conv_bias=False)),
    "mamba_normed": recurrent(Mamba(state=3, rank=4, inner_norm=RMSNorm())),
    "mamba2": recurrent(Mamba2(head_dim=8, state=4)),
    "mamba2_full": recurrent(Mamba2(heads=4, head_dim=3, state=4, groups=2, conv=2, bias=True, conv_bias=False)),
    "delta": recurrent(GatedDelta(heads=2)),
    "delta_full": recurrent(GatedDelta(heads=2, value_heads=4, head_dim=3, value_dim=5, conv=2, bias=True)),
}

POSITIONS: Mapping[str, Callable[[], PositionSpec | None]] = {
    "none": lambda: None,
    "rope": Rope,
    "rope_pairs": lambda: Rope(theta=100.0, layout="interleaved"),
    "rope_part": lambda: Rope(width=2),
    "rope_linear": lambda: Rope(scaling=Linear(factor=2.0)),
    "rope_ntk": lambda: Rope(scaling=Ntk(factor=2.0)),
    "rope_yarn": lambda: Rope(theta=20.0, scaling=Yarn(factor=4.0, original=8, fast=1.0, slow=0.2)),
    "rope_yarn_blunt": lambda: Rope(theta=20.0, scaling=Yarn(factor=4.0, original=8, sharpening=1.0)),
    "rope_dynamic": lambda: Rope(scaling=Dynamic(factor=2.0, original=64)),
    "rope_llama3": lambda: Rope(theta=20.0, scaling=Llama3(factor=4.0, original=16)),
    "alibi": Alibi,
    "t5bias": lambda: T5Bias(buckets=8, max_distance=16),
    "t5bias_shared": lambda: T5Bias(buckets=8, max_distance=16, shared=True),
}

ABSOLUTE: Mapping[str, Callable[[], AbsolutePositionSpec | None]] = {
    "none": lambda: None,
    "sinusoid": lambda: Sinusoid(max_len=64),
    "learned": lambda: Learned(max_len=64),
    "sinusoid_halves": lambda: Sinusoid(max_len=64, layout="halves"),
    "learned_skip": lambda: Learned(max_len=64, skip=2),
}

FEEDFORWARD: Mapping[str, Callable[[], FeedForwardSpec | None]] = {
    "no_ffn": lambda: None,
    "mlp": lambda: MLP(24),
    "mlp_gelu": lambda: MLP(24, activation="gelu"),
    "mlp_gelu_tanh": lambda: MLP(24, activation="gelu_tanh", bias=False),
    "mlp_relu2": lambda: MLP(24, activation="relu2"),
    "mlp_silu": lambda: MLP(24, activation="silu"),
    "glu": lambda: GLU(24),
    "glu_gelu": lambda: GLU(24, activation="gelu", bias=True),
    "glu_gelu_tanh": lambda: GLU(24, activation="gelu_tanh"),
    "glu_relu": lambda: GLU(24, activation="relu"),
    "glu_relu2": lambda: GLU(24, activation="relu2"),
    "moe": lambda: MoE(3, GLU(8)),
    "moe_shared": lambda: MoE(4, MLP(8), Router(3, score="sigmoid", normalize=False, scale=1.5), shared=GLU(8)),
    "moe_groups": lambda: MoE(6, GLU(8), Router(2, groups=3, top_groups=2, score="sigmoid")),
    "moe_even": lambda: MoE(3, MLP(8), Router(balance=0.0, z=0.0, bias_rate=0.01)),
}

NORMS: Mapping[str, Callable[[], NormSpec]] = {
    "layernorm": LayerNorm,
    "layernorm_no_bias": lambda: LayerNorm(bias=False),
    "rmsnorm": RMSNorm,
    "offset_rmsnorm": OffsetRMSNorm,
    "scalenorm": ScaleNorm,
    "dynamictanh": DynamicTanh,
}

PLACES = ("pre", "post", "peri", "branch", "deep")
ARRANGE = ("serial", "parallel", "parallel_norms")
LAYERSCALE: Mapping[str, float | None] = {"unscaled": None, "layerscale": 0.5}

EMBEDS: Mapping[str, Callable[..., Embed]] = {
    "plain": Embed,
    "scaled": partial(Embed, scaled=True),
    "normed": partial(Embed, norm=LayerNorm()),
    "randomized": partial(Embed, randomized=Randomized(range=64, stride=2)),
    "segments": partial(Embed, segments=2),
    "factorized": partial(Embed, width=6, norm=LayerNorm()),
}

HEADS_OUT: Mapping[str, Callable[[], Head]] = {
    "tied": Head,
    "untied": lambda: Head(tied=False),
    "bias": lambda: Head(bias=True),
    "capped": lambda: Head(softcap=3.0),
    "scaled": lambda: Head(scaled=True),
    "transform": lambda: Head(transform=Transform()),
    "transform_other": lambda: Head(transform=Transform("silu", RMSNorm(), bias=False)),
}

TIED_HEADS = ("tied", "bias", "capped", "scaled")  # they need a table as wide as the model

STACKS = ("alike", "mixed", "looped")  # mixed: every other layer is windowed attention; looped: twice round one layer

CROSS: Mapping[str, Callable[[], Cross | None]] = {
    "none": lambda: None,
    "mha": lambda: Cross(HEADS, bias=True),
    "gqa": lambda: Cross(HEADS, kv_heads=2),
    "normed": lambda: Cross(HEADS, kv_heads=1, qk_norm=RMSNorm(), head_dim=6),
    "written_out": lambda: Cross(HEADS, kv_heads=2, scale=0.3, backend="reference"),
}

FAMILIES = ("decoder", "encoder", "encoder_decoder")

SLOTS: dict[str, tuple[str, ...]] = {
    "family": FAMILIES,
    "mixer": tuple(MIXERS),
    "position": tuple(POSITIONS),
    "absolute": tuple(ABSOLUTE),
    "ffn": tuple(FEEDFORWARD),
    "norm": tuple(NORMS),
    "place": PLACES,
    "arrange": ARRANGE,
    "layerscale": tuple(LAYERSCALE),
    "embed": tuple(EMBEDS),
    "head": tuple(HEADS_OUT),
    "stack": STACKS,
    "cross": tuple(CROSS),
}


@dataclass(frozen=True)
class Cell:
    """One entry of every slot: a model."""

    family: str = "decoder"
    mixer: str = "mha"
    position: str = "rope"
    absolute: str = "none"
    ffn: str = "glu"
    norm: str = "rmsnorm"
    place: str = "pre"
    arrange: str = "serial"
    layerscale: str = "unscaled"
    embed: str = "plain"
    head: str = "tied"
    stack: str = "alike"
    cross: str = "none"

    def __str__(self) -> str:
        """What differs from the base: the name of the test."""
        base = Cell()
        return "-".join([self.family, *(v for k, v in self.items() if k != "family" and v != getattr(base, k))])

    def items(self) -> list[tuple[str, str]]:
        """(slot, entry) pairs."""
        return [(f.name, getattr(self, f.name)) for f in fields(self)]

    def layers(self, causal: bool, cross: Cross | None, dropout: float = 0.0) -> tuple[Layer, ...]:
        """The layers of one side."""
        mix = MIXERS[self.mixer]
        layer = Layer(
            mix.make(causal, POSITIONS[self.position]()),
            FEEDFORWARD[self.ffn](),
            cross=cross,
            norm=NORMS[self.norm](),
            place=self.place,  # type: ignore[arg-type]
            arrange=self.arrange,  # type: ignore[arg-type]
            layerscale=LAYERSCALE[self.layerscale],
            dropout=dropout,
        )
        other = Layer(
            attention(causal, Rope(), WINDOW, kv_heads=2), MLP(24), cross=cross, norm=LayerNorm(), mixer_norm=NoNorm()
        )
        return {"alike": (layer, layer), "mixed": (layer, other), "looped": (layer,)}[self.stack]

    def spec(self, dropout: float = 0.0) -> Decoder | Encoder | EncoderDecoder:
        """The spec of the model. Errors: SpecError where the bricks refuse each other."""
        embed = EMBEDS[self.embed](position=ABSOLUTE[self.absolute](), dropout=dropout)
        head = HEADS_OUT[self.head]()
        one_way = not MIXERS[self.mixer].two_way
        cross, loops = CROSS[self.cross](), 2 if self.stack == "looped" else 1
        match self.family:
            case "decoder":
                return Decoder(VOCAB, DIM, self.layers(True, cross, dropout), embed, head, loops)
            case "encoder":
                return Encoder(VOCAB, DIM, self.layers(False, cross, dropout), embed, head, loops, one_way=one_way)
            case "encoder_decoder":
                source = Encoder(VOCAB, DIM, self.layers(False, None, dropout), embed, None, loops, one_way=one_way)
                target = Decoder(VOCAB, DIM, self.layers(True, cross, dropout), embed, head, loops)
                return EncoderDecoder(source, target, shared=self.head == "tied")
            case other:
                raise AssertionError(other)

    def build(self, seed: int = 0) -> AnyModel:
        """The model in float64, every parameter shaken so that each of them matters."""
        torch.manual_seed(seed)
        model = self.spec().build().double().eval()
        shake(model)
        return model


def shake(model: nn.Module, seed: int = 1) -> None:
    """Add noise to every parameter: initial values are too small and too regular to show what a brick does."""
    noise = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        size = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
        drawn = torch.randn(parameter.shape, generator=noise, dtype=torch.float64) * size
        parameter.data.add_(drawn.to(parameter.dtype))


# ---- what cannot meet -----------------------------------------------------------------------------------------------


def refusal(chosen: Mapping[str, str]) -> tuple[str, str] | None:
    """Why these entries (of some slots, or of all) cannot meet: what kind of reason, and the reason. None if they can.

    "refused": building it is a SpecError whose text holds the reason (a test builds it). "no place": the spec has no
    field to write it in.
    """
    family, cross = chosen.get("family"), chosen.get("cross")
    if chosen.get("arrange", "serial") != "serial":
        if chosen.get("place", "pre") != "pre":
            return "refused", "layer.place"
        if family == "encoder_decoder" or cross not in (None, "none") or chosen.get("ffn") == "no_ffn":
            return "refused", "layer.arrange"
    known = SLOTS.keys() <= {*chosen, "ffn", "norm", "head", "layerscale"}
    if chosen.get("embed") == "randomized" and known and not _reads_places(chosen):
        return "refused", "no brick reads places"
    if chosen.get("embed") == "factorized" and chosen.get("head") in TIED_HEADS:
        return "refused", "head.tied"
    if family == "encoder_decoder" and cross == "none":
        return "refused", "no layer has cross-attention"
    if family in ("decoder", "encoder") and cross not in (None, "none"):
        return "refused", f"{family}.layers.0.cross"
    if "mixer" in chosen and not MIXERS[chosen["mixer"]].takes_position and chosen.get("position", "none") != "none":
        return "no place", f"{chosen['mixer']} has no field for a position"
    return None


def _reads_places(chosen: Mapping[str, str]) -> bool:
    """Whether a rotary or a table is anywhere in a model."""
    by_default = chosen["mixer"].startswith("latent") and chosen["position"] == "none"
    tables = chosen["absolute"] != "none" or chosen["stack"] == "mixed"  # its other layer is rotary
    return tables or by_default or chosen["position"].startswith("rope")


# ---- tables ---------------------------------------------------------------------------------------------------------


def kind(slot: str, entry: str) -> str:
    """Which brick an entry is; entries of the same brick are its options."""
    made: dict[str, Callable[[], Spec | None]] = {
        "mixer": lambda: MIXERS[entry].make(True, None),
        "position": lambda: POSITIONS[entry](),
        "absolute": lambda: ABSOLUTE[entry](),
        "ffn": lambda: FEEDFORWARD[entry](),
        "norm": lambda: NORMS[entry](),
    }
    brick = made[slot]() if slot in made else None
    return entry if brick is None else brick.kind


KIND = {(slot, entry): kind(slot, entry) for slot, entries in SLOTS.items() for entry in entries}
BRICKS = ("mixer", "position", "absolute", "ffn", "norm", "place")


def star(slot: str) -> Iterator[Cell]:
    """Each brick of one slot (its first entry) in every family under every placement, the other slots at their base."""
    bricks = {KIND[slot, entry]: entry for entry in reversed(SLOTS[slot])}
    for entry, place, family in product(reversed(bricks.values()), PLACES, FAMILIES):
        base = Cell(family=family, place=place, cross="mha" if family == "encoder_decoder" else "none")
        cell = replace(base, **{slot: entry})
        if not MIXERS[cell.mixer].takes_position:
            cell = replace(cell, position="none")
        if refusal(dict(cell.items())) is None:
            yield cell


def stars() -> list[Cell]:
    """The stars of all slots that hold bricks, each cell once."""
    return list(dict.fromkeys(cell for slot in BRICKS for cell in star(slot)))


Meeting = tuple[str, str, str, str]  # an entry of one slot, and a brick of another: (slot, entry, other slot, kind)


def all_meetings() -> list[Meeting]:
    """Every entry with every brick of every other slot."""
    return [
        (a, x, b, y)
        for a, b in permutations(SLOTS, 2)
        for x in SLOTS[a]
        for y in dict.fromkeys(KIND[b, entry] for entry in SLOTS[b])
    ]


def meetings(chosen: Mapping[str, str]) -> set[Meeting]:
    """Who meets whom among the entries chosen so far."""
    return {(a, x, b, KIND[b, y]) for (a, x), (b, y) in permutations(chosen.items(), 2)}


def why_not(meeting: Meeting) -> tuple[str, str] | None:
    """The reason why an entry and a brick cannot meet; None if some option of the brick can."""
    a, x, b, y = meeting
    reasons = [refusal({a: x, b: entry}) for entry in SLOTS[b] if KIND[b, entry] == y]
    return None if None in reasons else reasons[0]


@lru_cache
def pairs(seed: int = 0) -> tuple[Cell, ...]:
    """A short list of cells in which every entry meets every brick that it can meet (greedy, always the same list)."""
    rng = random.Random(seed)
    missing = {m for m in all_meetings() if why_not(m) is None}
    cells = []
    while missing:
        a, x, b, y = min(missing)
        starts = [{a: x, b: entry} for entry in SLOTS[b] if KIND[b, entry] == y]
        tries = [_complete(start, rng, missing) for start in starts for _ in range(4)]
        best = max((t for t in tries if t is not None), key=lambda t: len(missing & meetings(t)))
        cells.append(Cell(**best))
        missing -= meetings(best)
    return tuple(cells)


def _complete(chosen: dict[str, str], rng: random.Random, missing: set[Meeting]) -> dict[str, str] | None:
    """Choose the other slots one by one, each time the entry that meets most of what is missing; None if stuck."""
    if refusal(chosen) is not None:
        return None
    slots = [slot for slot in SLOTS if slot not in chosen]
    if not slots:
        return chosen
    slot = rng.choice(slots)
    entries = list(SLOTS[slot])
    rng.shuffle(entries)
    entries.sort(key=lambda e: -len(missing & meetings({**chosen, slot: e})))
    for entry in entries:
        done = _complete({**chosen, slot: entry}, rng, missing)
        if done is not None:
            return done
    return None
