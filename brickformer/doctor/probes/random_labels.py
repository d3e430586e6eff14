"""Nothing beats guessing where there is nothing to learn: random ids cost ln V, whatever a model does.

E[loss on fresh random ids] >= ln V;   less means that the target is seen
"""

from __future__ import annotations

import math

import torch

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.guard import undropped
from brickformer.doctor.probes.overfit import LARGE
from brickformer.doctor.report import Finding

STEPS = 40


def _why_not(e: Exam) -> str | None:
    p = e.p
    if p.width or p.shape == "pooled" or p.kind == "encoder":
        return "no next token to learn"
    if p.subject.loss is None:  # labels of a forward may be shifted by the caller
        return "no loss given: Subject(loss=lambda model, ids: ...)"
    if sum(x.numel() for x in p.fresh.parameters()) > LARGE:
        return "more than 2 million parameters"
    return None


def _run(e: Exam) -> list[Finding]:
    p = e.p
    side = "tgt"
    uniform = math.log(len(p.pool(side)))
    model = undropped(p.fresh).float()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)

    def loss(i: int) -> torch.Tensor:
        value = p.loss(p.draw(24, seed=100 + i), p.source(24, seed=500 + i), model)
        assert value is not None
        return value

    begin = math.nan
    for i in range(STEPS):
        with torch.enable_grad():
            value = loss(i)
            optimizer.zero_grad()
            value.backward()
        begin = float(value.detach()) if math.isnan(begin) else begin
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if not 0.75 * uniform < begin < 2.0 * uniform + 1:
        return []  # no plain cross entropy, or another matter
    with torch.enable_grad():
        end = sum(float(loss(1000 + i).detach()) for i in range(4)) / 4
    if end > 0.93 * uniform:
        return []
    return [
        Finding(
            "random labels",
            "error",
            "",
            f"after {STEPS} steps on random ids the loss on new random ids is {number(end)}",
            f"ln {len(p.pool(side))} = {number(uniform)}, what guessing costs",
            "each position is trained on a token that it has seen: the shift, a leak between model and loss, or "
            "hard tokens that do not count",
            "loss(logits[:, :-1], ids[:, 1:]), behind a causal mask, the mean over all tokens",
            "train on torch.randint ids and look whether the loss falls",
            "likely",
        )
    ]


PROBE = Probe("random labels", "nothing beats guessing on random ids", _run, _why_not)
