"""The assembled model as a drawing: `brick show SPEC --svg FILE`. Bricks are boxes, shapes stand on the arrows.

From top to bottom: ids, embedding, layers, head. Layers that are alike are drawn once, in a frame that says how often;
a pattern of different ones is drawn once as a whole. The line that passes a box by is the residual; norms stand where
they act. An encoder stands on the left, and its memory goes over to where cross-attention reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

from torch import nn

from brickformer.embed import Embedding
from brickformer.feedforward import FeedForward
from brickformer.layers import Layer, Residual, Stack, StackLayer
from brickformer.look.amounts import amount, cut
from brickformer.look.label import labelled
from brickformer.look.tree import describe
from brickformer.mixers.cross import CrossAttention
from brickformer.models import AnyModel, DecoderModel, EncoderDecoderModel, EncoderModel

WIDTH: Final = 330  # of a box
COLUMN: Final = 400
BOX, SMALL, GAP, NAMED_GAP = 48, 26, 16, 34  # heights

_STYLE: Final = """
  .paper { fill: #fbfaf8; } .box { fill: #ffffff; stroke: #cfcac1; } .mixer { fill: #e6eef7; stroke: #1f5fa8; }
  .norm { fill: #f2f0ec; stroke: none; } .frame { fill: none; stroke: #b9b3a8; stroke-dasharray: 5 4; }
  .line { fill: none; stroke: #666d76; stroke-width: 1.3; }
  .residual { fill: none; stroke: #b9b3a8; stroke-width: 1.3; }
  .memory { fill: none; stroke: #1f5fa8; stroke-width: 1.6; } .plus { fill: #ffffff; stroke: #666d76; }
  text { font: 13px ui-sans-serif, system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #22262b; }
  .name { font-weight: 600; } .quiet { fill: #666d76; font-size: 12px; }
  .head { fill: #666d76; } .blue { fill: #1f5fa8; }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #15181c; } .box { fill: #1c2025; stroke: #454d56; } .mixer { fill: #1d2b3b; stroke: #7fb2ea; }
    .norm { fill: #23282e; } .frame { stroke: #59616b; } .line { stroke: #98a1ab; } .residual { stroke: #59616b; }
    .memory { stroke: #7fb2ea; } .plus { fill: #1c2025; stroke: #98a1ab; } .head { fill: #98a1ab; }
    text { fill: #e6e8ea; } .quiet { fill: #98a1ab; } .blue { fill: #7fb2ea; }
  }
"""


@dataclass
class Drawing:
    """Elements so far, and how far down they reach."""

    parts: list[str] = field(default_factory=list)
    bottom: float = 0.0

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """A line of text."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str, radius: int = 7) -> None:
        """A box."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" class="{kind}"/>'
        )
        self.bottom = max(self.bottom, y + height)

    def path(self, d: str, kind: str = "line", *, arrow: bool = False) -> None:
        """A line."""
        end = ' marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'<path d="{d}" class="{kind}"{end}/>')


@dataclass
class Group:
    """Layers drawn once. inside: numbers of layers, or groups."""

    times: int
    inside: list[int | Group]

    def first(self) -> int:
        """The number of its first layer."""
        one = self.inside[0]
        return one if isinstance(one, int) else one.first()


def groups(layers: tuple[Layer, ...]) -> list[Group]:
    """Runs of equal neighbours; a repeated pattern of them as one group."""
    count = len(layers)
    period = next(p for p in range(1, count + 1) if count % p == 0 and layers[:p] * (count // p) == layers)
    if 1 < period < count:
        return [Group(count // period, list(_runs(layers[:period])))]
    return _runs(layers)


def _runs(layers: Sequence[Layer]) -> list[Group]:
    out: list[Group] = []
    for i, layer in enumerate(layers):
        if out and layers[out[-1].first()] == layer:
            out[-1].times += 1
        else:
            out.append(Group(1, [i]))
    return out


def diagram(model: AnyModel, title: str) -> str:
    """The SVG file of a model (one without numbers will do, `shapes_of`)."""
    d = Drawing()
    width = COLUMN + 40.0
    match model:
        case EncoderDecoderModel():
            width = 2 * COLUMN + 120
            e, t = model.encoder, model.decoder
            d.text(220, 66, "encoder", "head")
            d.text(COLUMN + 300, 66, "decoder", "head")
            end, _ = _column(d, 220, 84, e, "S", "source ids", ends=False)
            _, reads = _column(d, COLUMN + 300, 84, t, "T", "target ids")
            x = COLUMN + 62
            for y, left in reads:
                d.path(f"M220,{end} V{end + 22} H{x} V{y} H{left}", "memory", arrow=True)
            d.text(228, end + 40, f"memory B × S × {t.spec.dim}", "quiet blue", "start")
            d.text(228, end + 57, "read by cross-attention", "quiet blue", "start")
            d.bottom = max(d.bottom, end + 67)
        case DecoderModel() | EncoderModel():
            _column(d, 220, 66, model, "T", "ids")
    size = sum(p.numel() for p in model.parameters())
    d.text(24, 34, f"{cut(title, 60)} · {amount(size)} parameters", "name", "start")
    height = d.bottom + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n<defs><marker '
        'id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path '
        f'd="M0,0 L8,4 L0,8 z" class="tip" fill="#666d76"/></marker></defs>\n'
        f'<rect width="{width:g}" height="{height:g}" class="paper"/>\n' + "\n".join(d.parts) + "\n</svg>\n"
    )


def _column(
    d: Drawing, x: float, y: float, model: DecoderModel | EncoderModel, letter: str, ids: str, *, ends: bool = True
) -> tuple[float, list[tuple[float, float]]]:
    """One sequence from its ids down. Returns where it ends and where cross-attention reads: (y, left side of it)."""
    embed, stack, head, specs = model.embed, model.stack, model.head, model.spec.layers
    dim, reads = model.spec.dim, list[tuple[float, float]]()
    stream = f"B × {letter} × {dim}"
    d.text(x, y + 4, ids, "quiet")
    y = _arrow(d, x, y + 10, f"B × {letter}")
    y = _box(d, x, y, "embedding", f"{describe(embed.tokens)}{_position(embed)}", embed)
    y = _arrow(d, x, y, stream)
    frames = groups(specs)
    if stack.loops > 1 and len(frames) > 1:  # all of them go round together
        frames = [Group(1, list(frames))]
    for i, group in enumerate(frames):
        y = _group(d, x, y, group, stack, specs, reads, stack.loops, depth=0)
        if i < len(frames) - 1 or not _is_nothing(stack.norm):
            y = _arrow(d, x, y)
    if not _is_nothing(stack.norm):
        y = _norm(d, x, y, stack.norm)
    if head is None or not ends:
        return y, reads
    y = _arrow(d, x, y, stream)
    tied = head.project.weight is embed.tokens.weight
    y = _box(
        d, x, y, "head", describe(head.project) + (", tied to the embedding" if tied else ""), None if tied else head
    )
    y = _arrow(d, x, y, f"B × {letter} × {head.project.out_features}")
    d.text(x, y + 14, "logits", "quiet")
    d.bottom = max(d.bottom, y + 16)
    return y, reads


def _group(
    d: Drawing,
    x: float,
    y: float,
    group: Group,
    stack: Stack,
    specs: Sequence[Layer],
    reads: list[tuple[float, float]],
    loops: int,
    depth: int,
) -> float:
    """A frame with what is inside; none around a single layer that stands alone."""
    top, place = y, len(d.parts)
    nested = any(isinstance(inside, Group) for inside in group.inside)
    y += 28 if nested or group.times > 1 or loops > 1 else 14
    d.path(f"M{x},{top} V{y}")
    for i, inside in enumerate(group.inside):
        if i:
            y = _arrow(d, x, y)
        if isinstance(inside, int):
            layer = stack.layers[inside]
            assert isinstance(layer, StackLayer)
            y = _layer(d, x, y, layer, specs[inside], reads)
        else:
            y = _group(d, x, y, inside, stack, specs, reads, 1, depth + 1)
    y += 12
    half = WIDTH / 2 + 46 - 10 * depth
    d.rect(x - half, top, 2 * half, y - top, "frame", 12)
    frame = d.parts.pop()
    d.parts.insert(place, frame)
    times = f"× {group.times}" + (f", {loops} rounds" if loops > 1 else "")
    if group.times > 1 or loops > 1:
        d.text(x + half - 10, top + 17, times if group.times > 1 else f"{loops} rounds", "name", "end")
    return y


def _layer(d: Drawing, x: float, y: float, layer: StackLayer, spec: Layer, reads: list[tuple[float, float]]) -> float:
    """Its branches, each with its residual."""
    branches = layer.branches()
    if spec.arrange != "serial":
        return _beside(d, x, y, branches, spec)
    for around, brick in branches:
        begin = y
        y = _arrow(d, x, y)
        y = _norms(d, x, y, around.into)
        middle = y + BOX / 2
        y = _brick(d, x, y, brick, spec)
        if isinstance(brick, CrossAttention):
            reads.append((middle, x - WIDTH / 2))
        y = _norms(d, x, y, around.out, before=False)
        y = _plus(d, x, y, begin, around)
        y = _norms(d, x, y, around.after, before=False)
    return y


def _beside(d: Drawing, x: float, y: float, branches: list[tuple[Residual, nn.Module]], spec: Layer) -> float:
    """Mixer and feed-forward side by side."""
    begin, half = y, WIDTH / 2 - 5
    y = _arrow(d, x, y)
    shared = branches[0][0] is branches[1][0]
    if shared:
        y = _norms(d, x, y, branches[0][0].into)
    low = y
    for side, (around, brick) in zip((-1, 1), branches, strict=True):
        at, here = x + side * (WIDTH / 4 + 2.5), y
        if not shared:
            here = _norms(d, at, here, around.into, width=half)
        low = max(low, _brick(d, at, here, brick, spec, width=half))
    return _plus(d, x, low, begin, branches[0][0])


def _brick(d: Drawing, x: float, y: float, brick: nn.Module, spec: Layer, width: float = WIDTH) -> float:
    if isinstance(brick, CrossAttention):
        return _box(d, x, y, "cross-attention", describe(brick), brick, "mixer", width)
    feeds = isinstance(brick, FeedForward)
    kind, said = labelled(brick, spec.ffn.kind if feeds and spec.ffn else spec.mixer.kind, feeds=feeds)
    return _box(d, x, y, kind, said, brick, "box" if feeds else "mixer", width)


def _norms(d: Drawing, x: float, y: float, norm: nn.Module, *, before: bool = True, width: float = WIDTH) -> float:
    """A norm, and the arrow to what comes next (or from what came before); nothing where there is none."""
    if _is_nothing(norm):
        return y
    if before:
        return _arrow(d, x, _norm(d, x, y, norm, width))
    return _norm(d, x, _arrow(d, x, y), norm, width)


def _norm(d: Drawing, x: float, y: float, norm: nn.Module, width: float = WIDTH) -> float:
    d.rect(x - width / 2, y, width, SMALL, "norm")
    parts = [m for m in norm if not _is_nothing(m)] if isinstance(norm, nn.Sequential) else [norm]
    said = ", ".join(describe(m) or type(m).__name__ for m in parts)
    d.text(x, y + 17, said, "quiet")
    return y + SMALL


def _box(
    d: Drawing,
    x: float,
    y: float,
    name: str,
    said: str,
    brick: nn.Module | None,
    tone: str = "box",
    width: float = WIDTH,
) -> float:
    size = sum(p.numel() for p in brick.parameters()) if brick is not None else 0
    d.rect(x - width / 2, y, width, BOX, tone)
    d.text(x, y + 20, f"{name} · {amount(size)}" if size else name, "name")
    d.text(x, y + 37, cut(said, int(width / 6.4)), "quiet")
    return y + BOX


def _plus(d: Drawing, x: float, y: float, begin: float, around: Residual) -> float:
    """The sum, and the line that passed the branch by."""
    y = _arrow(d, x, y)
    side = x - WIDTH / 2 - 20
    d.path(f"M{x},{begin + 2} H{side} V{y + 8} H{x - 9}", "residual", arrow=True)
    d.parts.append(f'<circle cx="{x:g}" cy="{y + 8:g}" r="8" class="plus"/>')
    d.path(f"M{x - 4},{y + 8} H{x + 4} M{x},{y + 4} V{y + 12}")
    if around.skip != 1.0:
        d.text(side + 6, y + 4, f"× {around.skip:.3g}", "quiet", "start")
    return y + 16


def _arrow(d: Drawing, x: float, y: float, shape: str = "") -> float:
    height = NAMED_GAP if shape else GAP
    d.path(f"M{x},{y} V{y + height}", arrow=True)
    if shape:
        d.text(x + 10, y + height / 2 + 4, shape, "quiet", "start")
    return y + height


def _position(embed: Embedding) -> str:
    table = embed.position
    return "" if table is None else f" + {describe(table) or type(table).__name__}"


def _is_nothing(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity)
