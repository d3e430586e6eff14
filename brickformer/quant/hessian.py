"""What a matrix is fed: H = mean x xᵀ over calibration data, gathered while the model reads it.

    ‖(Ŵ - W) x‖² over the data = tr (Ŵ - W) H (Ŵ - W)ᵀ

so the error of the outputs is known from H alone, without keeping inputs. In float32, a matrix a layer: no more of them
at a time than fit into `budget` bytes.

Shapes: x (N, I), H (I, I), W (O, I).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from brickformer.errors import BrickError
from brickformer.quant.codes import Coded, row_blocks

DAMP: Final = 0.01
"""λ as a part of the mean of H's diagonal: what is added to it, lest data that is short be trusted too much."""

Reading = Callable[[nn.Module], object]
"""Has the model read one batch of calibration data."""


@final
class _Sum:
    """Gathers x xᵀ of one module."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.h = torch.zeros(inputs, inputs, device=device)
        self.count = 0

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach().reshape(-1, args[0].shape[-1]).float()
        self.h.addmm_(x.t(), x)
        self.count += len(x)


def order_of_calls(model: nn.Module, names: Sequence[str], readings: Sequence[Reading]) -> list[str]:
    """Names of modules in the order in which the first batch meets them; those it does not meet are left out."""
    met: list[str] = []
    known = dict(model.named_modules())
    handles = [known[name].register_forward_pre_hook(lambda *_, n=name: met.append(n)) for name in names]
    try:
        with torch.no_grad():
            readings[0](model)
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(met))


def gather(model: nn.Module, names: Sequence[str], readings: Sequence[Reading]) -> dict[str, Tensor]:
    """H of each of these linear maps. Errors: BrickError: inputs that are not finite."""
    known = dict(model.named_modules())
    maps: dict[str, Any] = {name: known[name] for name in names}
    sums = {name: _Sum(m.in_features, m.weight.device) for name, m in maps.items()}
    handles = [m.register_forward_pre_hook(sums[name]) for name, m in maps.items()]
    try:
        with torch.no_grad():
            for reading in readings:
                reading(model)
    finally:
        for handle in handles:
            handle.remove()
    for name, found in sums.items():
        if not found.h.isfinite().all():
            raise BrickError(f"{name}: its inputs are not finite on the calibration data. Is the model trained?")
    return {name: found.h / max(1, found.count) for name, found in sums.items()}


def in_budget(widths: Mapping[str, int], budget: int) -> list[list[str]]:
    """Runs of names whose H, of these widths, together take at most `budget` bytes; at least one name in each."""
    out: list[list[str]] = []
    room = -1
    for name, width in widths.items():
        need = 4 * width**2
        if need > room:
            out.append([])
            room = budget
        out[-1].append(name)
        room -= need
    return out


def output_error(weight: Tensor, coded: Coded, divide: Tensor | None = None, hessian: Tensor | None = None) -> float:
    """√(‖(Ŵ - W) x‖² / ‖W x‖²) over the data; without H: ‖Ŵ - W‖ / ‖W‖. 0 where W is 0. weight: (O, I)."""
    off = whole = 0.0
    for rows in row_blocks(*weight.shape):
        w, again = weight[rows].float(), coded.rows(rows)
        again = again.sub_(w) if divide is None else again.div_(divide).sub_(w)
        for x, sign in ((again, 1), (w, 0)):
            size = float((x if hessian is None else x @ hessian).mul(x).sum())
            off, whole = off + sign * size, whole + (1 - sign) * size
    return (max(0.0, off) / whole) ** 0.5 if whole > 0.0 else 0.0
