"""Grids: the few numbers a weight may be, and how a row of weights finds its scale.

    w ≈ s · (c - z)      int8: c - z from -127 to 127, one s a row;  int4: c from 0 to 15, one s (and z) a group
    w ≈ s · level[c]     NF4: 16 quantiles of a normal distribution (arXiv 2305.14314, appendix E)

Scales are kept in bfloat16: half the bytes, the range of float32, the type in which CPU and GPU kernels want them. They
are rounded before the codes are chosen, so that their rounding costs nothing more. A symmetric group tries both signs
and some shorter scales and takes the least square error: the longest weight is worth clipping where that helps the
others. A group of zeros has scale 0.

Shapes: w (O, G, N): O rows, G groups of N weights; s, z (O, G); codes c as uint8 (int8: c - z as int8).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final, final

import torch
from jaxtyping import Float
from torch import Tensor

from brickformer.spec import Spec, spec

SHRINK: Final = tuple(1.0 - 0.025 * i for i in range(11))
"""Scales that are tried, as parts of the one that clips nothing."""


class Scheme(Spec):
    """Slot: how weights become small numbers. bits: of a code. size: N, weights that share a scale; None is a row."""

    __slots__ = ()

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a code: 4 or 8."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """N."""

    @property
    def shifts(self) -> bool:
        """Whether groups have a zero point of their own."""
        return False

    @property
    def step(self) -> float:
        """From one code to the next, in units of the scale; the mean where codes lie unevenly."""
        return 1.0

    @abstractmethod
    def fit(self, w: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scales (O, G) in bfloat16, zero points (O, G) in uint8 or None. importance: (G, N), of each input."""

    @abstractmethod
    def code(self, w: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The nearest codes, w and scales alike in shape or broadcast."""

    @abstractmethod
    def value(self, code: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """What codes stand for, in float32."""


@final
@spec("int8")
class Int8(Scheme):
    """8 bits, symmetric, one scale for each output channel."""

    @property
    def bits(self) -> int:
        """8."""
        return 8

    @property
    def size(self) -> int | None:
        """A whole row."""
        return None

    def fit(self, w: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Nothing is clipped: at 8 bits the longest weight costs little."""
        return rounded_up(w.abs().amax(-1) / 127.0), None

    def code(self, w: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """int8."""
        return (w / _safe(scale)).round_().clamp_(-127, 127).to(torch.int8)

    def value(self, code: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """s c."""
        return code.float() * scale.float()


@final
@spec("int4")
class Int4(Scheme):
    """4 bits in groups. group: weights of a row that share a scale. symmetric: False gives groups a zero point too."""

    group: int = 32
    symmetric: bool = True

    def check(self) -> None:
        """A power of two that kernels know."""
        _check_group(self, self.group)

    @property
    def bits(self) -> int:
        """4."""
        return 4

    @property
    def size(self) -> int | None:
        """The group."""
        return self.group

    @property
    def shifts(self) -> bool:
        """Unless symmetric."""
        return not self.symmetric

    def fit(self, w: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Symmetric: s = ± the longest weight / 8, shortened; else from the lowest (or 0) to the highest (or 0)."""
        if self.symmetric:
            low, high = w.amin(-1), w.amax(-1)
            longest = torch.where(-low > high, low, high)
            tried = [longest * part / sign for part in SHRINK for sign in (-8.0, 7.0)]
            return _best(self, w, importance, [(_nearest(s), None) for s in tried])
        low, high = w.amin(-1).clamp_max(0.0), w.amax(-1).clamp_min(0.0)
        pairs = []
        for part in SHRINK:
            scale = rounded_up((high - low) * part / 15.0)
            pairs.append((scale, (-low * part / _safe(scale)).round().clamp(0, 15).to(torch.uint8)))
        return _best(self, w, importance, pairs)

    def code(self, w: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """uint8 from 0 to 15; without a zero point of their own, groups have 8."""
        shift = 8.0 if zero is None else zero.float()
        return (w / _safe(scale)).round_().add_(shift).clamp_(0, 15).to(torch.uint8)

    def value(self, code: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """s (c - z)."""
        return (code.float() - (8.0 if zero is None else zero.float())) * scale.float()


@final
@spec("nf4")
class NF4(Scheme):
    """4 bits in groups, levels at the quantiles of a normal distribution (arXiv 2305.14314). group: as in Int4."""

    group: int = 64

    def check(self) -> None:
        """A power of two."""
        _check_group(self, self.group)

    @property
    def bits(self) -> int:
        """4."""
        return 4

    @property
    def size(self) -> int | None:
        """The group."""
        return self.group

    @property
    def step(self) -> float:
        """Of 16 levels from -1 to 1."""
        return 2.0 / 15.0

    def fit(self, w: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """s = the longest weight, shortened."""
        longest = w.abs().amax(-1)
        return _best(self, w, importance, [(_nearest(longest * part), None) for part in SHRINK])

    def code(self, w: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """uint8 from 0 to 15: the nearest level."""
        levels = LEVELS.to(w.device)
        between = (levels[1:] + levels[:-1]) / 2
        return torch.bucketize((w / _safe(scale)).contiguous(), between).to(torch.uint8)

    def value(self, code: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """s level[c]."""
        return LEVELS.to(code.device)[code.int()] * scale.float()


def nf4_levels() -> Float[Tensor, " 16"]:
    """8 quantiles above 0, 7 below and 0 itself, of evenly spaced probabilities, the largest scaled to 1."""
    with torch.inference_mode(False), torch.device("cpu"):
        end = (1 - 1 / 32 + 1 - 1 / 30) / 2  # the mean of the outermost probabilities of 16 and of 15 levels
        above = torch.special.ndtri(torch.linspace(end, 0.5, 9, dtype=torch.float64)[:-1])
        below = -torch.special.ndtri(torch.linspace(end, 0.5, 8, dtype=torch.float64)[:-1])
        levels = torch.cat([below, torch.zeros(1, dtype=torch.float64), above]).sort().values
        return (levels / levels[-1]).float()


LEVELS: Final = nf4_levels()
"""Of the codes 0 to 15."""


def rounded_up(scale: Tensor) -> Tensor:
    """In bfloat16, never below: the longest weight must still have a code."""
    near = scale.to(torch.bfloat16)
    return torch.where(near.float() < scale, (scale * (1.0 + 2.0**-8)).to(torch.bfloat16), near)


def _nearest(scale: Tensor) -> Tensor:
    return scale.to(torch.bfloat16)


def _safe(scale: Tensor) -> Tensor:
    """To divide by."""
    wide = scale.float()
    return torch.where(wide == 0.0, 1.0, wide)


def _best(
    scheme: Scheme, w: Tensor, importance: Tensor | None, tried: Sequence[tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """Of some scales (and zero points), for each group the ones with the least square error."""
    scale, zero = tried[0]
    least: Tensor | None = None
    for s, z in tried:
        wide = None if z is None else z[..., None]
        off = scheme.value(scheme.code(w, s[..., None], wide), s[..., None], wide).sub_(w).square_()
        error = (off if importance is None else off.mul_(importance)).sum(-1)
        if least is None:
            least = error
            continue
        better = error < least
        least, scale = torch.where(better, error, least), torch.where(better, s, scale)
        zero = None if z is None or zero is None else torch.where(better, z, zero)
    return scale, zero


def _check_group(of: Spec, group: int) -> None:
    if group < 16 or group & (group - 1) or group > 256:
        raise of.refuse("group", "16, 32, 64, 128 or 256")
