"""GPTQ: round one input's weights after another, and let those not yet rounded make good for the error.

    e = (w_j - ŵ_j) / U_jj,    w_k -= e U_jk for k > j,    U upper triangular with Uᵀ U = (H + λ)⁻¹

(arXiv 2210.17323, algorithm 1). Inputs with much energy go first, while all others can still make good; every group's
scale is found before anything moves, so groups stay runs of neighbours whatever the order. λ: DAMP of the mean of H's
diagonal. An input that is always 0 has weights that never matter: they become 0.

Shapes: W (O, I), H (I, I).
"""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from brickformer.quant.codes import Coded, assemble, give_back, grouped
from brickformer.quant.grid import Scheme
from brickformer.quant.hessian import DAMP

BLOCK: Final = 128
"""Inputs whose corrections reach the rest in one product."""

ROWS: Final = 2048
"""Outputs in work at once: they know nothing of each other."""


def gptq(weight: Float[Tensor, "O I"], scheme: Scheme, hessian: Float[Tensor, "I I"]) -> Coded:
    """The coded matrix."""
    diagonal = hessian.diagonal().clone()
    idle = diagonal <= 0.0
    diagonal[idle] = 1.0
    order = diagonal.argsort(descending=True, stable=True)
    h = hessian[order][:, order]
    h.diagonal().copy_(diagonal[order])
    upper = _inverse_root(h)
    del h
    importance = grouped(diagonal[None], scheme)[0]
    parts = []
    for start in range(0, len(weight), ROWS):
        w = weight[start : start + ROWS].detach().float().clone()
        w[:, idle] = 0.0
        parts.append(_rows(w, scheme, importance, order, upper))
        give_back()
    return assemble(scheme, weight.shape[1], parts)


def _rows(
    w: Float[Tensor, "R I"], scheme: Scheme, importance: Tensor, order: Tensor, upper: Float[Tensor, "I I"]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and zero points of some rows. order: of the inputs, which `upper` already has."""
    inputs = w.shape[1]
    cut = grouped(w, scheme)
    scale, zero = scheme.fit(cut, importance)  # (R, G)
    codes = scheme.code(cut, scale[..., None], None if zero is None else zero[..., None]).flatten(1)
    columns, groups = order.tolist(), (order // cut.shape[2]).tolist()
    w = w[:, order]
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        errors = torch.empty(len(w), end - start, device=w.device)
        for i in range(start, end):
            s, z = scale[:, groups[i]], None if zero is None else zero[:, groups[i]]
            code = scheme.code(w[:, i], s, z)
            codes[:, columns[i]] = code
            error = (w[:, i] - scheme.value(code, s, z)) / upper[i, i]
            w[:, i:end].addr_(error, upper[i, i:end], alpha=-1.0)
            errors[:, i - start] = error
        w[:, end:].addmm_(errors, upper[start:end, end:], alpha=-1.0)
    return codes, scale, zero


def _inverse_root(h: Tensor) -> Tensor:
    """U of the damped H, whose diagonal is changed; more damping where rounding has left H without a root."""
    diagonal = h.diagonal().clone()
    damp = DAMP * float(diagonal.mean())
    for _ in range(8):
        h.diagonal().copy_(diagonal + damp)
        found, bad = torch.linalg.cholesky_ex(h)
        if not int(bad):
            found = torch.cholesky_inverse(found)
            found, bad = torch.linalg.cholesky_ex(found, upper=True)
            if not int(bad):
                return found
        del found
        damp *= 10.0
    return torch.eye(len(h), device=h.device)  # no better than rounding to nearest, and no worse
