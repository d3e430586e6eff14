"""Drift: a matrix is fed by others that were rounded; it is to answer what the full model would have answered.

    min over W̃ of  mean ‖W̃ x̂ - W x‖² + λ ‖W̃ - W‖²        W̃ = W + W D (H + λ)⁻¹,   D = mean (x - x̂) x̂ᵀ

x: what the full model feeds the matrix, x̂: what the coded one does, H = mean x̂ x̂ᵀ. W̃ is rounded in the place of W, and
errors of earlier matrices are made good as far as a linear map can (as in arXiv 2504.02692).

The full model is a twin of the one that is coded. Both read weights that are not coded yet in one place (see away.py).

Shapes: x, x̂ (I,), W (O, I), H, D (I, I).
"""

from __future__ import annotations

import copy
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.quant.hessian import DAMP


def followed(weight: Float[Tensor, "O I"], h: Float[Tensor, "I I"], d: Float[Tensor, "I I"]) -> Float[Tensor, "O I"]:
    """W̃, in float32; W itself where nothing has drifted or nothing is fed."""
    w = weight.float()
    damp = DAMP * float(h.diagonal().mean())
    if damp <= 0.0 or not d.any():
        return w
    damped = h.clone()
    damped.diagonal().add_(damp)
    lower, bad = torch.linalg.cholesky_ex(damped)
    del damped
    return w if int(bad) else torch.addmm(w, w, torch.cholesky_solve(d.t(), lower).t())


def twin(model: nn.Module) -> nn.Module:
    """The same modules once more around the same tensors; those that hooks make (weight norm) are plain attributes."""
    made = (t for m in model.modules() for t in m.__dict__.values() if isinstance(t, Tensor))
    return copy.deepcopy(model, {id(t): t for t in chain(model.parameters(), model.buffers(), made)})
