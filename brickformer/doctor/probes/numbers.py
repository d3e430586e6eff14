"""Numbers: half precision stays finite, a row of nothing but padding is known, every token has its influence."""

from __future__ import annotations

from typing import Any

import torch

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.forms import SQUARE
from brickformer.doctor.guard import duplicate
from brickformer.doctor.outputs import differ, parts, scale_of
from brickformer.doctor.report import Finding


def _precision(e: Exam) -> list[Finding]:
    p = e.p
    for dtype in (torch.bfloat16, torch.float16):
        model = duplicate(p.fresh).to(dtype)
        ids = e.ids.to(dtype) if p.width else e.ids
        src = p.source(2)
        try:
            out = p(ids, src=src, model=model)
        except RuntimeError as error:
            if "overflow" in str(error):
                return [_half(f"{dtype}: {str(error).splitlines()[0]}", "note")]
            continue
        if not bool(out.isfinite().all()):
            full = p(e.ids, model=p.fresh)
            if bool(full.isfinite().all()):
                return [
                    _half(f"{str(dtype)[6:]}: the output is not finite, where float64 gives {number(scale_of(full))}")
                ]
    return []


def _half(measured: str, severity: str = "warning") -> Finding:
    return Finding(
        "precision",
        severity,  # type: ignore[arg-type]
        "",
        measured,
        "finite numbers near those of full precision",
        "a constant does not fit the type: -1e9 is beyond float16 (65504), or a whole row becomes -inf",
        "torch.finfo(scores.dtype).min, or a boolean mask given to scaled_dot_product_attention",
    )


def _rows(e: Exam) -> str | None:
    p = e.p
    if p.subject.batch is not None:
        return None
    masks = [n for n in p.forms if p.forms[n] not in SQUARE]
    if masks or (p.kind != "decoder" and p.source_pad is not None and not p.width):
        return None
    return "padding cannot be given"


def _masked(e: Exam) -> list[Finding]:
    """One row of nothing but padding beside a real one: the real one, and every gradient, stay finite."""
    p = e.p
    if p.subject.batch is not None:
        return _given(e)
    ids, src = p.draw(2), p.source(2)
    base = ids if src is None else src
    valid = torch.ones(base.shape[:2], dtype=torch.bool)
    valid[1] = False
    pad = p.source_pad if src is not None else p.pad
    given = bool([n for n in p.forms if p.forms[n] not in SQUARE])
    if pad is not None and not p.width and not given:
        base = base.clone()
        base[1] = pad
    kwargs: Any = {"src_valid": valid} if src is not None else {"valid": valid}
    with torch.enable_grad():
        out = p(ids if src is not None else base, src=base if src is not None else None, grad=True, **kwargs)
    real, empty = bool(out[0].isfinite().all()), bool(out[1].isfinite().all())
    if not real:
        return [_nan("error", "the real row beside it is not finite")]
    if empty:
        return []
    return [_nan("note", "its output is not finite; the other row is")]


def _given(e: Exam) -> list[Finding]:
    """The user's own batch: outputs and gradients are finite."""
    p, batch = e.p, e.p.subject.batch
    p.budget.tick()
    fresh = p.fresh

    def run() -> Any:
        if isinstance(batch, dict):
            return fresh(**{k: _typed(v, p.dtype) for k, v in batch.items()})
        ids, src = (batch[1], batch[0]) if isinstance(batch, tuple | list) else (batch, None)
        return p.raw(_typed(ids, p.dtype), src, None, None, fresh)

    with torch.enable_grad():
        value = run()
        every = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else [batch]
        rows = next(v for v in every if isinstance(v, torch.Tensor) and v.ndim >= 2)
        outs = [x for _, x in parts(value) if x.is_floating_point() and x.requires_grad]
        total = torch.stack([x.nan_to_num(0.0, 0.0, 0.0).sum() for x in outs]).sum()
        wanted = [x for x in fresh.parameters() if x.requires_grad]
        g = torch.autograd.grad(total, wanted, allow_unused=True)
    axis = 1 if p.seq_first else 0
    bad = [
        i
        for i in range(rows.shape[axis])
        if any(
            x.ndim > axis and x.shape[axis] == rows.shape[axis] and not bool(x.select(axis, i).isfinite().all())
            for x in outs
        )
    ]
    if bad or any(not bool(x.isfinite().all()) for x in (*outs, *(y for y in g if y is not None))):
        what = f"rows {bad} of your batch are answered by" if bad else "the gradients of your batch are"
        return [_nan("error", f"{what} numbers that are not finite", "your batch", e.not_finite(run, fresh))]
    return []


def _typed(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _nan(severity: str, measured: str, what: str = "a row that is all padding", where: str = "") -> Finding:
    return Finding(
        "masked rows",
        severity,  # type: ignore[arg-type]
        where,
        f"{what}: {measured}",
        "finite: one such row makes every gradient NaN",
        "softmax over -inf alone is 0/0",
        "never make such rows, or set their weights to 0 after the softmax",
    )


def _input(e: Exam) -> list[Finding]:
    p = e.p
    base = p(e.ids)
    if not bool(base.isfinite().all()):
        return [
            Finding(
                "input",
                "error",
                "",
                "the output is not finite on random input",
                "finite numbers",
                "a division by 0, a softmax of -inf alone, or weights that are not finite",
                "look for the first NaN",
                explains=frozenset({"precision", "positions", "causality", "eval", "batch", "overfit", "first loss"}),
            )
        ]
    spread = float((base - base.flatten(0, 1).mean(0)).abs().max())
    if spread <= p.allowed * scale_of(base) and base.shape[0] * base.shape[1] > 1:
        return [_blind("all outputs are one constant vector, whatever the input")]
    if p.shape == "pooled":
        still = [t for t in range(p.tokens) if float(differ(base, p(p.other(e.ids, t))).max()) <= p.allowed * 1e-3]
        return [_blind(f"no output depends on the input (tokens {still})")] if len(still) == p.tokens else []
    if base.shape[1] != p.tokens:
        return []
    blind = [t for t in range(p.tokens) if float(differ(base, p(p.other(e.ids, t)))[:, t].max()) <= p.allowed * 1e-3]
    if len(blind) > p.tokens // 2:
        return [_blind(f"the outputs at tokens {blind} do not depend on the token that is there")]
    return []


def _blind(measured: str) -> Finding:
    return Finding(
        "input",
        "error",
        "",
        measured,
        "the output at a token depends on that token",
        "the input is replaced (zeros instead of the shifted target), or everything is normalised away",
        "print the input of the first layer for two different inputs",
        explains=frozenset({"positions", "dead parameters", "overfit", "memory"}),
    )


PRECISION = Probe("precision", "half precision stays finite", _precision)
MASKED = Probe("masked rows", "a row of padding harms no other", _masked, _rows)
INPUT = Probe("input", "every output depends on its own token", _input)
