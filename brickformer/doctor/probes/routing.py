"""Mixtures of experts: the router learns from the task, every expert is chosen, what balances them is in the loss.

    y = Σ_{i in top-k} g_i(x) · E_i(x);   loss = task + α · balance      (arXiv 2101.03961, 2401.04088)

A router is a linear map to as many numbers as there are experts beside it, called gate, router or switch.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.guard import duplicate, undropped
from brickformer.doctor.outputs import parts
from brickformer.doctor.report import Finding

_ROUTER = re.compile(r"gate|router|switch|wg\b|routing", re.IGNORECASE)
_AUX = re.compile(r"aux|balanc|load|z_?loss|router_loss|moe_loss", re.IGNORECASE)
_WEIGHT = re.compile(r"aux|balanc|z_?loss|lb_|moe_(coef|loss)", re.IGNORECASE)


def routers(model: nn.Module) -> list[tuple[str, str, nn.Module, nn.Module]]:
    """(path of the mixture, path of the router, mixture, router)."""
    found: list[tuple[str, str, nn.Module, nn.Module]] = []
    for path, m in model.named_modules():
        counts = {len(c): n for n, c in m.named_children() if isinstance(c, nn.ModuleList) and len(c) > 1}
        counts |= {x.shape[0]: n for n, x in m.named_parameters() if x.ndim == 3 and x.shape[0] > 1}
        for name, child in m.named_modules():
            weight = getattr(child, "weight", None)
            if not name or name.count(".") > 1 or not isinstance(weight, Tensor) or weight.ndim != 2:
                continue
            if weight.shape[0] not in counts or not _ROUTER.search(name) or isinstance(child, nn.Embedding):
                continue
            if not any(path.startswith(f"{other}.") for other, *_ in found if other):
                found.append((path, f"{path}.{name}".lstrip("."), m, child))
    return found


def _why_not(e: Exam) -> str | None:
    return None if routers(e.p.model) else "no router beside experts was seen"


def _run(e: Exam) -> list[Finding]:
    return _gradient(e) or _balance(e) or _loads(e)


def _gradient(e: Exam) -> list[Finding]:
    """∂ task / ∂ router is not 0."""
    p = e.p
    found = routers(p.model)
    with torch.enable_grad():
        out = p(p.draw(4), src=p.source(4), grad=True)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
        weights: list[Any] = [r.weight for *_, r in found]
        g = torch.autograd.grad((out * weight).sum(), weights, allow_unused=True)
    for (_, path, _, _), gradient in zip(found, g, strict=True):
        if gradient is None or float(gradient.abs().max()) <= 1e-14:
            return [
                _finding(
                    path,
                    "the router's weights get no gradient from the outputs",
                    "a gradient: which expert helps is learnt from the task",
                    "the experts' answers are not multiplied by the router's weights, or these are detached (argmax, "
                    "round, renormalised over one)",
                    "y = y + weight[:, i, None] * expert(x), with weight = softmax(router(x)).topk(k)",
                    frozenset({"dead parameters"}),
                )
            ]
    return []


def _loads(e: Exam) -> list[Finding]:
    """On fresh weights every expert gets some tokens, and every token some expert."""
    p = e.p
    model = p.fresh
    for path, _, mixture, _ in routers(model):
        lists = [(n, c) for n, c in mixture.named_children() if isinstance(c, nn.ModuleList)]
        experts = next((c for n, c in lists if "exp" in n.lower()), lists[0][1] if lists else None)
        if experts is None:
            continue
        counts = [0] * len(experts)
        zeros, rows = [0], [0]
        handles = []
        for i, expert in enumerate(experts):

            def count(m: Any, args: Any, i: int = i, counts: list[int] = counts) -> None:
                x = next((a for a in args if isinstance(a, Tensor)), None)
                counts[i] += 0 if x is None or not x.numel() else x[..., 0].numel()

            handles.append(expert.register_forward_pre_hook(count))

        def blank(m: Any, args: Any, out: Any, zeros: list[int] = zeros, rows: list[int] = rows) -> None:
            y = next((x for _, x in parts(out) if x.is_floating_point() and x.ndim >= 2), None)
            if y is not None:
                zeros[0] += int((y.flatten(0, -2) == 0).all(-1).sum())
                rows[0] += y[..., 0].numel()

        handles.append(mixture.register_forward_hook(blank))
        many = max(8, 24 * len(experts) // max(p.tokens, 1) + 1)
        try:
            p(p.draw(min(many, 64)), src=p.source(min(many, 64)), model=model)
        finally:
            for handle in handles:
                handle.remove()
        idle = [i for i, c in enumerate(counts) if c == 0]
        if idle and sum(counts):
            return [
                _finding(
                    path,
                    f"experts {idle} of {len(experts)} are never chosen in {rows[0]} random tokens (loads {counts})",
                    "some tokens for each, before anything is trained",
                    "the choice does not depend on the token (a wrong axis, argmin, a fixed expert), or "
                    "starves some experts from the start",
                    "scores = router(x); scores.topk(k, dim=-1), with small initial values",
                )
            ]
        if zeros[0] and not any("capacity" in n for m in mixture.modules() for n in vars(m)):
            return [
                _finding(
                    path,
                    f"{zeros[0]} of {rows[0]} tokens are answered by no expert: exact zeros",
                    "every token has an expert",
                    "tokens are dropped, or a loop over the experts forgets one",
                    "for i in range(len(experts)): the tokens with (chosen == i).any(-1)",
                )
            ]
    return []


def _balance(e: Exam) -> list[Finding]:
    """A loss that balances experts is in the loss, with its weight."""
    p = e.p
    if p.subject.loss is None and p.signature.first("labels") is None:
        return []
    model = undropped(p.fresh)
    path, _, _, router = routers(model)[0]
    outs: list[tuple[str, Tensor]] = []

    def keep(m: Any, a: Any, out: Any) -> None:
        outs.extend((n, x) for n, x in parts(out) if x.numel() == 1 and x.requires_grad)

    handles = [m.register_forward_hook(keep) for m in model.modules()]
    ids, src = p.draw(4), p.source(4)
    try:
        with torch.enable_grad():
            loss = p.loss(ids, src, model)
    finally:
        for handle in handles:
            handle.remove()
    if loss is None or not loss.requires_grad:
        return []
    for module in model.modules():
        for name, value in vars(module).items():
            for x in value if isinstance(value, list) else [value]:
                if isinstance(x, Tensor) and x.numel() == 1 and x.requires_grad and not x.is_leaf and _AUX.search(name):
                    outs.append((name, x))
    weight: Any = router.weight
    used: list[bool] = []
    for _, x in outs:
        if x is loss:
            continue
        (own,) = torch.autograd.grad(x, [weight], allow_unused=True, retain_graph=True)
        (into,) = torch.autograd.grad(loss, [x], allow_unused=True, retain_graph=True)
        if own is not None and into is not None and float(into) != 0:
            used.append(True)
        elif own is not None and float(own.abs().max()) > 0:
            used.append(False)
    if used and not any(used):
        return [_unused(path, "the loss that balances the experts is computed and does not reach the loss")]
    return _coefficient(e, model, path, ids, src)


def _coefficient(e: Exam, model: nn.Module, path: str, ids: Tensor, src: Tensor | None) -> list[Finding]:
    """A weight that is kept for this loss changes the router's gradient."""
    p = e.p
    names = [
        (m, n)
        for m in model.modules()
        for n, v in vars(m).items()
        if isinstance(v, float) and _WEIGHT.search(n) and "drop" not in n and v != 0
    ]
    if not names:
        return []
    found: list[Tensor] = []
    for times in (1.0, 1000.0):
        other = duplicate(model)
        for m in other.modules():
            for n, v in list(vars(m).items()):
                if isinstance(v, float) and _WEIGHT.search(n) and "drop" not in n:
                    setattr(m, n, v * times)
        weight: Any = routers(other)[0][3].weight
        with torch.enable_grad():
            loss = p.loss(ids, src, other)
            assert loss is not None
            (g,) = torch.autograd.grad(loss, [weight], allow_unused=True)
        found.append(torch.zeros_like(weight) if g is None else g)
    moved = float((found[0] - found[1]).abs().max())
    if moved > 1e-12:
        return []
    name = names[0][1]
    return [_unused(path, f"{name} times 1000 changed the router's gradient by {number(moved)}")]


def _unused(path: str, measured: str) -> Finding:
    return _finding(
        path,
        measured,
        "the balance is a part of the training loss, with its weight",
        "it is never added, its weight is never applied, or the result of the function that attaches it is thrown away",
        "loss = task + coefficient * balance; or x = AddLoss.apply(x, balance), with the x that it returns",
    )


def _finding(
    where: str, measured: str, expected: str, cause: str, fix: str, explains: frozenset[str] = frozenset()
) -> Finding:
    return Finding(
        "routing",
        "error",
        where,
        measured,
        expected,
        cause,
        fix,
        "router.weight.grad after one backward",
        explains=explains,
    )


PROBE = Probe("routing", "the router learns, every expert is used", _run, _why_not)
