"""Products: y = x Wᵀ on coded weights, the slow exact way everywhere, a fast one where the machine has one.

    exact     the matrix in the type of x, a product: any device, any scheme, gradients too
    int8pack  torch._weight_int8pack_mm                       CPU and CUDA, int8, x in bfloat16
    int4pack  torch's _weight_int4pack_mm_for_cpu             CPU, int4 of either kind, x in bfloat16
    tinygemm  torch._weight_int4pack_mm                       CUDA from compute capability 8, int4, x in bfloat16
    gemv_4bit of bitsandbytes, where it is installed          CUDA, NF4, one row of x in bfloat16

The fast ones read weights as they are packed and are for few rows at a time (a decode step, a short prompt); many rows
keep the arithmetic busy, and there the matrix is made once for all of them. The fast ones sum in float32 what was
rounded to bfloat16:

    |y - exact| ≤ 2⁻⁸ · (|x| |W|ᵀ + |y|),   plus 2⁻⁸ · 8 s |x| of each group where groups have zero points of their own

A compiled decode step multiplies one row with int8 codes on a CPU in a loop of its own, exactly: see product.py.

Kernels want layouts of their own; the copy is made at first use and takes as many bytes again as 4-bit codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from brickformer.product import spelled_out
from brickformer.quant.codes import Coded, unpack
from brickformer.quant.grid import LEVELS, NF4, Int4, Int8

FEW: Final = {"cpu": 64}
"""Rows up to which reading packed weights is quicker than making the matrix, by device (bench/product.py); else 8."""
_EXACT: Final[list[None]] = []
"""As many as there are `exactly` at work, in all threads."""

LANES: Final = 32
ROWS: Final = 16
ALIGNED: Final = 64

Product = Callable[[Tensor], Tensor]
"""x (R, I) in bfloat16 -> (R, O) in bfloat16."""


def choose(coded: Coded) -> tuple[str, str]:
    """(name of the product for few rows, why)."""
    device = coded.codes.device.type
    match coded.scheme:
        case Int8():
            if device == "cpu" or (device == "cuda" and _on_cuda("aten::_weight_int8pack_mm")):
                return "int8pack", "torch._weight_int8pack_mm"
            return "exact", f"this torch has no product of int8 weights for {device}"
        case Int4(group=group):
            if group < 32:
                return "exact", f"kernels know groups of 32, 64, 128 and 256, not {group}"
            if device == "cpu":
                return "int4pack", "torch's _weight_int4pack_mm_for_cpu"
            if device == "cuda" and torch.cuda.get_device_capability(coded.codes.device)[0] >= 8:
                return "tinygemm", "torch._weight_int4pack_mm"
            return "exact", f"torch has no product of 4-bit weights for this {device}"
        case NF4(group=group) if device == "cuda" and group >= 32:
            if find_spec("bitsandbytes"):
                return "gemv_4bit", "bitsandbytes, for one row"
            return "exact", "bitsandbytes, which has a product of nf4 weights for cuda, is not installed"
        case other:
            return "exact", f"torch has no product of {other.kind} weights"


def few(device: torch.device) -> int:
    """The rows of x that are few."""
    return 0 if _EXACT else FEW.get(device.type, 8)


@contextmanager
def exactly() -> Iterator[None]:
    """Inside, in all of this process, no rows are few: products are exact, for what judges codes by their answers."""
    _EXACT.append(None)
    try:
        yield
    finally:
        _EXACT.pop()


def made(coded: Coded) -> Product | None:
    """The product for few rows, its layout prepared; None where there is only the exact one."""
    match choose(coded)[0]:
        case "int8pack":
            return _int8(coded)
        case "int4pack":
            return _int4(coded, 16, lambda c: torch.ops.aten._convert_weight_to_int4pack_for_cpu(c, 1), _CPU)
        case "tinygemm":
            return _int4(coded, 8, _for_cuda, _CUDA)
        case "gemv_4bit":
            return _nf4(coded)
        case _:
            return None


def spells(coded: Coded) -> bool:
    """Whether the compiler reads these codes faster than a kernel does."""
    return coded.codes.dtype is torch.int8 and coded.codes.device.type == "cpu"


def one_row(x: Tensor, coded: Coded, bias: Tensor | None, divide: Tensor | None) -> Tensor:
    """One row (..., I) -> (..., O), for the compiler."""
    row = x.float() if divide is None else x.float() / divide
    y = spelled_out(row, coded.codes, None) * coded.scales[:, 0]
    return (y if bias is None else y + bias).to(x.dtype)


_CPU: Any = torch.ops.aten._weight_int4pack_mm_for_cpu
_CUDA: Any = torch.ops.aten._weight_int4pack_mm


def _int8(coded: Coded) -> Product:
    """The kernel checks nothing: it reads whole lanes of inputs, past the end of a row, some outputs at a time, past
    the last, and inputs from aligned memory only. So it is given whole lanes and rows, in memory of their own."""
    fill, outputs = -coded.inputs % LANES, len(coded.codes)
    more = -outputs % ROWS
    codes, scales = F.pad(coded.codes, (0, fill, 0, more)), F.pad(coded.scales[:, 0], (0, more))
    if not fill and not more and coded.codes.data_ptr() % ALIGNED == 0:
        codes = coded.codes

    def product(x: Tensor) -> Tensor:
        if fill:
            x = F.pad(x, (0, fill))
        elif x.data_ptr() % ALIGNED:
            x = x.clone()
        y = torch._weight_int8pack_mm(x, codes, scales)
        return y[:, :outputs] if more else y

    return product


def _for_cuda(codes: Tensor) -> Tensor:
    packed: Any = torch.ops.aten._convert_weight_to_int4pack
    out: Tensor = packed((codes[:, 0::2] << 4 | codes[:, 1::2]).to(torch.uint8), 8)
    return out


def _int4(coded: Coded, rows: int, layout: Callable[[Tensor], Tensor], multiply: Any) -> Product:
    """w = s (c - 8) + o with o = s (8 - z). Kernels take outputs in `rows`: more rows of zeros are added and cut."""
    codes, scales = unpack(coded.codes).int(), coded.scales
    outputs, size = len(codes), coded.scheme.size or 0
    assert size, "int4 has groups"
    offsets = torch.zeros_like(scales)
    if coded.zeros is not None:
        offsets = (8.0 - unpack(coded.zeros)[:, : scales.shape[1]].float()).mul(scales.float()).to(scales.dtype)
    more = -outputs % rows
    tall = 1024 if multiply is _CUDA else 1  # inputs that CUDA's kernel takes at once
    wide = -codes.shape[1] % tall
    codes = F.pad(codes, (0, wide, 0, more), value=8)
    both = torch.stack([scales.t(), offsets.t()], dim=-1)  # (G, O, 2)
    both = F.pad(both, (0, 0, 0, more, 0, wide // size)).contiguous()
    packed, inputs = layout(codes), codes.shape[1]
    fill = inputs - coded.inputs

    def product(x: Tensor) -> Tensor:
        y: Tensor = multiply(F.pad(x, (0, fill)) if fill else x, packed, size, both)
        return y[:, :outputs] if more else y

    return product


def _nf4(coded: Coded) -> Product:
    """bitsandbytes reads one row of x."""
    import bitsandbytes  # type: ignore[import-not-found]  # noqa: F401  (it registers its products)

    (codes, scales, size, shape), levels = for_bitsandbytes(coded), LEVELS.to(coded.codes.device)
    fill = shape[1] - coded.inputs

    def product(x: Tensor) -> Tensor:
        if len(x) > 1:
            return F.linear(x, coded.weight(x.dtype))
        y: Tensor = torch.ops.bitsandbytes.gemv_4bit(F.pad(x, (0, fill)), codes, shape, scales, levels, size)
        return y

    return product


def for_bitsandbytes(coded: Coded) -> tuple[Tensor, Tensor, int, tuple[int, int]]:
    """(codes, scales, group, shape): row after row, two codes in a byte, the first in the upper half."""
    shape, size = (len(coded.codes), 2 * coded.codes.shape[1]), coded.scheme.size
    assert size, "NF4 has groups"
    return (coded.codes << 4 | coded.codes >> 4).reshape(-1, 1), coded.scales.float().flatten(), size, shape


def _on_cuda(name: str) -> bool:
    """Whether torch was built with this product for CUDA."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"))
