"""Nothing beats guessing where there is nothing to learn: random ids cost ln V, whatever a model does.

E[loss on fresh random ids] >= ln V;   less means that the target is seen

A loss that is smoothed or weighted has a floor of its own: it is asked what equal probabilities cost.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

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
    vocab = p.target_vocab if p.kind == "encoder_decoder" else p.vocab
    guess = _guess(e)
    uniform = (math.log(vocab) if guess is None else guess) + math.log(len(p.pool(side)) / vocab)
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
            f"{number(uniform)}, what guessing among {len(p.pool(side))} ids costs",
            "each position is trained on a token that it has seen: the shift, a leak between model and loss, or "
            "hard tokens that do not count",
            "loss(logits[:, :-1], ids[:, 1:]), behind a causal mask, the mean over all tokens",
            "train on torch.randint ids and look whether the loss falls",
            "likely",
        )
    ]


def _guess(e: Exam) -> float | None:
    """The user's loss where all ids are equally likely: smoothed or weighted losses have a floor of their own.

    The last module that gives V features is made to say so; None where there is none.
    """
    p = e.p
    features = (p.target_vocab,) if p.kind == "encoder_decoder" else (p.vocab,)
    last: list[nn.Module] = []

    def see(m: nn.Module, a: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.ndim >= 2 and out.shape[-1] in features:
            last.append(m)

    def level(m: nn.Module, a: Any, out: Tensor) -> Tensor:
        sums = out.detach().logsumexp(-1)
        return torch.zeros_like(out) - (math.log(out.shape[-1]) if float(sums.abs().max()) < 1e-4 else 0.0)

    ids, src = p.draw(24, seed=100), p.source(24, seed=500)
    leaves = [m for m in p.fresh.modules() if not list(m.children())]
    handles = [m.register_forward_hook(see) for m in leaves]
    try:
        with torch.no_grad():
            p.loss(ids, src, p.fresh)
        if not last:
            return None
        handles.append(last[-1].register_forward_hook(level))
        with torch.no_grad():
            value = p.loss(ids, src, p.fresh)
    finally:
        for handle in handles:
            handle.remove()
    return None if value is None or not math.isfinite(float(value)) else float(value)


PROBE = Probe("random labels", "nothing beats guessing on random ids", _run, _why_not)
