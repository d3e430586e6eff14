"""Polish: with all the others as they are, the best code for one weight and the best scale for one group, in turn.

    R = (W - Ŵ) H                                                 half the slope of tr (W - Ŵ) H (W - Ŵ)ᵀ, downwards
    code      ŵ_j ← the number of the grid next to ŵ_j + R_j / H_jj
    scale     s_g ← s_g + (u · R_g) / (u H_gg uᵀ), u = ŵ_g / s_g        least squares, the codes being what they are

GPTQ decides on a weight before it knows what becomes of those after it, and on scales before any of them. Each step
here is the exact minimum along one coordinate (of codes: arXiv 2309.01885), rounded to what a file can hold and taken
only where the error falls, so no sweep does harm on what was read. H is damped as in GPTQ. For codes in groups; where
a row of 8 bits has one scale, there is nothing to gain.

Shapes: W (O, I), H (I, I), a group of N inputs: R_g, u (O, N), s (O,).
"""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from brickformer.quant.codes import Coded, assemble, give_back, unpack
from brickformer.quant.grid import Scheme
from brickformer.quant.hessian import DAMP

SWEEPS: Final = 4
"""Over all inputs. More change little."""

ROWS: Final = 2048
"""Outputs in work at once: they know nothing of each other."""


def polish(weight: Float[Tensor, "O I"], coded: Coded, hessian: Float[Tensor, "I I"], sweeps: int = SWEEPS) -> Coded:
    """The same matrix in codes and scales that answer no worse."""
    scheme = coded.scheme
    if scheme.size is None:
        return coded
    h = hessian.clone()
    h.diagonal().add_(DAMP * hessian.diagonal().mean())
    parts = []
    for start in range(0, len(weight), ROWS):
        at = slice(start, start + ROWS)
        codes, scale = unpack(coded.codes[at]), coded.scales[at].clone()
        zero = None if coded.zeros is None else unpack(coded.zeros[at])[:, : scale.shape[1]]
        _sweeps(weight[at].float(), scheme, codes, scale, zero, h, sweeps)
        parts.append((codes, scale, zero))
        give_back()
    return assemble(scheme, coded.inputs, parts)


def _sweeps(
    w: Float[Tensor, "R I"], scheme: Scheme, codes: Tensor, scale: Tensor, zero: Tensor | None, h: Tensor, sweeps: int
) -> None:
    """Codes (R, I, filled up) and scales (R, G), changed in place."""
    inputs, size = w.shape[1], scheme.size or 0
    groups = [(g, slice(g * size, min((g + 1) * size, inputs))) for g in range(scale.shape[1])]
    for _ in range(sweeps):
        slope = w.clone()
        for g, at in groups:
            z = None if zero is None else zero[:, g, None]
            slope[:, at] -= scheme.value(codes[:, at], scale[:, g, None], z)
        slope = slope @ h
        for g, at in groups:
            z = None if zero is None else zero[:, g]
            before = scheme.value(codes[:, at], scale[:, g, None], None if z is None else z[:, None])
            codes[:, at], scale[:, g] = _group(scheme, before, codes[:, at], scale[:, g], z, slope[:, at], h[at, at])
            after = scheme.value(codes[:, at], scale[:, g, None], None if z is None else z[:, None])
            slope.addmm_(after - before, h[at], alpha=-1.0)


def _group(
    scheme: Scheme, now: Tensor, codes: Tensor, s: Tensor, z: Tensor | None, slope: Tensor, h: Float[Tensor, "N N"]
) -> tuple[Tensor, Tensor]:
    """The codes (R, N) of a group one after another, then its scale (R,)."""
    now, codes, slope = now.t().contiguous(), codes.t().contiguous(), slope.t().contiguous()
    for j, own in enumerate(h.diagonal().tolist()):
        if own > 0.0:
            code = scheme.code(now[j] + slope[j] / own, s, z)
            change = scheme.value(code, s, z) - now[j]
            slope.addr_(h[j], change, alpha=-1.0)
            codes[j] = code
            now[j] += change
    unit = scheme.value(codes, torch.ones_like(s), z)
    pull = h @ unit
    along, curve = (slope * unit).sum(0), (pull * unit).sum(0)
    wide = s.float()
    found = (wide + along / torch.where(curve > 0.0, curve, 1.0)).to(s.dtype)
    step = found.float() - wide
    better = step * (2.0 * along - step * curve) > 0.0
    return codes.t(), torch.where(better, found, s)
