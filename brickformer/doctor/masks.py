"""Which form of each mask works: tried on the model, and taken when it hides what it should and shows the rest."""

from __future__ import annotations

import torch

from brickformer.doctor.forms import CAUSAL, SQUARE, Form, by_name
from brickformer.doctor.outputs import differ
from brickformer.doctor.patient import NotAsked, Patient


def find_masks(p: Patient) -> None:
    """Which form of each padding mask hides what it should; whether a causal mask must be given."""
    if p.subject.call is not None:
        return
    sig = p.signature
    if p.kind != "encoder" and p.shape != "pooled":
        _need_causal(p)
    for name in sig.named("mask", "src_mask", *(("memory_mask",) if p.kind == "encoder_decoder" else ())):
        if name in p.forms and p.forms[name] in SQUARE:
            continue
        if p.kind == "encoder_decoder" and sig.roles[name] == "memory_mask" and sig.first("src_mask") is None:
            continue
        _choose(p, name)


def _need_causal(p: Patient) -> None:
    """A causal mask the caller gives: take the first form under which no output sees later tokens."""
    if _hides_future(p):
        return
    names = [n for n in p.signature.named("tgt_mask", "mask") if "pad" not in n.lower()]
    for name in names:
        kept = p.forms.get(name)
        for form in CAUSAL:
            p.forms[name] = form
            p.always.add(name)
            try:
                if _hides_future(p):
                    p.facts.append(f"causal by {name}, {form.name}")
                    return
            except Exception:
                continue
        p.forms.pop(name)
        p.always.discard(name)
        if kept is not None:
            p.forms[name] = kept
            p.always.add(name)


def _hides_future(p: Patient) -> bool:
    ids = p.draw(2)
    early = differ(p(ids), p(p.other(ids, p.tokens - 1)))
    first = differ(p(ids), p(p.other(ids, 0)))
    return not bool((early[:, :-1] > p.allowed).any()) and bool((first > p.allowed).any())


def _choose(p: Patient, name: str) -> None:
    kept, works = p.forms.get(name), None
    runs: Form | None = None
    for form in by_name(name):
        p.forms[name] = form
        try:
            verdict = hides(p, name)
        except Exception:
            continue
        runs = runs or form
        if verdict:
            works = form
            break
    if works is not None:
        p.forms[name] = works
        return
    p.forms.pop(name, None)
    if runs is not None or kept is not None:
        p.forms[name] = kept or runs  # type: ignore[assignment]
        p.mask_failed = name


def hides(p: Patient, name: str) -> bool:
    """Whether what a padding mask hides is not seen, and what it does not hide is.

    A decoder hides two tokens after its first, so that no query is left without keys.
    """
    both = p.kind == "encoder_decoder"
    ids, src = p.draw(2), p.source(2)
    base = src if src is not None else ids
    side = "src" if both else "tgt"
    n = base.shape[1]
    valid = torch.ones(2, n, dtype=torch.bool)
    hidden = (1, 2) if p.kind == "decoder" else (n - 2, n - 1)
    valid[:, list(hidden)] = False
    pooled = p.shape == "pooled"
    if pooled and p.pad is not None and not p.width:  # what it pools may be told by the ids as well
        base = base.clone()
        base[:, list(hidden)] = p.pad
        outs = [p(base[:, :-2]), p(base, valid=valid), p(p.other(base[:, :-2], 0))]
    else:
        junk = base
        for t in hidden:
            junk = p.other(junk, t, side)
        trials = (base, junk, p.other(base, 0, side))
        if both:
            outs = [p(ids, src=x, src_valid=valid) for x in trials]
        else:
            outs = [p(x, valid=valid) for x in trials]
    seen = slice(None) if both or pooled else (slice(3, None) if p.kind == "decoder" else slice(0, n - 2))
    if not bool(outs[0][:, seen].isfinite().all()):
        raise NotAsked(f"{name}: not finite")
    away = float(differ(outs[0], outs[1])[:, seen].max()) <= p.allowed
    there = differ(outs[0], outs[2])[:, seen]
    there = there if both or pooled or p.kind == "decoder" else there[:, 1:]  # another token sees it
    return away and float(there.max()) > p.allowed
