"""The table of bricks under contract. A new brick joins by adding one entry to its slot.

A `Cell` picks one entry of every slot and builds a tiny model of them. `star` varies one slot at a time under every
placement and family; `pairs` makes a short list of cells in which every two entries that can meet do meet. What cannot
meet is listed in `refusal` with its reason, never left out in silence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import combinations, product

import torch
from torch import nn

from brickformer.embed import Embed, Head
from brickformer.feedforward import GLU, MLP, FeedForwardSpec
from brickformer.layers import Layer, pattern
from brickformer.mask import Mask
from brickformer.mixers.attention import Attention
from brickformer.mixers.base import MixerSpec
from brickformer.mixers.cross import Cross
from brickformer.models import AnyModel, Decoder, Encoder, EncoderDecoder
from brickformer.norms import LayerNorm, NormSpec, RMSNorm
from brickformer.positions import AbsolutePositionSpec, Alibi, Learned, PositionSpec, Rope, Sinusoid, T5Bias

VOCAB, DIM, DEPTH, HEADS, WINDOW = 11, 16, 2, 4, 3


@dataclass(frozen=True)
class Mix:
    """An entry of the mixer slot.

    make(causal, position) -> spec. takes_position: it has somewhere to put a rotary or a bias. two_way: it can see the
    future, as encoders want; a mixer that cannot is built into an encoder with one_way=True.
    """

    make: Callable[[bool, PositionSpec | None], MixerSpec]
    takes_position: bool = True
    two_way: bool = True


def attention(causal: bool, position: PositionSpec | None, window: int | None = None, **options: object) -> MixerSpec:
    """Attention with some fields set."""
    return Attention(HEADS, position=position, mask=Mask(causal, window), **options)  # type: ignore[arg-type]


MIXERS: Mapping[str, Mix] = {
    "mha": Mix(attention),
    "gqa": Mix(partial(attention, kv_heads=2)),
    "mqa": Mix(partial(attention, kv_heads=1)),
    "window": Mix(partial(attention, window=WINDOW)),
    "gqa_window": Mix(partial(attention, kv_heads=2, window=WINDOW, qk_norm=LayerNorm())),
    "normed": Mix(partial(attention, qk_norm=RMSNorm())),
    "capped": Mix(partial(attention, softcap=1.5, scale=0.7)),
    "wide": Mix(partial(attention, head_dim=6, bias=True, out_bias=False)),
    "written_out": Mix(partial(attention, kv_heads=2, backend="reference", bias=True)),
}

POSITIONS: Mapping[str, Callable[[], PositionSpec | None]] = {
    "none": lambda: None,
    "rope": Rope,
    "alibi": Alibi,
    "t5bias": lambda: T5Bias(buckets=8, max_distance=16),
}

ABSOLUTE: Mapping[str, Callable[[], AbsolutePositionSpec | None]] = {
    "none": lambda: None,
    "sinusoid": lambda: Sinusoid(max_len=32),
    "learned": lambda: Learned(max_len=32),
}

FEEDFORWARD: Mapping[str, Callable[[], FeedForwardSpec]] = {
    "mlp_relu": lambda: MLP(24),
    "mlp_gelu": lambda: MLP(24, activation="gelu"),
    "mlp_gelu_tanh": lambda: MLP(24, activation="gelu_tanh", bias=False),
    "mlp_relu2": lambda: MLP(24, activation="relu2"),
    "swiglu": lambda: GLU(24),
    "geglu": lambda: GLU(24, activation="gelu", bias=True),
    "reglu": lambda: GLU(24, activation="relu"),
}

NORMS: Mapping[str, Callable[[], NormSpec]] = {
    "layernorm": LayerNorm,
    "layernorm_no_bias": lambda: LayerNorm(bias=False),
    "rmsnorm": RMSNorm,
}

PLACES = ("pre", "post", "peri", "branch")
ARRANGE = ("serial", "parallel")

EMBEDS: Mapping[str, Callable[..., Embed]] = {
    "plain": Embed,
    "scaled": partial(Embed, scaled=True),
    "normed": partial(Embed, norm=LayerNorm()),
}

HEADS_OUT: Mapping[str, Callable[[], Head]] = {
    "tied": Head,
    "untied": lambda: Head(tied=False),
    "bias": lambda: Head(bias=True),
    "capped": lambda: Head(softcap=3.0),
}

STACKS = ("alike", "mixed")  # mixed: every other layer is plain windowed attention with another norm and placement

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
    ffn: str = "swiglu"
    norm: str = "rmsnorm"
    place: str = "pre"
    arrange: str = "serial"
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
            dropout=dropout,
        )
        other = Layer(attention(causal, Rope(), WINDOW, kv_heads=2), MLP(24), cross=cross, norm=LayerNorm())
        return pattern([layer, other] if self.stack == "mixed" else [layer], DEPTH)

    def spec(self, dropout: float = 0.0) -> Decoder | Encoder | EncoderDecoder:
        """The spec of the model. Errors: SpecError where the bricks refuse each other."""
        embed = EMBEDS[self.embed](position=ABSOLUTE[self.absolute](), dropout=dropout)
        head = HEADS_OUT[self.head]()
        one_way = not MIXERS[self.mixer].two_way
        cross = CROSS[self.cross]()
        match self.family:
            case "decoder":
                return Decoder(VOCAB, DIM, self.layers(True, cross, dropout), embed, head)
            case "encoder":
                return Encoder(VOCAB, DIM, self.layers(False, cross, dropout), embed, head, one_way=one_way)
            case "encoder_decoder":
                source = Encoder(VOCAB, DIM, self.layers(False, None, dropout), embed, one_way=one_way)
                target = Decoder(VOCAB, DIM, self.layers(True, cross, dropout), embed, head)
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
    """Add noise to every parameter: initial values are too small, and too regular, to show what a brick does with them."""
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
    if chosen.get("arrange") == "parallel":
        if chosen.get("place", "pre") != "pre":
            return "refused", "layer.place"
        if family == "encoder_decoder" or cross not in (None, "none"):
            return "refused", "layer.arrange"
    if family == "encoder_decoder" and cross == "none":
        return "refused", "no layer has cross-attention"
    if family in ("decoder", "encoder") and cross not in (None, "none"):
        return "refused", f"{family}.layers.0.cross"
    if "mixer" in chosen and not MIXERS[chosen["mixer"]].takes_position and chosen.get("position", "none") != "none":
        return "no place", f"{chosen['mixer']} has no field for a position"
    return None


# ---- tables ---------------------------------------------------------------------------------------------------------


def star(slot: str) -> Iterator[Cell]:
    """Every entry of one slot under every placement in every family, the other slots at their base."""
    for entry, place, family in product(SLOTS[slot], PLACES, FAMILIES):
        base = Cell(family=family, place=place, cross="mha" if family == "encoder_decoder" else "none")
        cell = replace(base, **{slot: entry})
        if not MIXERS[cell.mixer].takes_position:
            cell = replace(cell, position="none")
        if refusal(dict(cell.items())) is None:
            yield cell


def stars() -> list[Cell]:
    """The stars of all slots, each cell once."""
    return list(dict.fromkeys(cell for slot in SLOTS for cell in star(slot)))


Pair = frozenset[tuple[str, str]]


def all_pairs() -> list[Pair]:
    """Every two entries of two slots."""
    return [
        frozenset([(a, x), (b, y)]) for a, b in combinations(SLOTS, 2) for x, y in product(SLOTS[a], SLOTS[b])
    ]


def can_meet(pair: Pair) -> bool:
    """Whether some cell holds both: the entries may need a third one to meet (cross-attention needs its family)."""
    return _complete(dict(pair), random.Random(0), set()) is not None


def pairs(seed: int = 0) -> list[Cell]:
    """A short list of cells in which every two entries that can meet do meet (greedy, always the same list)."""
    rng = random.Random(seed)
    missing = {pair for pair in all_pairs() if refusal(dict(pair)) is None and can_meet(pair)}
    cells = []
    while missing:
        start = min(missing, key=sorted)
        tries = [_complete(dict(start), rng, missing) for _ in range(8)]
        best = max((t for t in tries if t is not None), key=lambda t: len(missing & _pairs_of(t)))
        cells.append(Cell(**best))
        missing -= _pairs_of(best)
    return cells


def _pairs_of(chosen: Mapping[str, str]) -> set[Pair]:
    return {frozenset(two) for two in combinations(chosen.items(), 2)}


def _complete(chosen: dict[str, str], rng: random.Random, missing: set[Pair]) -> dict[str, str] | None:
    """Choose the other slots one by one, each time the entry that meets most of what is missing; None if stuck."""
    if refusal(chosen) is not None:
        return None
    slots = [slot for slot in SLOTS if slot not in chosen]
    if not slots:
        return chosen
    slot = rng.choice(slots)
    entries = list(SLOTS[slot])
    rng.shuffle(entries)
    entries.sort(key=lambda e: -sum(frozenset([(slot, e), pair]) in missing for pair in chosen.items()))
    for entry in entries:
        done = _complete({**chosen, slot: entry}, rng, missing)
        if done is not None:
            return done
    return None
