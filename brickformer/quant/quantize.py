"""quantize: put coded matrices in the place of linear maps, one at a time, so that no second model is ever in memory.

    quantize(model, Int4())                                       round to nearest
    quantize(model, Int4(), Calibration(readings))                by what the model reads: drift, GPTQ, polish
    quantize(model, Int8(), keep=["stack.layers.0.mixer.out"])    some matrices stay as they are

Any `nn.Linear` of any model. Left as they are: routers of experts (a close call must not depend on rounding), what
`keep` names, the head where that is asked for, maps that other code reads past their forward (torch's own
MultiheadAttention), classes of others whose forward does more than x Wᵀ + b. Hooks go on to what takes
the place. A head tied to a token table leaves it, unless the table is coded with it (`table`): then both read the same
codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Literal, assert_never, final, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from brickformer.embed import LogitHead, TokenEmbedding
from brickformer.errors import BrickError, nearest
from brickformer.linear import FusedLinear, is_plain
from brickformer.moe import TopKRouter
from brickformer.quant.away import AwayLinear
from brickformer.quant.awq import awq
from brickformer.quant.codes import Coded, check_finite, encode, give_back
from brickformer.quant.conditions import as_called, by_data
from brickformer.quant.drift import followed, twin
from brickformer.quant.gptq import gptq
from brickformer.quant.grid import Int8, Scheme
from brickformer.quant.hessian import Fed, Reading, gather, in_budget, output_error, runs, stages
from brickformer.quant.linear import QuantEmbedding, QuantLinear
from brickformer.quant.polish import polish
from brickformer.quant.tune import logits, tune
from brickformer.surgery import carry_hooks, get, places, replace

Method = Literal["gptq", "awq"]
Heads = Literal["same", "int8", "keep"]
"""What becomes of the map to logits: coded as all the rest, in 8 bits, or left as it is."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Data to round by. readings: each has the model read one batch. method: "gptq" or "awq".

    tune: steps in which rounding and scales of all matrices are then learned together (tune.py), each on one reading,
    in turn; readings return logits then, and it takes the memory of training.
    """

    readings: Sequence[Reading]
    method: Method = "gptq"
    tune: int = 0

    def check(self) -> None:
        """Errors: BrickError: no data, no such method, no number of steps."""
        if not self.readings:
            raise BrickError("quantize: got no calibration data, expected at least one batch.")
        if self.method not in get_args(Method):
            raise BrickError(f"quantize: method: got {self.method!r}, expected 'gptq' or 'awq'.")
        if type(self.tune) is not int or self.tune < 0:
            raise BrickError(f"quantize: tune: got {self.tune!r}, expected a number of steps, 0 or more.")


@final
@dataclass(frozen=True, slots=True)
class Matrix:
    """What became of one matrix. error: √(‖Δy‖² / ‖y‖²) of its outputs where data was read (against
    those it was to give, see drift.py), else of its weights.

    kind: of the scheme, or "kept". before, after: bytes. tuned: whether tuning changed it, and was not taken back.
    """

    name: str
    shape: tuple[int, int]
    kind: str
    error: float
    before: int
    after: int
    tuned: bool = False


def quantize(
    model: nn.Module,
    scheme: Scheme,
    calibration: Calibration | None = None,
    *,
    keep: Iterable[str] = (),
    head: Heads = "same",
    table: bool = False,
    progress: Callable[[int, int], None] = lambda done, whole: None,
) -> list[Matrix]:
    """Code the matrices of `model`, in place; what became of each, in the model's order.

    keep: names of modules that stay as they are, with all inside them. head: see `Heads`. table: whether token tables
    are coded too. progress: told how many matrices, and steps of tuning, of how many are done. Nothing changes unless
    all weights are finite; inputs that are not finite on calibration data leave a model that is coded up to there.
    Errors: BrickError: nothing to code, coded already, weights that are not finite, an unknown name.
    """
    keep = tuple(keep)
    if head not in get_args(Heads):
        raise BrickError(f"quantize: head: got {head!r}, expected 'same', 'int8' or 'keep'.")
    names = list(linears(model, keep, head=head != "keep"))
    tables = [p.name for p in places(model, TokenEmbedding) if not _kept(p.name, keep)] if table else []
    steps = 0
    if calibration is not None:
        calibration.check()
        steps = calibration.tune
        calibration = dataclasses.replace(calibration, readings=as_called(calibration.readings))
    whole = len(names) + len(tables) + steps
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    kept = [
        Matrix(p.name, _shape(p.module.weight), "kept", 0.0, _bytes(p.module), _bytes(p.module))
        for p in places(model, nn.Linear, *([TokenEmbedding] if table else []))
        if isinstance(p.module, (nn.Linear, TokenEmbedding)) and p.name not in {*names, *tables}
    ]
    for name, tensor in model.named_parameters():
        check_finite(tensor.detach(), name)
    heads = {id(p.module.project) for p in places(model, LogitHead) if isinstance(p.module, LogitHead)}
    wide = {name for name in names if head == "int8" and id(get(model, name)) in heads}
    work = _Work(model, scheme, wide, {}, lambda done: progress(done, whole))
    with torch.no_grad(), nullcontext() if calibration is None else by_data(model, names):
        full = None if calibration is None else twin(model)
        for name in tables:
            work.code_table(name, names)
        names = [name for name in names if name not in work.report]
        if calibration is not None and full is not None and names:
            work.calibrated(names, calibration, full)
        for name in names:
            if name not in work.report:  # no data was read, or none of it comes here: an expert that is never chosen
                work.to_nearest(name)
        if calibration is not None and full is not None and steps and names:
            work.tuned(names, calibration, full)
    return sorted([*work.report.values(), *kept], key=lambda m: order[m.name])


@dataclass(slots=True)
class _Work:
    """A model being coded. It holds no module for longer than a step, so that what is replaced is freed."""

    model: nn.Module
    scheme: Scheme
    wide: set[str]
    report: dict[str, Matrix]
    tell: Callable[[int], None]
    budget: int = 0

    def of(self, name: str) -> Scheme:
        """How a matrix is coded."""
        return Int8() if name in self.wide else self.scheme

    def put(self, name: str, coded: Coded, error: float, divide: Tensor | None = None) -> None:
        """Coded weights in the place of a linear map, and a line of the report."""
        module = _linear(self.model, name)
        shape = module.out_features, module.in_features
        self.report[name] = Matrix(name, shape, coded.scheme.kind, error, _bytes(module), coded.nbytes)
        parts = module.parts if isinstance(module, (FusedLinear, AwayLinear)) else (module.out_features,)
        made = QuantLinear(coded.scheme, parts, module.in_features, bias=module.bias, divide=divide, coded=coded)
        carry_hooks(module, made)
        replace(self.model, name, made.train(module.training))
        del module
        give_back()
        self.tell(len(self.report))

    def to_nearest(self, name: str) -> None:
        """One matrix, rounded without data."""
        weight = _weight(self.model, name)
        coded = encode(weight, self.of(name))
        error = output_error(weight, coded)
        del weight
        self.put(name, coded, error)

    def calibrated(self, names: Sequence[str], calibration: Calibration, full: nn.Module) -> None:
        """In the order in which data meets them, each fed by what those before it have become. full: the twin."""
        if calibration.tune:
            logits(calibration.readings[0](self.model))  # what cannot be learned from is told before the work
        self.budget = max(_bytes(_linear(self.model, name)) for name in names)
        for run in runs(stages(self.model, names, calibration.readings)):
            for some in self.at_once(run):
                seen = gather(self.model, some, calibration.readings, full)
                give_back()
                for name in some:
                    self.by_data(name, seen.pop(name), calibration.method)

    def at_once(self, names: Sequence[str]) -> list[list[str]]:
        """Names whose inputs can be gathered together without taking more memory than the largest matrix."""
        return in_budget({name: _inputs(self.model, name) for name in names}, self.budget)

    def by_data(self, name: str, fed: Fed, method: Method) -> None:
        """One matrix, rounded by what it is fed."""
        weight = _weight(self.model, name).float()
        if fed.d is not None:
            weight = followed(weight, fed.h, fed.d)
            fed = Fed(fed.h)
            give_back()
        match method:
            case "gptq":
                coded, divide = polish(weight, gptq(weight, self.of(name), fed.h), fed.h), None
            case "awq":
                coded, divide = awq(weight, self.of(name), fed.h)
            case other:
                assert_never(other)
        error = output_error(weight, coded, divide, fed.h)
        del weight
        self.put(name, coded, error, divide)

    def tuned(self, names: Sequence[str], calibration: Calibration, full: nn.Module) -> None:
        """All of them once more, together; what became of the error of each that is another now."""
        steps = count(len(self.report) + 1)
        readings, each = calibration.readings, calibration.tune
        changed = tune(self.model, full, names, readings, steps=each, tell=lambda: self.tell(next(steps)))
        far = dict.fromkeys(changed)  # experts that the first batch does not reach
        for some in self.at_once([name for stage in stages(self.model, changed, readings) for name in stage]):
            for name, fed in gather(self.model, some, readings).items():
                self.learned(name, full, fed.h)
                del far[name]
        for name in far:
            self.learned(name, full)

    def learned(self, name: str, full: nn.Module, h: Tensor | None = None) -> None:
        """A matrix that tuning has changed."""
        module = get(self.model, name)
        assert isinstance(module, QuantLinear)
        error = output_error(_weight(full, name), module.coded, module.divide, h)
        self.report[name] = dataclasses.replace(self.report[name], error=error, tuned=True)

    def code_table(self, name: str, names: Sequence[str]) -> None:
        """A token table, and every head that is tied to it: one set of codes."""
        embedding = get(self.model, name)
        assert isinstance(embedding, TokenEmbedding)
        weight = embedding.weight
        tied = [n for n in names if _linear(self.model, n).weight is weight]
        scheme = self.of(tied[0]) if tied else self.scheme
        coded = encode(weight, scheme)
        error = output_error(weight.detach(), coded)
        made = QuantEmbedding(scheme, *weight.shape, like=weight.detach(), coded=coded)
        carry_hooks(embedding, made)
        replace(self.model, name, made.train(embedding.training))
        kind = scheme.kind
        self.report[name] = Matrix(name, _shape(weight), kind, error, weight.nbytes, coded.nbytes)
        for other in tied:
            module = _linear(self.model, other)
            new = QuantLinear(scheme, (module.out_features,), module.in_features, bias=module.bias, coded=coded)
            carry_hooks(module, new)
            replace(self.model, other, new.train(module.training))
            self.report[other] = Matrix(other, _shape(weight), f"{kind}, tied", error, 0, 0)
        self.tell(len(self.report))


def linears(model: nn.Module, keep: Iterable[str] = (), *, head: bool = True) -> dict[str, nn.Linear]:
    """The maps that would be coded. Errors: BrickError: none, coded already, an unknown name in `keep`."""
    if any(True for _ in places(model, QuantLinear, QuantEmbedding)):
        raise BrickError("quantize: the model is quantized already. Start from the one in full precision.")
    if any(True for _ in places(model, AwayLinear)):
        raise BrickError("quantize: the model is being quantized just now. One at a time.")
    known = {name for name, _ in model.named_modules()} - {""}
    kept = list(keep)
    for name in kept:
        if name not in known:
            raise BrickError(f"quantize: keep {name!r}: the model has no such module; {nearest(name, _held(model))}")
    spared = set(_spared(model, head))
    found = {
        p.name: p.module
        for p in places(model, nn.Linear)
        if isinstance(p.module, nn.Linear) and p.module not in spared and not _kept(p.name, kept)
    }
    if not found:
        raise BrickError("quantize: no linear map is left to quantize. Keep fewer of them.")
    return found


def _kept(name: str, keep: Iterable[str]) -> bool:
    """Whether a module is named in `keep`, or lies inside one that is."""
    return any(name == k or name.startswith(f"{k}.") for k in keep)


def _held(model: nn.Module) -> Iterator[str]:
    """Names that say something to keep: of what can be coded, and of all that it lies in."""
    steps = (p.name.split(".") for p in places(model, nn.Linear, TokenEmbedding))
    yield from dict.fromkeys(".".join(path[: i + 1]) for path in steps for i in range(len(path)))


def _spared(model: nn.Module, head: bool) -> Iterator[nn.Module]:
    for module in model.modules():
        match module:
            case TopKRouter() | NonDynamicallyQuantizableLinear():
                yield from module.modules()
            case LogitHead() if not head:
                yield from module.modules()
            case nn.Linear() if not is_plain(module):
                yield module
            case _:
                pass


def _linear(model: nn.Module, name: str) -> nn.Linear | AwayLinear:
    module = get(model, name)
    assert isinstance(module, (nn.Linear, AwayLinear))
    return module


def _inputs(model: nn.Module, name: str) -> int:
    module = get(model, name)
    assert isinstance(module, (nn.Linear, AwayLinear, QuantLinear))
    return module.in_features


def _weight(model: nn.Module, name: str) -> Tensor:
    weight = get(model, name).weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def _bytes(module: nn.Linear | AwayLinear | TokenEmbedding) -> int:
    """Of its weights in full."""
    return module.nbytes if isinstance(module, AwayLinear) else module.weight.nbytes


def _shape(weight: Tensor | nn.Module) -> tuple[int, int]:
    assert isinstance(weight, Tensor)
    return weight.shape[0], weight.shape[1]
