"""Padding changes nothing: [x] and [x, PAD, PAD] agree at x, on the source side and before the tokens as well.

Where a mask is an argument, what it hides may be anything. Nobody owes this who was never told what padding is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brickformer.doctor.exam import Exam, Probe, Where, number
from brickformer.doctor.forms import PADDING, SQUARE, says_keep
from brickformer.doctor.masks import hides
from brickformer.doctor.outputs import differ
from brickformer.doctor.report import Finding

_EXPLAINS = frozenset({"masked rows"})


def _source_pad(e: Exam) -> int | None:
    return e.p.source_pad if e.p.kind == "encoder_decoder" else e.p.pad


def _masks(e: Exam) -> list[str]:
    forms = e.p.forms
    return [n for n in forms if forms[n] not in SQUARE and e.p.signature.roles[n] in ("mask", "src_mask")]


def _why_not(e: Exam) -> str | None:
    p = e.p
    if _masks(e) or p.ours or (p.subject.call is not None and _listens(e)) or (p.mask_failed and p.kind != "decoder"):
        return None
    if p.width or _source_pad(e) is None:
        return "it was never told which id is padding (Subject(pad=...)) and takes no mask of it"
    if p.kind == "decoder":
        return "padding on the right is hidden by the causal mask"
    return None


def _run(e: Exam) -> list[Finding]:
    p = e.p
    masks = _masks(e)
    if p.subject.call is not None and not p.ours and _listens(e):
        return _by_content(e) or _longer(e)
    if p.ours or masks:
        found = _by_mask(e, masks)
        return found or _named(e, masks)
    return _by_id(e)


def _listens(e: Exam) -> bool:
    """Whether the user's own call does something with valid."""
    ids, src = e.p.draw(2), e.p.source(2)
    base = ids if src is None else src
    valid = torch.ones(base.shape[:2], dtype=torch.bool)
    valid[:, -2:] = False
    a, b = _outs(e, ids, src, None), _outs(e, ids, src, valid)
    return a.shape == b.shape and float(differ(a, b).max()) > e.p.allowed


def _outs(e: Exam, ids: Tensor, src: Tensor | None, valid: Tensor | None) -> Tensor:
    if e.p.kind == "encoder_decoder":
        return e.p(ids, src=src, src_valid=valid)
    return e.p(ids, valid=valid)


def _by_mask(e: Exam, masks: list[str]) -> list[Finding]:
    p = e.p
    if p.mask_failed is None and (p.ours or all(_hides(e, n) for n in masks)):
        return (_by_content(e) if p.ours else []) or _longer(e)
    name = p.mask_failed or masks[0]
    return _by_content(e, name) or [
        _finding(e, f"no form of {name} hides padding and shows the rest", f"the argument {name}", name)
    ]


def _longer(e: Exam) -> list[Finding]:
    """[x] and [x, hidden, hidden] agree at x: what is hidden may not even count."""
    p = e.p
    if p.kind == "decoder" or p.subject.allowed is not None:  # a table gives each place its part
        return []
    ids, src = p.draw(2), p.source(2)
    base = ids if src is None else src
    valid = torch.ones(base.shape[:2], dtype=torch.bool)
    valid[:, -2:] = False
    pad = _source_pad(e)
    if pad is not None and not p.width:
        base = base.clone()
        base[:, -2:] = pad
    try:
        if src is None:
            a, b = p(base[:, :-2]), p(base, valid=valid)
        else:
            a, b = p(ids, src=base[:, :-2]), p(ids, src=base, src_valid=valid)
    except Exception:
        return []  # of one length only
    moved = float(differ(a, b[:, : a.shape[1]]).max())
    if moved <= p.allowed:
        return []
    runs: list[Any] = [lambda: p(base[:, :-2]), lambda: p(base, valid=valid)]
    if src is not None:
        runs = [lambda: p(ids, src=base[:, :-2]), lambda: p(ids, src=base, src_valid=valid)]
    where = e.begins(runs[0], runs[1], _moved(e), _shortened)
    return [_finding(e, f"two hidden tokens at the end moved the output by {number(moved)}", where, "")]


def _hides(e: Exam, name: str) -> bool:
    try:
        return hides(e.p, name)
    except Exception:
        return False


def _by_content(e: Exam, name: str = "valid") -> list[Finding]:
    """What is hidden is replaced: nothing may move."""
    p = e.p
    ids, src = p.draw(2), p.source(2)
    both = src is not None
    base = src if src is not None else ids
    n = base.shape[1]
    valid = torch.ones(2, n, dtype=torch.bool)
    hidden = (1, 2) if p.kind == "decoder" else (n - 2, n - 1)
    valid[:, list(hidden)] = False
    if p.shape == "pooled" and p.pad is not None and not p.width:
        return []
    junk = base
    for t in hidden:
        junk = p.other(junk, t, "src" if both else "tgt")
    a, b = (_outs(e, ids if both else x, x if both else None, valid) for x in (base, junk))
    moved = differ(a, b)
    if not both and p.shape != "pooled":
        moved = moved[:, 3:] if p.kind == "decoder" else moved[:, : n - 2]
    if float(moved.max()) <= p.allowed:
        return []

    def wrong(x: Tensor, y: Tensor) -> bool:
        x, y = (x.transpose(0, 1), y.transpose(0, 1)) if p.seq_first and x.ndim == 3 else (x, y)
        if x.ndim != 3 or x.shape[1] not in (n, p.tokens):
            return False
        away = differ(x, y) > p.allowed
        if x.shape[1] != n:  # the side of the target
            return bool(away.any())
        return bool((away[:, 3:] if p.kind == "decoder" else away[:, : n - 2]).any())

    runs = [lambda x=x: _outs(e, ids if both else x, x if both else None, valid) for x in (base, junk)]
    where = e.begins(runs[0], runs[1], wrong)
    return [
        _finding(e, f"what {name} hides moved the output by {number(moved.max())} when it was replaced", where, name)
    ]


def _named(e: Exam, masks: list[str]) -> list[Finding]:
    """The form that works is not the one that the name promises."""
    for name in masks:
        says, form = says_keep(name), e.p.forms[name]
        if says is not None and says != form.keeps:
            want = "1 at real tokens" if says else "True at padding"
            e.p.forms[name] = PADDING[2] if says else PADDING[1]
            try:
                promised = _by_content(e, name)
            finally:
                e.p.forms[name] = form
            return [
                Finding(
                    "padding",
                    "error",
                    promised[0].where if promised else "",
                    f"{name} hides padding only as {form.name}",
                    f"{name} with {want}, as everywhere under that name",
                    "the polarity of the mask is flipped: real tokens are hidden and padding is seen",
                    "invert the mask once where it enters, or rename the argument",
                )
            ]
    return []


def _by_id(e: Exam) -> list[Finding]:
    p = e.p
    pad = _source_pad(e)
    assert pad is not None
    ids, src = p.draw(2), p.source(2)
    base = ids if src is None else src
    tail = torch.full((len(base), 2), pad)
    longer = torch.cat([base[:, :-2], tail], 1)
    shorter = base[:, :-2]
    try:
        a, b = (_outs(e, ids if src is not None else x, None if src is None else x, None) for x in (shorter, longer))
        n = a.shape[1]
        moved = differ(a, b[:, :n])
        how = f"two paddings (id {pad}) after the {'source' if src is not None else 'tokens'} moved the output by"
    except Exception:  # a model of one length: another id under the same mask is not to be had
        return []
    if float(moved.max()) <= p.allowed:
        return []
    runs = [
        lambda x=x: _outs(e, ids if src is not None else x, None if src is None else x, None) for x in (shorter, longer)
    ]
    where = e.begins(runs[0], runs[1], _moved(e), _shortened)
    return [_finding(e, f"{how} {number(moved.max())}", where, "")]


def _moved(e: Exam) -> Where:
    return lambda x, y: x.ndim == 3 and bool((differ(x, y) > e.p.allowed).any())


def _shortened(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that both runs have."""
    for axis in (1, 0):
        if x.ndim == y.ndim == 3 and y.shape[axis] == x.shape[axis] + 2:
            return x, y.narrow(axis, 0, x.shape[axis])
    return x, y


def _finding(e: Exam, measured: str, where: str, name: str) -> Finding:
    fills = [f for h in e.trace.heads for f in h.fills if h.masked]
    if fills and max(fills) > -50:
        cause, fix = f"masked scores become {max(fills):g}", "fill with float('-inf')"
    elif name and e.p.mask_failed:
        cause = f"{name} is not used in every layer, or turned into the wrong shape or polarity"
        fix = "hide keys: scores.masked_fill(padding[:, None, None, :], float('-inf'))"
    else:
        cause = "no mask of the padding reaches the scores, or it is upside down"
        fix = "hide keys: scores.masked_fill((ids == pad)[:, None, None, :], float('-inf')), in pooling as well"
    return Finding(
        "padding",
        "error",
        where,
        measured,
        "0 at every real token",
        cause,
        fix,
        "(model(x) - model(x_padded)[:, :x.shape[1]]).abs().max()  # must be 0",
        "likely",
        explains=_EXPLAINS,
    )


PROBE = Probe("padding", "padding changes no real token", _run, _why_not)
