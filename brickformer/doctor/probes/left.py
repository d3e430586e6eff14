"""Padding on the left, as prompts of several lengths are padded: real tokens stay finite and keep their answer.

    f([PAD, PAD, x])[2:] == f([x]);   decode([PAD, PAD, x]) says what decode([x]) says, at every step

Rows of queries that sit on padding see no key at all: a softmax of -inf alone is NaN, and 0 · NaN spreads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.forms import SQUARE
from brickformer.doctor.guard import duplicate
from brickformer.doctor.outputs import differ
from brickformer.doctor.report import Finding
from brickformer.doctor.subject import wants


def _masks(e: Exam) -> list[str]:
    forms = e.p.forms
    return [
        n for n in forms if forms[n] not in SQUARE and e.p.signature.roles.get(n) in ("mask", "tgt_mask", "src_mask")
    ]


def _decodes(e: Exam) -> bool:
    decode = e.p.subject.decode
    return decode is not None and e.p.kind == "decoder" and wants(decode, 4)


def _why_not(e: Exam) -> str | None:
    p = e.p
    if p.kind != "decoder" or p.width or p.shape == "pooled":
        return "no prompt to be padded"
    if p.mask_failed:
        return "its mask of padding hides nothing"
    if p.ours or _masks(e) or _decodes(e):
        return None
    return "it takes no mask of padding"


def _run(e: Exam) -> list[Finding]:
    p = e.p
    plain = p.draw(2, p.tokens - 2)
    fill = 0 if p.pad is None else p.pad
    padded = torch.cat([torch.full((2, 2), fill), plain], 1)
    valid = torch.ones(2, p.tokens, dtype=torch.bool)
    valid[:, :2] = False
    found: list[Finding] = []
    if p.ours or _masks(e):
        found = _read(e, plain, padded, valid)
    return found or (_decode(e, padded, valid) if _decodes(e) else [])


def _read(e: Exam, plain: Tensor, padded: Tensor, valid: Tensor) -> list[Finding]:
    p = e.p
    alone, left = p(plain), p(padded, valid=valid)
    if not bool(left[:, 2:].isfinite().all()):
        return [
            Finding(
                "left padding",
                "error",
                e.not_finite(lambda: p(padded, valid=valid)),
                "a prompt that is padded on the left gets answers that are not finite",
                "finite numbers at every real token",
                "queries on padding see no key: softmax of -inf alone is NaN, which the next layer spreads",
                "let a query always see itself, or use torch.finfo(scores.dtype).min and set such rows to 0",
                explains=frozenset({"masked rows", "cached"}),
            )
        ]
    moved = float(differ(alone, left[:, 2:]).max())
    if moved <= max(p.allowed, 1e-8) * 10:
        return _half(e, padded, valid)
    by = next(iter(_masks(e)), "valid")
    where = _positions(e)
    if where:
        ids = (valid.long().cumsum(1) - 1).clamp(min=0)
        again = _with(e, where, padded, valid, ids)
        if again is not None and float(differ(alone, again[:, 2:]).max()) <= max(p.allowed, 1e-8) * 10:
            return _half(e, padded, valid)  # the caller counts
    return [
        Finding(
            "left padding",
            "note" if hasattr(p.model, "config") else "warning",
            "",
            f"two paddings on the left, hidden by {by}, moved the real tokens by {number(moved)}",
            "0: a prompt is answered the same however it is padded",
            "positions are counted from the left edge, padding included",
            "position = (mask.cumsum(-1) - 1).clamp(min=0), or relative positions",
            "(model(x) - model(padded, mask)[:, 2:]).abs().max()  # must be 0",
            "likely",
        )
    ]


def _positions(e: Exam) -> str:
    return next((n for n in e.p.signature.roles if "position" in n.lower() or n.lower() in ("pos", "pos_ids")), "")


def _with(e: Exam, name: str, padded: Tensor, valid: Tensor, ids: Tensor) -> Tensor | None:
    p = e.p
    kwargs = {p.signature.first("ids") or "ids": padded, name: ids}
    for mask in p.forms:
        kwargs[mask] = p.forms[mask].make(valid, padded.shape[1])
    try:
        with torch.no_grad():
            return p.arranged(p.signature.given(p.model, kwargs), 2, padded.shape[1])
    except Exception:
        return None


def _half(e: Exam, padded: Tensor, valid: Tensor) -> list[Finding]:
    """The same in half precision: sentinels of float32 become -inf there."""
    p = e.p
    for dtype in (torch.float16, torch.bfloat16):
        model = duplicate(p.fresh).to(dtype)
        try:
            plain, left = p(padded, model=model), p(padded, valid=valid, model=model)
        except RuntimeError:
            continue
        if bool(plain.isfinite().all()) and not bool(left[:, 2:].isfinite().all()):
            return [
                Finding(
                    "left padding",
                    "error",
                    e.not_finite(lambda m=model: p(padded, valid=valid, model=m), model),
                    f"in {str(dtype)[6:]} a prompt padded on the left gets answers that are not finite",
                    "finite numbers, as in float32",
                    "the mask's constant does not fit the type and becomes -inf: a row without keys is NaN",
                    "torch.finfo(scores.dtype).min, of the type that the scores have",
                    explains=frozenset({"masked rows", "precision"}),
                )
            ]
    return []


def _decode(e: Exam, padded: Tensor, valid: Tensor) -> list[Finding]:
    p, new = e.p, 4
    decode = p.subject.decode
    assert decode is not None
    rows = 6
    prompts = p.draw(rows, p.tokens - 2)
    fill = padded[:1, :2].expand(rows, 2)
    real = valid[:1].expand(rows, -1)
    with torch.no_grad():
        p.budget.tick()
        alone = decode(p.model, prompts, new, torch.ones_like(prompts).bool())
        left = decode(p.model, torch.cat([fill, prompts], 1), new, real)
    a, b = alone[:, -new:], left[:, -new:]
    if a.shape != b.shape or torch.equal(a, b):
        return []
    step = int((a != b).any(0).nonzero()[0])
    return [
        Finding(
            "left padding",
            "error",
            "",
            f"step {step} of decoding chose other ids for prompts that were padded on the left",
            "the same ids as for the prompts alone",
            "the mask of padding is not carried on after the first step"
            if step
            else "positions or the mask of padding are wrong for the prompt",
            "extend the mask by one real token a step and give it in every step; count positions from the mask",
            "decode([PAD, PAD, x]) against decode([x])",
            "likely",
        )
    ]


PROBE = Probe("left padding", "a prompt is answered the same however it is padded", _run, _why_not)
