"""eval() is deterministic, grad or no grad; train() without dropout says the same as eval()."""

from __future__ import annotations

import torch
from torch import nn

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.guard import undropped
from brickformer.doctor.outputs import differ
from brickformer.doctor.patient import NotAsked
from brickformer.doctor.report import Finding


def _run(e: Exam) -> list[Finding]:
    p = e.p
    one, two = p(e.ids), p(e.ids)
    if not bool(one.isfinite().all()):
        raise NotAsked("its output is not finite")
    moved = float(differ(one, two).max())
    if moved > p.allowed:
        return [_random(e, moved)]
    grad = p(e.ids, grad=True).detach()
    moved = float(differ(one, grad).max())
    if moved > max(p.allowed, 1e-9) * 10:
        return [_gap("with gradients", moved, "a fast path that runs without gradients only differs")]
    return _training(e, one)


def _random(e: Exam, moved: float) -> Finding:
    where = e.begins(lambda: e.p(e.ids), lambda: e.p(e.ids), lambda x, y: bool(((x - y).abs() > e.p.allowed).any()))
    drawn = e.trace.drawn
    if drawn:
        cause = "a module with weights is built inside forward: new random weights at every call, never trained"
        fix, where = "build it once, in __init__", drawn[0] or where
    else:
        cause = "dropout goes on in eval(): F.dropout without training=self.training, or dropout_p given to the kernel"
        fix = "F.dropout(x, p, training=self.training); dropout_p=p if self.training else 0.0"
    return Finding(
        "eval",
        "error",
        where,
        f"two calls in eval() differ by {number(moved)}",
        "0",
        cause,
        fix,
        "model.eval(); (model(x) - model(x)).abs().max()  # must be 0",
        explains=frozenset(
            "causality padding batch heads positions cached memory precision length input overfit norm".split()
        )
        | {"masked rows", "norm axis", "dead parameters"},
    )


def _training(e: Exam, said: torch.Tensor) -> list[Finding]:
    p = e.p
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in p.model.modules()):
        return []
    model = undropped(p.model)
    one, two = p(e.ids, model=model), p(e.ids, model=model)
    if float(differ(one, two).max()) > p.allowed:
        return []
    moved = float(differ(one, said).max()) if one.shape == said.shape else 0.0
    if moved <= p.allowed * 10:
        return []
    return [_gap("in train() with no dropout", moved, "train and eval take different ways through the model")]


def _gap(what: str, moved: float, cause: str) -> Finding:
    return Finding(
        "eval",
        "error",
        "",
        f"{what} the output differs by {number(moved)}",
        "0",
        cause,
        "let both modes run the same code; only dropout may depend on self.training",
    )


PROBE = Probe("eval", "eval() is deterministic and says what train() says", _run)
