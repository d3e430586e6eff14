"""Limits: what a model cannot be combined with, found by trying.

Every choice that its bricks offer (a flag, a name out of a few, nothing instead of something) is tried in their place;
what is refused is told with the reason. So are the uses of a model that its states refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import torch

from brickformer.embed import Embed
from brickformer.errors import BrickError
from brickformer.mask import Span
from brickformer.proof.subject import Subject
from brickformer.proof.twin import Twin, sides
from brickformer.spec import Spec, fields_of


def limits_of(twin: Twin) -> list[str]:
    """Sentences: ``layers.0.arrange = parallel: ...``."""
    found: dict[str, str] = {}
    names = iter(twin.layers)
    for path, side in sides(twin.spec).items():
        for i, layer in enumerate(side.layers):
            name = next(names)
            for inside, value in _choices(layer, ""):
                why = _refused(twin, f"{path}layers.{i}.{inside}", value)
                if why is not None:
                    found.setdefault(why, f"{name}.{inside} = {_plain(value)}: {why}")
    return [*found.values(), *_uses(twin)]


def _choices(spec: Spec, path: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of every choice that is not the one taken."""
    for name, hint in fields_of(type(spec)).items():
        here, now = f"{path}{name}", getattr(spec, name)
        options = [True, False] if hint is bool else list(get_args(hint)) if get_origin(hint) is Literal else []
        yield from ((here, value) for value in options if value != now)
        if isinstance(now, Spec):
            yield from _choices(now, f"{here}.")


def _refused(twin: Twin, path: str, value: Any) -> str | None:
    try:
        twin.spec.but(**{path: value}).build()
    except BrickError as e:
        text = str(e)
        for _ in range(8):  # the places are those of the twin; the reason is the same in the model
            head, colon, rest = text.partition(": ")
            if not colon or " " in head or "got" in head:
                break
            text = rest
        return text
    except Exception:  # a brick of somebody's own that does not say why
        return None
    return None


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _uses(twin: Twin) -> Iterator[str]:
    """What cannot be done with the model."""
    for path, side in sides(twin.whole).items():
        limit = _limit(side.embed)
        if limit is not None:
            yield f"longer input: {path}embed knows {limit:,} positions"
    subject = Subject(twin.spec, twin.tokens)
    if not subject.decodes:
        yield "generation: it sees the future, so there is no state to go on from"
        return
    half = max(1, twin.tokens // 2)
    ids = subject.ids(1)
    with torch.no_grad():
        state = subject.empty(1)
        subject.say(ids[:, :half], state=state)
        if half > 1:
            try:
                state.rewind(half - 1)
            except BrickError as e:
                yield f"speculative decoding: {e}"
        try:
            at = Span.of(ids[:, :half], doc=torch.zeros_like(ids[:, :half]))
            subject.say(ids[:, :half], at, subject.empty(1))
        except BrickError as e:
            yield f"packed documents with a state: {e}"


def _limit(embed: Embed) -> int | None:
    limits = [embed.position.limit() if embed.position is not None else None]
    if embed.randomized is not None:
        limits.append((embed.randomized.range - 1) // embed.randomized.stride + 1)
    known = [limit for limit in limits if limit is not None]
    return min(known, default=None)
