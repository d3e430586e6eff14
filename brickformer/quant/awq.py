"""Scales of inputs that protect the weights that matter (AWQ, arXiv 2306.00978, 3.2).

    W x = (W d) (x / d)      Q(W d) rounds an input's weights by d times less where d is large

d_i = a_i^α / √(max · min), a_i the root mean square of input i; of some α the one whose rounded matrix answers best, by
the error of the outputs (see hessian.py). α = 0 is plain rounding, so it never answers worse than that on what it has
seen.

Shapes: W (O, I), H (I, I), d (I,).
"""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from brickformer.quant.codes import Coded, encode
from brickformer.quant.grid import Scheme
from brickformer.quant.hessian import output_error

POWERS: Final = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)


def awq(weight: Float[Tensor, "O I"], scheme: Scheme, hessian: Float[Tensor, "I I"]) -> tuple[Coded, Tensor | None]:
    """(coded W d, d), d None where no power above 0 helps."""
    size = hessian.diagonal().clamp_min(0.0).sqrt()
    size = size.clamp_min(1e-4 * float(size.max()) + 1e-30)
    best: tuple[Coded, Tensor | None] | None = None
    least = torch.inf
    for power in POWERS:
        raised = size**power
        d = raised / (raised.max() * raised.min()).sqrt() if power else None
        coded = encode(weight if d is None else weight * d, scheme)
        error = output_error(weight, coded, d, hessian)
        if best is None or error < least:
            best, least = (coded, d), error
    assert best is not None
    coded, d = best
    with torch.inference_mode(False):  # inputs that have slopes are divided by it, whatever mode it was found in
        return coded, None if d is None else d.clone()
