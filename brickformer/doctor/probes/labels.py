"""Every class can be a target: a label that the loss ignores is never learnt.

loss(all labels = c) is finite and has a gradient, for each class c but padding
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from brickformer.doctor.exam import Exam, Probe
from brickformer.doctor.patient import NotAsked
from brickformer.doctor.report import Finding
from brickformer.doctor.subject import wants

MOST = 48


def _why_not(e: Exam) -> str | None:
    p = e.p
    given = p.subject.loss is not None
    if p.width:
        return "it reads vectors, not ids"
    if not given and (p.signature.first("labels") is None or p.ours or p.subject.call is not None):
        return "no loss given: Subject(loss=lambda model, ids: ...)"
    if p.kind == "encoder" and not _classifies(e):
        return "what its labels are is not known"
    return None


def _classifies(e: Exam) -> bool:
    """Whether labels (B,) are asked for."""
    p = e.p
    if p.subject.loss is not None:
        return wants(p.subject.loss, 3)
    return p.shape == "pooled"


def _run(e: Exam) -> list[Finding]:
    p = e.p
    if _classifies(e):
        dead = [c for c in range(min(p.features, MOST)) if not _learns(e, p.draw(4), torch.full((4,), c))]
        return [_finding(dead, p.features, "label")] if dead else []
    if p.subject.loss is None and p.kind == "encoder_decoder":
        return []
    vocab = p.target_vocab if p.kind == "encoder_decoder" else p.vocab
    pads = {p.pad, p.target_pad} | ({0} if p.pad is None and p.target_pad is None else set())
    asked = [c for c in range(min(vocab, MOST)) if c not in pads]
    if p.subject.eos is not None and p.subject.eos not in (*asked, *pads):
        asked.append(p.subject.eos)
    dead = [c for c in asked if not _learns(e, torch.full((2, p.tokens), c), None)]
    return [_finding(dead, vocab, "id")] if dead and len(dead) < len(asked) else []


def _learns(e: Exam, ids: Tensor, labels: Tensor | None) -> bool:
    p = e.p
    with torch.enable_grad():
        loss = p.loss(ids, p.source(len(ids)), p.fresh, labels)
    if loss is None:
        raise NotAsked("no loss came back")
    if not math.isfinite(float(loss.detach())) or not loss.requires_grad:
        return False
    wanted = [x for x in p.fresh.parameters() if x.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return any(g is not None and bool((g != 0).any()) for g in found)


def _finding(dead: list[int], count: int, what: str) -> Finding:
    return Finding(
        "ignored labels",
        "error",
        "",
        f"where every target is {what} {dead[0]}, the loss is not finite or has no gradient"
        + (f" (so for {what}s {dead[:6]})" if dead[1:] else ""),
        f"each of the {count} {what}s can be learnt",
        "ignore_index is a label that means something (one loss shared by two tasks), or the label is masked out",
        "ignore_index=-100 for this task, or no ignore_index at all",
        f"F.cross_entropy(logits, torch.full((4,), {dead[0]}))  # through your own loss",
    )


PROBE = Probe("ignored labels", "every class can be a target", _run, _why_not)
