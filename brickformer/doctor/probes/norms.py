"""Norms and feed-forwards change each vector alone: what they say of token t depends on token t, in its own row."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.report import Finding


def _run(e: Exam) -> list[Finding]:
    p = e.p
    inputs: dict[str, tuple[nn.Module, Tensor]] = {}
    handles = []
    for path, module in p.model.named_modules():

        def keep(m: nn.Module, args: tuple[object, ...], path: str = path) -> None:
            if args and isinstance(args[0], Tensor) and args[0].ndim == 3 and len(args) == 1:
                inputs.setdefault(path, (m, args[0].detach()))

        name = f"{type(module).__name__} {path.rpartition('.')[2]}".lower()
        if re.search(r"norm|^ln|ln_|feedforward|mlp|ffn|\bff\b|feed_forward", name) and "mixer" not in name:
            handles.append(module.register_forward_pre_hook(keep))
    try:
        p(p.draw(3))
    finally:
        for handle in handles:
            handle.remove()
    for path, (module, x) in inputs.items():
        if any(isinstance(m, nn.Conv1d | nn.RNNBase | nn.modules.batchnorm._BatchNorm) for m in module.modules()):
            continue
        y = x.clone()
        y[0, 1] = -2.0 * y[0, 1] + 0.7 * torch.randn(y.shape[-1], generator=torch.Generator().manual_seed(1)).to(y)
        with torch.no_grad():
            a, b = module(x), module(y)
        if not isinstance(a, Tensor) or a.ndim != 3 or a.shape[:2] != x.shape[:2]:
            continue
        moved = (a - b).abs().amax(-1)
        moved[0, 1] = 0.0
        if float(moved.max()) > p.allowed * max(1.0, float(a.abs().max())):
            row, token = divmod(int(moved.argmax()), moved.shape[1])
            axis = "time" if row == 0 else "the batch"
            return [
                Finding(
                    "norm axis",
                    "error",
                    path,
                    f"another vector at one token moved {'token ' + str(token) if row == 0 else 'another row'} by "
                    f"{number(moved.max())}",
                    "0: each vector is changed alone",
                    f"its mean and deviation (or its weights) run over {axis} as well",
                    "normalise over the last axis alone: nn.LayerNorm(D), x.mean(-1, keepdim=True)",
                    explains=frozenset({"causality", "padding", "batch", "cached", "length", "heads"}),
                )
            ]
        narrow = _narrow(path, module, x)
        if narrow:
            return [narrow]
    return []


def _narrow(path: str, module: nn.Module, x: Tensor) -> Finding | None:
    if x.shape[-1] != 1 or not isinstance(module, nn.LayerNorm):
        return None
    return Finding(
        "norm axis",
        "error",
        path,
        "a norm over one feature: its output is its bias, whatever comes in",
        "more than two features",
        "the width of the model is 1",
        "embed the input in more features before the first norm",
        explains=frozenset({"input"}),
    )


PROBE = Probe("norm axis", "norms and feed-forwards change each vector alone", _run)
