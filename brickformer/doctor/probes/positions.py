"""The order of the tokens is known, and a table of sines is the table of sines.

    PE(t, 2i) = sin(t / 10000^(2i/D)),   PE(t, 2i+1) = cos(...)      (arXiv 1706.03762); halves [sin | cos] as good

Tokens that are all alike: without any position every output is alike, and so is every score of a query. Rotary
positions and biases move the scores only, so both are looked at.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.outputs import differ
from brickformer.doctor.report import Finding
from brickformer.doctor.trace import Heads


def _run(e: Exam) -> list[Finding]:
    return _batch_axis(e) or _formula(e) or _absent(e) or _relative(e)


def _same(e: Exam) -> Tensor:
    one = e.p.draw(1, 1)
    return one.expand(2, e.p.tokens, *one.shape[2:]).contiguous()


def _batch_axis(e: Exam) -> list[Finding]:
    """Two equal rows get two answers."""
    p = e.p
    src = p.source(1)
    out = p(_same(e), src=None if src is None else src.expand(2, -1).contiguous())
    if p.width or out.shape[0] != 2:
        return []
    moved = float(differ(out[:1], out[1:]).max())
    if moved <= p.allowed:
        return []
    alone = p(_same(e)[:1], src=src)
    if alone.shape != out[:1].shape or float(differ(out[:1], alone).max()) > p.allowed:
        return []  # the other row itself is seen
    turned = _same(e)
    turned[:1] = p.other(turned[:1], 0)
    other = p(turned, src=None if src is None else src.expand(2, -1).contiguous())
    if float(differ(out[1:], other[1:]).max()) > p.allowed:
        return []  # the other row is seen from the second
    two = None if src is None else src.expand(2, -1).contiguous()

    def run() -> Tensor:
        return p(_same(e), src=two)

    where = e.begins(run, run, lambda x, y: x.ndim == 3 and len(x) == 2 and bool((x[0] - x[1]).abs().max() > p.allowed))
    return [
        Finding(
            "positions",
            "error",
            where,
            f"two equal rows of one batch get answers that differ by {number(moved)}",
            "equal answers",
            "positions are counted over the batch: a part that wants (T, B, D) is given (B, T, D)",
            "give every part one layout (batch_first=True), or add table[:, :T]",
            explains=frozenset({"batch"}),
        )
    ]


def _absent(e: Exam) -> list[Finding]:
    p = e.p
    same = _same(e)
    if p.shape == "pooled" or p.tokens < 3:
        return _order_of_pooled(e) if p.shape == "pooled" else []
    src = p.source(2)
    out = p(same, src=src)
    spread = differ(out, out[:, :1].expand_as(out)).max()
    if float(spread) > p.allowed:
        return []
    trace = e.traced(p.model, same[:1])
    for h in trace.heads:
        if h.fused:
            scores = h.q.double() @ h.k.double().transpose(-1, -2) if h.q.shape[-3] == h.k.shape[-3] else None
            if h.fills or scores is None:
                return []  # a float mask: biases may be in it
        else:
            scores = h.scores
        if scores is None or sum(n == p.tokens for n in scores.shape) < 2:
            continue
        row = scores.detach().double().movedim(h.keys, -1)
        row = row.where(row > -1e4, row.amax(-1, keepdim=True))
        apart = (row.amax(-1) - row.amin(-1)).nan_to_num()
        size = row.where(row > -1e4, 0.0).abs().max()
        if float(apart.max()) > 1e-5 * max(1.0, float(size)):  # rotations are often float32
            return []
    if not trace.heads and not trace.closed and _swapped(e):
        return []  # no attention that could be watched
    table = _unused_table(p.model)
    return [
        Finding(
            "positions",
            "error" if table else "warning",
            table or (trace.heads[0].place if trace.heads else ""),
            f"a sequence of one repeated token gets the same output everywhere (spread {number(spread)})",
            "outputs or scores that depend on the place",
            f"the table {table} is not added, or one row of it is added everywhere"
            if table
            else "nothing tells the model the order of its tokens, or one row of the table is added everywhere",
            "x = tokens(ids) + table[:T], with a row for each position",
            confidence="likely",
        )
    ]


def _swapped(e: Exam) -> bool:
    """Whether the last output knows which of two other tokens came first."""
    p, src = e.p, e.p.source(2)
    turned = e.ids.clone()
    turned[:, [0, 1]] = e.ids[:, [1, 0]]
    return bool((differ(p(e.ids, src=src), p(turned, src=src))[:, -1] > p.allowed).any())


def _relative(e: Exam) -> list[Finding]:
    """Where equal tokens have equal values, only scores know the place: they may depend on the distance alone."""
    p = e.p
    if p.shape == "pooled" or p.tokens < 5:
        return []
    same = _same(e)[:1]
    h = next((h for h in e.traced(p.model, same).heads), None)
    if h is None or not _turned(e, h, same):
        return []
    if h.v is None or h.v.ndim != 4 or p.tokens not in h.v.shape[1:3]:
        return []
    axis = 1 if h.v.shape[1] == p.tokens else 2
    v = h.v.detach().transpose(0, axis).flatten(1)
    if float((v - v[:1]).abs().max()) > p.allowed:
        return []
    scores = h.q @ h.k.transpose(-1, -2) if h.fused and h.q.shape[1] == h.k.shape[1] else h.scores
    if scores is None or scores.shape[-2:] != (p.tokens, p.tokens):
        return []
    scores = scores.detach().double()
    scores = scores - scores.diagonal(dim1=-2, dim2=-1)[..., None]  # softmax does not see what a row has in common
    here, next_one = scores[..., 1:-1, 1:-1].tril(), scores[..., 2:, 2:].tril()
    off = float((here - next_one).abs().nan_to_num().max())
    size = float(scores.tril().abs().nan_to_num().max())
    if off <= 1e-4 * max(1.0, size):  # angles are often float32
        return []
    return [
        Finding(
            "positions",
            "error",
            h.place,
            f"scores of equal tokens at equal distances differ by {number(off)}",
            "q·k after rotation depends on the distance alone",
            "rotary: the two numbers of a pair are turned by two angles (neighbours and halves mixed), or q and k "
            "count differently",
            "angles [t0, t1, ..., t0, t1, ...] with halves, [t0, t0, t1, t1, ...] with neighbours",
            explains=frozenset({"cached"}),
        )
    ]


def _turned(e: Exam, h: Heads, same: Tensor) -> bool:
    """Whether q or k of equal tokens are moved by their place in a way that depends on the token: turned, not added.

    What is added to q and k alone (as in DETR), or to the scores, owes nothing to distances.
    """
    p = e.p
    changed = same
    for t in range(p.tokens):
        changed = p.other(changed, t)
    other = next(iter(e.traced(p.model, changed).heads), None)
    if other is None:
        return False
    for a, b in ((h.q, other.q), (h.k, other.k)):
        axes = [i for i in range(a.ndim - 1) if a.shape[i] == p.tokens]
        if a.shape != b.shape or len(axes) != 1:
            continue
        moved, again = (x.detach() - x.detach().narrow(axes[0], 0, 1) for x in (a, b))
        if float((moved - again).abs().max()) > 1e-6 * max(1.0, float(moved.abs().max())):
            return True
    return False


def _order_of_pooled(e: Exam) -> list[Finding]:
    """One answer a row: another order of the tokens must give another answer, where there is a table."""
    p = e.p
    table = _unused_table(p.model)
    if not table:
        return []
    moved = float(differ(p(e.ids), p(e.ids[:, torch.randperm(p.tokens)])).max())
    if moved > p.allowed:
        return []
    return [
        Finding(
            "positions",
            "error",
            table,
            "another order of the tokens gives the same answer",
            "another answer: there is a table of positions",
            f"the table {table} is not added",
            "x = tokens(ids) + table[:T]",
        )
    ]


_POSITION = re.compile(r"pos(?!t)|^w?pe$")


def _unused_table(model: nn.Module) -> str:
    """The path of a table of positions, by its name."""
    for path, module in model.named_modules():
        if _POSITION.search(path.lower().rsplit(".", 1)[-1]):
            return path
        for name in (*module._parameters, *module._buffers):
            if name.lower().startswith(("pos", "pe")) and "ids" not in name:
                return f"{path}.{name}".lstrip(".")
    return ""


def tables(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Fixed tables (L, D) that begin as sines do: sin 0 = 0 and cos 0 = 1 in the first row, neighbours or halves."""
    found = []
    for path, module in model.named_modules():
        values = {**{k: v for k, v in vars(module).items() if isinstance(v, Tensor)}, **module._buffers}
        values |= {k: v.detach() for k, v in module._parameters.items() if v is not None and not v.requires_grad}
        for name, x in values.items():
            if not isinstance(x, Tensor) or x.ndim < 2 or not (x.is_floating_point() or x.is_complex()):
                continue
            x = torch.cat([x.imag, x.real], -1) if x.is_complex() else x
            y = x.detach().double().squeeze()
            y = y[y.abs().sum(-1) > 0] if y.ndim == 2 else y  # the row of padding
            if y.ndim != 2 or y.shape[0] < 4 or y.shape[1] < 4 or y.shape[1] % 2 or float(y.abs().max()) > 1.0001:
                continue
            found.append((f"{path}.{name}".lstrip("."), y))
    return found


def _formula(e: Exam) -> list[Finding]:
    for path, table in tables(e.p.fresh):
        half = table.shape[1] // 2
        for sin, cos in ((table[:, 0::2], table[:, 1::2]), (table[:, :half], table[:, half:])):
            if bool((sin[0].abs() < 1e-6).all() and ((cos[0] - 1).abs() < 1e-6).all()):
                wrong = _wrong(sin, cos)
                if wrong:
                    return [_sines(path, *wrong)]
                break
    for place, x in e.trace.angles:  # made in forward
        step = x.detach().double().squeeze()
        step = step[1] - step[0] if step.ndim == 2 and len(step) == e.p.tokens else step[:0]
        if step.numel() >= 4 and float(step.abs().min()) > 0 and float((step - step[0]).abs().max()) < 1e-6:
            return [_sines(place, *_equal(len(step), float(step[0])))]
    return []


def _equal(n: int, angle: float) -> tuple[str, str]:
    return f"all {n} frequencies are {number(angle)}", "the exponent is 0 for every pair (integer division?)"


def _wrong(sin: Tensor, cos: Tensor) -> tuple[str, str] | None:
    off = float((sin.square() + cos.square() - 1).abs().max())
    if off > 1e-3:
        return (
            f"sin² + cos² of a pair is off 1 by {number(off)}",
            "the two columns of a pair have different frequencies: the exponent must be 2·(i // 2)/D for both",
        )
    angle = torch.atan2(sin[1], cos[1]).abs()
    n = len(angle)
    if n >= 4 and float(angle[0]) > 0 and float((angle - angle[0]).abs().max()) < 1e-6:
        return _equal(n, float(angle[0]))
    if n >= 4 and bool((angle > 0).all()):
        slope = -float((angle[n // 2].log() - angle[0].log()) / (n // 2)) * n
        if abs(slope - 2 * math.log(10000.0)) < 0.02 * slope:
            return (
                f"the frequencies fall by {math.exp(slope):.3g} over the table",
                "the exponent is doubled: 2·(2i)/D where 2i/D was meant",
            )
    return None


def _sines(path: str, measured: str, cause: str) -> Finding:
    return Finding(
        "positions",
        "error",
        path,
        measured,
        "sin and cos of one angle t / 10000^(2i/D) in each pair",
        cause,
        "angle = t[:, None] * torch.exp(-math.log(10000.0) * torch.arange(0, D, 2) / D); table[:, 0::2] = angle.sin(); "
        "table[:, 1::2] = angle.cos()",
    )


PROBE = Probe("positions", "the order of the tokens is known", _run)
