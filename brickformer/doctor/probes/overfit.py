"""Eight examples can be learnt by heart: a healthy model brings its loss near zero in a bounded number of steps."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.guard import undropped
from brickformer.doctor.report import Finding

STEPS = 80
LARGE = 2_000_000


def _why_not(e: Exam) -> str | None:
    p = e.p
    if p.width or p.shape == "pooled":
        return "no next token to learn"
    if sum(x.numel() for x in p.fresh.parameters()) > LARGE:
        return "more than 2 million parameters"
    vocab = p.target_vocab if p.kind == "encoder_decoder" else p.vocab
    if p.features != vocab and p.subject.loss is None:
        return "it gives hidden vectors, no logits"
    return None


def _run(e: Exam) -> list[Finding]:
    p = e.p
    model = undropped(p.fresh).float()
    ids, src = p.draw(8), p.source(8)
    pool = p.pool()
    first = pool[torch.arange(8) % len(pool)]
    ids[:, 0] = first
    best, start = math.inf, math.nan
    for lr in (3e-3, 5e-4):
        if lr == 5e-4:
            model = undropped(p.fresh).float()
        optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
        for _ in range(STEPS):
            with torch.enable_grad():
                loss = _loss(e, model, ids, src)
                optimizer.zero_grad()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            value = float(loss.detach())
            start = value if math.isnan(start) else start
            best = min(best, value)
            if not math.isfinite(value) or best < 0.85 * start:
                break
        if best < 0.85 * start:
            return []
    return [
        Finding(
            "overfit",
            "warning",
            "",
            f"eight sequences, {STEPS} steps of AdamW: the loss went from {number(start)} to {number(best)}",
            "well below where it started",
            "something keeps the gradient from the weights, or the targets cannot be told from the input",
            "look at the other findings first; then at the gradient norm of each layer",
            confidence="likely",
        )
    ]


def _loss(e: Exam, model: torch.nn.Module, ids: Tensor, src: Tensor | None) -> Tensor:
    p = e.p
    if p.subject.loss is not None:
        loss = p.loss(ids, src, model)
        assert loss is not None
        return loss
    logits = p(ids, src=src, model=model, grad=True)
    if p.kind == "encoder":
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten() % logits.shape[-1])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


PROBE = Probe("overfit", "eight examples are learnt by heart", _run, _why_not)
