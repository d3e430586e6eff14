"""A view: everything the page, the picture and the table show of one text. `attention(model, ids)` makes one.

What is not shown is said: `left_out` has a sentence for each thing that was too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from brickformer.errors import DataError
from brickformer.look.ablate import REMOVALS, contributions, passes
from brickformer.look.lens import Layer, lens
from brickformer.look.maps import MOST, Map, left_out, picked
from brickformer.look.stats import dead
from brickformer.look.watch import Watch
from brickformer.mask import Span
from brickformer.models import AnyModel, DecoderModel, EncoderDecoderModel, EncoderModel

ROOM: Final = 2_600_000
"""Numbers of maps on a page: below 5 MB in all."""


@dataclass(frozen=True, slots=True)
class Step:
    """A token that was written. top: the most probable then. length, nbytes: of the cache after it was chosen."""

    token: int
    p: float
    top: list[tuple[int, float]]
    length: int
    nbytes: int
    slots: int


@dataclass(slots=True)
class View:
    """labels, source: texts of the tokens. written: the first position that was written and not given.

    left_out: (English, Chinese) sentences. dead: (map, head) whose removal changes nothing; see stats.py.
    """

    title: str
    maps: list[Map]
    labels: list[str]
    source: list[str] = field(default_factory=list)
    written: int | None = None
    steps: list[Step] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    layers_from: int = 0
    left_out: list[tuple[str, str]] = field(default_factory=list)
    dead: list[tuple[int, int]] = field(default_factory=list)
    logits: bool = True
    foreign: bool = False
    name: Callable[[int], str] = str

    def measured(self, removed: dict[str, list[float]]) -> None:
        """Note what happened when heads were removed."""
        for m in self.maps:
            values = removed.get(m.name, [math.nan] * m.heads)
            m.stats = [replace(s, removed=v) for s, v in zip(m.stats, values, strict=True)]
        flat = [(i, h, s.removed) for i, m in enumerate(self.maps) for h, s in enumerate(m.stats)]
        self.dead = [flat[j][:2] for j in dead(v for *_, v in flat)]

    def marked(self) -> tuple[list[tuple[int, int]], bool]:
        """(heads that are marked, whether these are the dead ones): the others, where most are dead."""
        known = [(i, h) for i, m in enumerate(self.maps) for h, s in enumerate(m.stats) if not math.isnan(s.removed)]
        many = 2 * len(self.dead) > len(known)
        return ([place for place in known if place not in self.dead] if many else self.dead), not many


def attention(
    model: AnyModel,
    ids: Sequence[int],
    *,
    source: Sequence[int] | None = None,
    written: int | None = None,
    name: Callable[[int], str] = str,
    source_name: Callable[[int], str] | None = None,
    rows: tuple[int, int] | None = None,
    only: Sequence[str] = (),
    remove: bool = True,
    title: str = "",
) -> View:
    """What `model` looks at while it reads ids (and, an encoder-decoder, a source).

    written: from which position on tokens were the model's own. name, source_name: the text of an id. rows: positions
    shown, half open; default: the last ones that there is room for. only: paths of the modules looked at. remove:
    measure what each head contributes. Errors: BrickError: too long for the model, no attention, rows out of range.
    """
    ids, given = list(ids), None if source is None else list(source)
    if not ids or given == []:
        raise DataError("look: got no tokens, expected at least one to look at.")
    device = next(model.parameters()).device
    call = _caller(model, ids, given, device)
    left: list[tuple[str, str]] = []
    pick = picked(len(ids), len(given or ()), rows, only, left)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            with Watch(model, pick, tokens=ids, source=given) as seen:
                call()
            maps = fitting(seen.maps(), left)
            logits = not isinstance(model, EncoderModel) or model.head is not None
            view = View(title, maps, [name(i) for i in ids], written=written, left_out=left, logits=logits, name=name)
            view.source = [] if given is None else [(source_name or name)(i) for i in given]
            if logits:
                part = pick.rows or (0, len(ids))
                view.layers, view.layers_from = lens(model, call, part), part[0]
            if remove and passes(model, maps) <= REMOVALS and len(ids) <= MOST:
                view.measured(contributions(model, maps, call, logits=logits))
            elif remove:
                heads = sum(m.heads for m in maps)
                left.append(
                    left_out(
                        f"what {heads} heads contribute when removed", f"{heads} 个头各自移除后的影响（计算量过大）"
                    )
                )
    finally:
        model.train(training)
    return view


def replay(
    model: DecoderModel | EncoderDecoderModel, given: list[int], answer: list[int], memory_of: list[int] | None
) -> list[Step]:
    """How an answer was written: what was probable at each step, and the cache as it grew. One cached pass."""
    device = next(model.parameters()).device
    decoder = model.decoder if isinstance(model, EncoderDecoderModel) else model
    steps: list[Step] = []
    with torch.inference_mode():
        memory = None
        if isinstance(model, EncoderDecoderModel):
            memory = model.encode(torch.tensor([memory_of], device=device))
        slots = len(given) + len(answer)
        state = decoder.init_state(1, slots)
        feed = given
        for token in answer:
            h = decoder.hidden(torch.tensor([feed], device=device), None, state, memory)
            p = decoder.logits(h[:, -1:])[0, 0].float().softmax(-1)
            top = p.topk(min(5, len(p)))
            best = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            steps.append(Step(token, float(p[token]), best, state.length, state.nbytes, slots))
            feed = [token]
    return steps


def _caller(model: AnyModel, ids: list[int], source: list[int] | None, device: torch.device) -> Callable[[], Tensor]:
    x = torch.tensor([ids], device=device)
    match model:
        case EncoderDecoderModel():
            if source is None:
                raise DataError("look: an encoder-decoder reads a source; got none. Give source=[...].")
            src = torch.tensor([source], device=device)
            return lambda: model(src, x)
        case DecoderModel():
            return lambda: model(x, Span(0, len(ids)))
        case EncoderModel():
            return lambda: model(x) if model.head is None else model.logits(model(x))


def fitting(maps: list[Map], left: list[tuple[str, str]]) -> list[Map]:
    """Maps that one page has room for: first fewer tokens (the last ones), then fewer layers; what goes is noted."""
    most = MOST
    while most > 48 and _numbers(maps, most) > ROOM:
        most = most * 7 // 8
    if any(len(m.rows) > most or len(m.keys) > most for m in maps):
        left.append(left_out(f"all but {most} tokens of each map", f"每张图只保留 {most} 个词元"))
        maps = [_trimmed(m, most) for m in maps]
    kept: list[Map] = []
    for m in maps:
        if _numbers([*kept, m], most) > ROOM:
            left.append(
                left_out(
                    f"{len(maps) - len(kept)} of {len(maps)} layers", f"{len(maps)} 层中的 {len(maps) - len(kept)} 层"
                )
            )
            break
        kept.append(m)
    return kept


def _numbers(maps: list[Map], most: int) -> int:
    return sum(m.heads * min(len(m.rows), most) * min(len(m.keys), most) for m in maps)


def _trimmed(m: Map, most: int) -> Map:
    """The last rows; of self-attention the last keys, of cross-attention the first."""
    t = max(0, len(m.rows) - most)
    s = 0 if m.kind == "cross" else max(0, len(m.keys) - most)
    return replace(m, weights=m.weights[:, t:, s : s + most], rows=m.rows[t:], keys=m.keys[s : s + most])
