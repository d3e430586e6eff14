"""Coded weights: the packed numbers of one matrix, as they lie in memory and in files.

    int8     codes (O, I) int8                     scales (O, 1)
    4 bits   codes (O, G·N/2) uint8, two in a byte, the lower half first
             scales (O, G), zeros (O, ⌈G/2⌉) packed likewise

Rows whose length the group does not divide are filled up with zeros, which have a code of their own, and cut again
when they are read. Everything is done a few rows at a time: no second matrix in float32 is ever there.

Shapes: O outputs, I inputs, G groups of N.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from brickformer.errors import BrickError
from brickformer.quant.grid import Scheme

BLOCK: Final = 1 << 18
"""Weights in work at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """One matrix. inputs: I, before it was filled up."""

    scheme: Scheme
    inputs: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def same(self, other: Coded) -> bool:
        """Whether codes and scales are those of `other`, of the same zero points."""
        return torch.equal(self.codes, other.codes) and torch.equal(self.scales, other.scales)

    def weight(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "O I"]:
        """The matrix again, in `dtype`: what all kernels are compared with."""
        out = torch.empty(len(self.codes), self.inputs, dtype=dtype, device=self.codes.device)
        for rows in row_blocks(*out.shape):
            out[rows] = self.rows(rows).to(dtype)
        return out

    def rows(self, at: slice | Tensor) -> Float[Tensor, "R I"]:
        """Some rows, in float32."""
        scales = self.scales[at][..., None]
        codes = self.codes[at] if self.scheme.bits == 8 else unpack(self.codes[at])
        zeros = None if self.zeros is None else unpack(self.zeros[at])[:, : scales.shape[1], None]
        groups = codes.reshape(len(codes), scales.shape[1], codes.shape[1] // scales.shape[1])
        return self.scheme.value(groups, scales, zeros).flatten(1)[:, : self.inputs]


def sizes(scheme: Scheme, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """Shape and type of each tensor of a coded matrix."""
    if scheme.size is None:
        return {"codes": ((outputs, inputs), torch.int8), "scales": ((outputs, 1), torch.bfloat16)}
    groups = -(-inputs // scheme.size)
    made = {
        "codes": ((outputs, groups * scheme.size // 2), torch.uint8),
        "scales": ((outputs, groups), torch.bfloat16),
    }
    if scheme.shifts:
        made["zeros"] = ((outputs, (groups + 1) // 2), torch.uint8)
    return made


def encode(weight: Float[Tensor, "O I"], scheme: Scheme, importance: Tensor | None = None) -> Coded:
    """Round to nearest. importance: (I,) what an error in each input's weights costs; default all alike."""
    weight = weight.detach()
    outputs, inputs = weight.shape
    parts = []
    weighed = None if importance is None else grouped(importance[None].float(), scheme)[0]
    for rows in row_blocks(outputs, inputs):
        w = grouped(weight[rows].float(), scheme)
        scale, zero = scheme.fit(w, weighed)
        codes = scheme.code(w, scale[..., None], None if zero is None else zero[..., None])
        parts.append((codes.flatten(1), scale, zero))
    return assemble(scheme, inputs, parts)


def assemble(scheme: Scheme, inputs: int, parts: list[tuple[Tensor, Tensor, Tensor | None]]) -> Coded:
    """One coded matrix from blocks of rows: codes one a byte, scales, zero points."""
    codes, scales = [p[0] for p in parts], torch.cat([p[1] for p in parts])
    zeros = [pack(p[2]) for p in parts if p[2] is not None]
    packed = codes if scheme.bits == 8 else [pack(c) for c in codes]
    return Coded(scheme, inputs, torch.cat(packed), scales, torch.cat(zeros) if zeros else None)


def grouped(w: Float[Tensor, "O I"], scheme: Scheme) -> Float[Tensor, "O G N"]:
    """Rows cut into groups, filled up with zeros."""
    size = scheme.size or w.shape[1]
    return F.pad(w, (0, -w.shape[1] % size)).view(len(w), -1, size)


def pack(codes: UInt8[Tensor, "O N"]) -> UInt8[Tensor, "O M"]:
    """Two codes of 4 bits in a byte, the first in the lower half; an odd row ends in a half byte of 0."""
    codes = F.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed: UInt8[Tensor, "O M"]) -> UInt8[Tensor, "O N"]:
    """The codes of 4 bits, one a byte; twice as many columns."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def row_blocks(outputs: int, inputs: int) -> Iterator[slice]:
    """Slices of rows of at most BLOCK weights."""
    step = max(1, BLOCK // max(1, inputs))
    return (slice(at, min(at + step, outputs)) for at in range(0, outputs, step))


def check_finite(tensor: Tensor, name: str) -> None:
    """Errors: BrickError naming a tensor with numbers that are not finite, and the first of them."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    lines = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
    for rows in row_blocks(*lines.shape):
        good = lines[rows].isfinite()
        if not good.all():
            row, column = (~good).nonzero()[0].tolist()
            value = float(lines[rows][row, column])
            at = [rows.start + row, column][-tensor.ndim :]
            raise BrickError(
                f"{name} {at} is {value}; expected finite numbers. The model is broken: restore it from a copy, or "
                "train again."
            )


def give_back() -> None:
    """Memory that is free goes back to the system: glibc keeps what lies between things that are in use."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
