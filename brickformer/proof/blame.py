"""Whose fault it is: when the whole breaks a property, its parts are tried alone until one of them breaks it too.

    every layer in a stack of one -> each of its bricks among bricks known to be good -> what is inside that brick

What breaks only together with others is blamed on the smallest part that still breaks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from brickformer.embed import Head
from brickformer.feedforward import MLP
from brickformer.layers import Layer
from brickformer.mask import Mask
from brickformer.mixers.attention import Attention
from brickformer.models import Decoder, Encoder, EncoderDecoder, ModelSpec
from brickformer.proof.properties import Property
from brickformer.proof.subject import Subject
from brickformer.proof.twin import VOCAB, Twin, sides
from brickformer.spec import Spec, fields_of

SLOTS: Final = ("mixer", "ffn", "cross", "norm")


@dataclass(frozen=True)
class Found:
    """where: the path of a brick in the model, "" for the whole. kind: what it is. message: what broke there."""

    where: str
    kind: str
    message: str


def broken(prop: Property, spec: ModelSpec, tokens: int) -> str | None:
    """What breaks a property in a model; None where it holds or is not owed."""
    try:
        subject = Subject(spec, tokens)
        if prop.why_not(subject) is None:
            prop.run(subject)
    except Exception as e:
        return said(e)
    return None


def said(e: Exception) -> str:
    """A failure in one line: its text, and what it is unless we raised it."""
    text = " ".join(str(e).split())
    return text if isinstance(e, AssertionError) and text else f"{type(e).__name__}: {text}"


def blame(prop: Property, twin: Twin, message: str) -> Found:
    """The smallest part of the twin that breaks the property as well. message: what the whole says."""
    names = iter(twin.layers)
    for side_path, side in sides(twin.spec).items():
        for layer in side.layers:
            found = _in_layer(Trial(prop, twin, side_path), next(names), layer)
            if found is not None:
                return found
    for side_path, side in sides(twin.spec).items():
        trial = Trial(prop, twin, side_path)
        for field, part in (("embed", side.embed), ("head", side.head)):
            at_ends = trial.tried(trial.neutral(), **{field: part}) if part is not None else None
            if part is not None and at_ends is not None:
                return Found(f"{side_path}{field}", part.kind, at_ends)
    return Found("", twin.spec.kind, message)


@dataclass(frozen=True)
class Trial:
    """A property, and a side of a twin on which parts of it are tried alone."""

    prop: Property
    twin: Twin
    path: str

    def tried(self, layer: Layer, **ends: Any) -> str | None:
        """What breaks in a model of this one layer."""
        try:
            return broken(self.prop, self.model(layer, **ends), self.twin.tokens)
        except Exception:  # such a model is refused: nothing is known of it
            return None

    def model(self, layer: Layer, **ends: Any) -> ModelSpec:
        """The least model with this layer."""
        side = sides(self.twin.spec)[self.path]
        match side:
            case Encoder():
                return Encoder(VOCAB, side.dim, (layer,), **{"head": Head(), "one_way": True, **ends})
            case Decoder():
                decoder = Decoder(VOCAB, side.dim, (layer,), **ends)
        if layer.cross is None:
            return decoder
        source = Layer(Attention(1, mask=Mask(causal=False)), MLP(8))
        return EncoderDecoder(Encoder(VOCAB, side.dim, (source,)), decoder)

    def neutral(self) -> Layer:
        """A layer of bricks that are known to be good."""
        causal = isinstance(sides(self.twin.spec)[self.path], Decoder)
        return Layer(Attention(1, mask=Mask(causal=causal)), MLP(8))


def _in_layer(trial: Trial, name: str, layer: Layer) -> Found | None:
    whole = trial.tried(layer)
    if whole is None:
        return None
    neutral = trial.neutral()
    for slot in SLOTS:
        brick = getattr(layer, slot)
        if brick is None:
            continue
        kept: dict[str, Any] = {slot: brick}
        if slot == "norm":
            kept |= {"place": layer.place}
        message = trial.tried(dataclasses.replace(neutral, **kept))
        if message is not None:
            return _inside(trial, Found(f"{name}.{slot}", brick.kind, message), slot, brick)
    return Found(name, layer.kind, whole)


def _inside(trial: Trial, found: Found, slot: str, brick: Spec) -> Found:
    """A brick that holds others may only pass on what one of them does."""
    neutral = trial.neutral()
    for field, part, allowed in _parts(brick):
        here = f"{found.where}.{field}"
        if type(part).__mro__[1] is type(brick).__mro__[1]:  # of the same slot: it can stand there itself
            message = trial.tried(_with(neutral, slot, part))
            if message is not None:
                return _inside(trial, Found(here, part.kind, message), slot, part)
        elif allowed and trial.tried(_with(neutral, slot, _without(brick, field))) is None:
            return Found(here, part.kind, found.message)
    return found


def _with(layer: Layer, slot: str, brick: Spec) -> Layer:
    changes: dict[str, Any] = {slot: brick}
    return dataclasses.replace(layer, **changes)


def _parts(brick: Spec) -> Iterator[tuple[str, Spec, bool]]:
    """Fields that hold a brick: name, brick, whether it may be left out."""
    for name, hint in fields_of(type(brick)).items():
        part = getattr(brick, name)
        if isinstance(part, Spec):
            yield name, part, "None" in str(hint)


def _without(brick: Spec, field: str) -> Spec:
    return dataclasses.replace(brick, **{field: None})  # type: ignore[type-var]
