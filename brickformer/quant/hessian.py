"""What a matrix is fed: H = mean x xᵀ over calibration data, gathered while the model reads it.

    ‖(Ŵ - W) x‖² over the data = tr (Ŵ - W) H (Ŵ - W)ᵀ

so the error of the outputs is known from H alone, without keeping inputs. With it D = mean (x' - x) xᵀ, x' what another
model feeds the same matrix (see drift.py). In float32, two matrices a layer: no more of them at a time than fit into
`budget` bytes.

Shapes: x, x' (N, I), H, D (I, I), W (O, I).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from brickformer.errors import BrickError
from brickformer.quant.codes import Coded, row_blocks

ALIKE: Final = 0.5
"""Square distance of two inputs, as a part of the square of one, below which they are of one token. 2: strangers."""

DAMP: Final = 0.01
"""λ as a part of the mean of H's diagonal: what is added to it, lest data that is short be trusted too much."""

PASSES: Final = 24
"""How often at most all data are read, where memory allows: what is gathered together knows nothing of each other."""

Reading = Callable[[nn.Module], object]
"""Has the model read one batch of calibration data."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Fed:
    """What a matrix was fed. h: mean x xᵀ, d: mean (x' - x) xᵀ, x' of the model beside it, or None: (I, I)."""

    h: Tensor
    d: Tensor | None = None


@final
class _Sums:
    """Gathers x xᵀ of one module, and (x' - x) xᵀ where `other` is told every x' before."""

    def __init__(self, inputs: int, device: torch.device, beside: bool) -> None:
        self.h = torch.zeros(inputs, inputs, device=device)
        self.d = torch.zeros_like(self.h) if beside else None
        self.others: list[Tensor] = []
        self.count = 0

    def other(self, x: Tensor) -> None:
        self.others.append(_flat(x))

    def own(self, x: Tensor) -> None:
        x = _flat(x)
        self.h.addmm_(x.t(), x)
        self.count += len(x)
        if self.d is not None and self.others:
            other = self.others.pop(0)
            if other.shape == x.shape and (other - x).square().sum() < ALIKE * x.square().sum():
                self.d.addmm_((other - x).t(), x)

    def mean(self) -> Fed:
        """What was gathered, in its place: these matrices may be larger than the map's own."""
        count = max(1, self.count)
        return Fed(self.h.div_(count), None if self.d is None else self.d.div_(count))


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).float()


def stages(model: nn.Module, names: Sequence[str], readings: Sequence[Reading]) -> list[list[str]]:
    """Names of modules in the order in which the first batch meets them, neighbours that are fed one tensor together;
    those it does not meet are left out."""
    known = dict(model.named_modules())
    met: list[list[str]] = []
    last: Tensor | None = None

    def note(name: str, x: Tensor) -> None:
        nonlocal last
        if not any(name in stage for stage in met):
            if x is last:
                met[-1].append(name)
            else:
                met.append([name])
            last = x

    handles = [_fed(known[n], partial(note, n)) for n in names]
    with _removed(handles), torch.no_grad():
        readings[0](model)
    return met


def gather(
    model: nn.Module, names: Sequence[str], readings: Sequence[Reading], beside: nn.Module | None = None
) -> dict[str, Fed]:
    """What each of these linear maps is fed; beside: a model with maps of the same names, to compare with.

    Inputs that are too far from each other to be of one token (an expert was chosen for another) are not compared. A
    reading ends when each map was met as often as in the first one: what comes after these maps is not computed.
    Errors: BrickError: inputs that are not finite.
    """
    known = dict(model.named_modules())
    maps: dict[str, Any] = {name: known[name] for name in names}
    sums = {name: _Sums(m.in_features, m.weight.device, beside is not None) for name, m in maps.items()}
    tally = _Tally(names)
    handles = [_fed(m, sums[name].own) for name, m in maps.items()]
    handles += [_fed(m, partial(tally.count, name)) for name, m in maps.items()]
    if beside is not None:
        others = dict(beside.named_modules())
        handles += [_fed(others[name], sums[name].other) for name in names]
        handles += [_fed(others[name], partial(tally.count, name)) for name in names]
    with _removed(handles), torch.no_grad():
        for reading in readings:
            if beside is not None:
                tally.read(reading, beside)
            tally.read(reading, model)
            for s in sums.values():
                s.others.clear()
    for name, found in sums.items():
        if not math.isfinite(float(found.h.sum())) and not found.h.isfinite().all():
            raise BrickError(f"{name}: its inputs are not finite on the calibration data. Is the model trained?")
    return {name: found.mean() for name, found in sums.items()}


@final
class _Enough(BaseException):
    """All that was asked for is known."""


@final
class _Tally:
    """Has readings go on only until all maps were met as often as in the first reading."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.first = names, Counter[str]()
        self.met = Counter[str]()

    def count(self, name: str, x: Tensor) -> None:
        self.met[name] += 1
        if all(self.met[n] >= self.first[n] > 0 for n in self.names):
            raise _Enough

    def read(self, reading: Reading, model: nn.Module) -> None:
        self.met.clear()
        try:
            reading(model)
        except _Enough:
            return
        self.first = self.first or Counter(self.met)


def _fed(linear: nn.Module, told: Callable[[Tensor], None]) -> RemovableHandle:
    """Tell what a map is fed, by its place or, as `nn.Linear` names it, as `input`."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        told(args[0] if args else named["input"])

    return linear.register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def _removed(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks are gone afterwards, whatever happens."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def runs(stages: Sequence[Sequence[str]], most: int = PASSES) -> list[list[str]]:
    """At most so many runs of neighbouring stages, as even as can be."""
    size = -(-len(stages) // most)
    return [[name for stage in stages[at : at + size] for name in stage] for at in range(0, len(stages), size or 1)]


def in_budget(widths: Mapping[str, int], budget: int) -> list[list[str]]:
    """Runs of names whose H and D, of these widths, together take at most `budget` bytes; at least one name in each."""
    out: list[list[str]] = []
    room = -1
    for name, width in widths.items():
        need = 8 * width**2
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
