"""Rotary positions: turn queries and keys, so that their product knows only how far apart they are (arXiv 2104.09864).

    (x_a, x_b) turned by the angle p · r_i,    r_i = θ^(-2i/W),    i = 0 ... W/2 - 1

W is the turned part of a head, all of it by default. Pairs are (i, i + W/2) in the half layout (Llama) or (2i, 2i + 1)
in the interleaved one (GPT-J); the two differ by a permutation of the head's channels.

A model trained on short inputs reads longer ones better when the rates are slowed down:
    Linear   r / factor                                                            arXiv 2306.15595
    Ntk      θ becomes θ · factor^(W/(W-2)): fast rates stay, slow ones slow down   bloc97, 2023; arXiv 2309.00071, 3.1
    Yarn     fast rates stay, slow ones r / factor, a ramp between; scores sharpened  arXiv 2309.00071
    Llama3   the same idea with bounds in wavelengths                               arXiv 2407.21783, 3.4.2
    Dynamic  Ntk by the length of each input; up to the trained length it changes nothing

Shapes: x (B, H, N, K) -> the same. Angles are float32 whatever the model's type (float64 in float64).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import lru_cache
from typing import Final, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from brickformer.errors import BrickError, SpecError
from brickformer.mask import EMPTY, Span
from brickformer.positions.base import Position, PositionSpec
from brickformer.ranges import STEEP, check_positive, check_width
from brickformer.spec import Spec, spec

Layout = Literal["half", "interleaved"]
THETA: Final = 1e15


class RopeScaling(Spec):
    """Slot: how rates are slowed down for inputs longer than those of training."""

    __slots__ = ()

    @abstractmethod
    def rates(self, width: int, theta: float, dtype: torch.dtype) -> Float[Tensor, " R"]:
        """The W/2 rates of a head part of `width`, radians a token, computed in `dtype`."""

    def sharpen(self) -> float:
        """What queries and keys are multiplied with."""
        return 1.0

    def limit(self) -> int | None:
        """How many positions it can turn; None is no limit."""
        return None


@spec("rope")
class Rope(PositionSpec):
    """Rotary positions (arXiv 2104.09864).

    theta: base of the wavelengths. width: channels of a head that are turned, from the first on; default all.
    layout: which channels form a pair. scaling: for inputs longer than those of training.
    """

    reads_places = True

    theta: float = 10_000.0
    width: int | None = None
    layout: Layout = "half"
    scaling: RopeScaling | None = None

    def check(self) -> None:
        """The base is above 1, the width even."""
        if not 1.0 < self.theta <= THETA:
            raise self.refuse("theta", f"a base above 1, at most {THETA:g}")
        if self.width is not None and (self.width < 2 or self.width % 2):
            raise self.refuse("width", "an even number, at least 2: rotary turns pairs")

    def build(self, heads: int, width: int, causal: bool) -> Position:
        """Errors: SpecError when the turned width is odd or wider than a head."""
        turned = width if self.width is None else self.width
        if turned > width:
            raise self.refuse("width", f"at most the head width, {width}")
        if turned % 2:
            raise SpecError(
                f"rope: got a head width of {width}, expected an even one: rotary turns pairs. Change heads."
            )
        rates = self.scaling.rates if self.scaling else plain_rates
        types = (torch.float32, torch.float64)
        with torch.device("cpu"):  # they are read here, wherever the model is built
            made = {dtype: tuple(rates(turned, self.theta, dtype).tolist()) for dtype in types}
        return RopePosition(
            made,
            layout=self.layout,
            sharpen=self.scaling.sharpen() if self.scaling else 1.0,
            limit=self.scaling.limit() if self.scaling else None,
        )


def plain_rates(width: int, theta: float, dtype: torch.dtype) -> Float[Tensor, " R"]:
    """θ^(-2i/W), in the order of operations that Llama checkpoints were trained with."""
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=dtype) / width)


@final
class RopePosition(Position):
    """Turns the first 2·len(rates) channels of each head. rates: by the type of the angles, float32 and float64."""

    def __init__(
        self,
        rates: dict[torch.dtype, tuple[float, ...]],
        *,
        layout: Layout = "half",
        sharpen: float = 1.0,
        limit: int | None = None,
    ) -> None:
        super().__init__()
        self.rates, self.layout, self.sharpen, self.limit = rates, layout, sharpen, limit

    def rotate(self, x: Float[Tensor, "B H N K"], at: Span) -> Float[Tensor, "B H N K"]:
        """(B, H, N, K) -> (B, H, N, K). Errors: BrickError past the limit of a scaling that has one."""
        if self.limit is not None and at.end > self.limit:
            raise BrickError(
                f"Rope with Dynamic scaling: the input reaches position {at.end - 1}; expected less than {self.limit}, "
                "from where its rates depend on the input's length and no cache can keep a key. Use "
                "Rope(scaling=Ntk(factor)), or shorten the input."
            )
        cos, sin = self._table(at, x)
        turned = 2 * cos.shape[-1]
        if turned == x.shape[-1]:
            return self._turn(x, cos, sin)
        return torch.cat([self._turn(x[..., :turned], cos, sin), x[..., turned:]], dim=-1)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.layout == "half":
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)

    def _table(self, at: Span, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, (N, W/2) or (B or 1, 1, N, W/2)."""
        angle_type = x.dtype if x.dtype is torch.float64 else torch.float32
        rates = self.rates[angle_type]
        places = at.place  # may lie anywhere: no table
        if places is None and torch.compiler.is_compiling():  # a graph cannot look a table up, it would make it anew
            slots = at.positions(x.device)
            places = slots.masked_fill(slots == EMPTY, 0)
        if places is not None:
            angle = places.to(x.device)[:, None, :, None] * torch.tensor(rates, device=x.device, dtype=angle_type)
            return (angle.cos() * self.sharpen).to(x.dtype), (angle.sin() * self.sharpen).to(x.dtype)
        limit = 1 << max(at.end - 1, 255).bit_length()  # whole powers of two: few tables, shared by all layers
        cos, sin = _rope_table(rates, self.sharpen, limit, x.device, angle_type, x.dtype)
        if at.pos is None:
            return cos[at.start : at.end], sin[at.start : at.end]
        slots = at.pos.masked_fill(at.pos == EMPTY, 0)[:, None]
        return cos[slots], sin[slots]


@lru_cache(maxsize=64)
def _rope_table(
    rates: tuple[float, ...],
    sharpen: float,
    limit: int,
    device: torch.device,
    angle_type: torch.dtype,
    out: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """cos and sin of p · r for p < limit: (limit, W/2) each, computed in `angle_type`, kept as `out`."""
    with torch.inference_mode(False), torch.no_grad():  # a table first needed in inference serves training too
        rate = torch.tensor(rates, device=device, dtype=angle_type)
        angle = torch.arange(limit, device=device, dtype=angle_type)[:, None] * rate
        return (angle.cos() * sharpen).to(out), (angle.sin() * sharpen).to(out)


# ---- scalings -------------------------------------------------------------------------------------------------------


@spec("linear")
class Linear(RopeScaling):
    """Every rate divided by factor: positions are squeezed into the trained range (arXiv 2306.15595)."""

    factor: float

    def check(self) -> None:
        """A factor of at least 1."""
        _check_factor(self, self.factor)

    def rates(self, width: int, theta: float, dtype: torch.dtype) -> Float[Tensor, " R"]:
        """r / factor."""
        return plain_rates(width, theta, dtype) / self.factor


@spec("ntk")
class Ntk(RopeScaling):
    """A larger base: the fastest rate stays, the slowest is divided by factor (arXiv 2309.00071, 3.1)."""

    factor: float

    def check(self) -> None:
        """A factor of at least 1."""
        _check_factor(self, self.factor)

    def rates(self, width: int, theta: float, dtype: torch.dtype) -> Float[Tensor, " R"]:
        """Rates of the base θ · factor^(W/(W-2)); a single pair has one rate, 1."""
        base = theta if width == 2 else theta * self.factor ** (width / (width - 2))
        return plain_rates(width, base, dtype)


@spec("yarn")
class Yarn(RopeScaling):
    """Rates by how often they turn within the trained length (arXiv 2309.00071).

    original: length of the training inputs. fast, slow: turns above which a rate stays, below which it is divided by
    factor; between them a ramp. sharpening: of queries and keys; default 0.1 · ln(factor) + 1.
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    sharpening: float | None = None

    def check(self) -> None:
        """A factor of at least 1, fast above slow."""
        _check_factor(self, self.factor)
        check_width(self, "original", self.original)
        check_positive(self, "fast", self.fast)
        check_positive(self, "slow", self.slow)
        if self.sharpening is not None:
            check_positive(self, "sharpening", self.sharpening)
        if not self.fast > self.slow > 0.0:
            raise self.refuse("fast", f"more than slow={self.slow:g}, and slow above 0")

    def rates(self, width: int, theta: float, dtype: torch.dtype) -> Float[Tensor, " R"]:
        """A ramp between r and r / factor."""

        def index(turns: float) -> float:  # the i whose rate makes so many turns in the trained length
            return width * math.log(self.original / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

        low, high = max(math.floor(index(self.fast)), 0), min(math.ceil(index(self.slow)), width - 1)
        slowed = ((torch.arange(width // 2, dtype=dtype) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
        rate = plain_rates(width, theta, dtype)
        return rate / self.factor * slowed + rate * (1.0 - slowed)

    def sharpen(self) -> float:
        """0.1 · ln(factor) + 1 unless given."""
        return 0.1 * math.log(self.factor) + 1.0 if self.sharpening is None else self.sharpening


@spec("llama3")
class Llama3(RopeScaling):
    """Rates by their wavelength (arXiv 2407.21783): short ones stay, long ones r / factor, a ramp between.

    original: length of the training inputs. low, high: a wavelength is long above original / low, short below
    original / high.
    """

    factor: float = 8.0
    original: int = 8192
    low: float = 1.0
    high: float = 4.0

    def check(self) -> None:
        """A factor of at least 1, high above low."""
        _check_factor(self, self.factor)
        check_width(self, "original", self.original)
        check_positive(self, "low", self.low)
        check_positive(self, "high", self.high)
        if not self.high > self.low > 0.0:
            raise self.refuse("high", f"more than low={self.low:g}, and low above 0")

    def rates(self, width: int, theta: float, dtype: torch.dtype) -> Float[Tensor, " R"]:
        """A ramp between r and r / factor."""
        rate = plain_rates(width, theta, dtype)
        turns = self.original * rate / (2.0 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return (1.0 - kept) * rate / self.factor + kept * rate


@spec("dynamic")
class Dynamic(RopeScaling):
    """Nothing up to `original` tokens, refused above: there θ grows with each input's length (arXiv 2309.00071, 3.3).

    A key that a cache holds was turned when the input was shorter, so decoding would not agree with reading at once.
    `Ntk` with the factor of the longest input is the scaling that does. factor: kept for the file it came from.
    """

    factor: float
    original: int

    def check(self) -> None:
        """A factor of at least 1, some positions."""
        _check_factor(self, self.factor)
        check_width(self, "original", self.original)

    def rates(self, width: int, theta: float, dtype: torch.dtype) -> Float[Tensor, " R"]:
        """Those without scaling."""
        return plain_rates(width, theta, dtype)

    def limit(self) -> int | None:
        """The trained length."""
        return self.original


def _check_factor(of: Spec, factor: float) -> None:
    if not 1.0 <= factor <= STEEP:
        raise of.refuse("factor", f"at least 1 (1 changes nothing), at most {STEEP:,.0f}")
