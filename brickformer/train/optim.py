"""Optimizers: which one moves which parameter.

    AdamW   arXiv 1711.05101          everything; or, beside Muon, what is not a matrix of a hidden layer
    Muon    see muon.py               matrices of hidden layers

What a parameter is follows from the module that holds it, not from its name or its shape:

    weight of an nn.Linear (FusedLinear and BranchOut too)     matrix            Muon, or AdamW with weight decay
    weight of a LogitHead's projection, weight of an nn.Conv   head              AdamW with weight decay
    weight of an nn.Embedding, tied to a head or not           table             AdamW without weight decay
    biases, gains of norms, every other parameter              rest              AdamW without weight decay
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from brickformer.embed import LogitHead
from brickformer.errors import RunError, SpecError
from brickformer.linear import FusedLinear
from brickformer.spec import Spec, spec
from brickformer.train.muon import ITERATIONS, MuonOptimizer, Scale


@dataclass(frozen=True, slots=True)
class Parameters:
    """The trainable parameters of a model by what they are, each once. `parts`: rows of the projections in a matrix."""

    matrices: list[nn.Parameter] = field(default_factory=list)
    parts: list[tuple[int, ...]] = field(default_factory=list)
    heads: list[nn.Parameter] = field(default_factory=list)
    rest: list[nn.Parameter] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> Parameters:
        """Sort them by the modules that hold them (see the table above)."""
        tables: set[Tensor] = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        heads: set[Tensor] = {m.project.weight for m in model.modules() if isinstance(m, LogitHead)}
        rows: dict[Tensor, tuple[int, ...]] = {}
        for m in model.modules():
            match m:
                case FusedLinear():
                    rows[m.weight] = m.parts
                case nn.Linear():
                    rows[m.weight] = (m.out_features,)
                case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
                    heads.add(m.weight)
                case _:
                    pass
        out = cls()
        for p in model.parameters():
            if not p.requires_grad:
                continue
            if p in heads and p not in tables:
                out.heads.append(p)
            elif p in rows and p not in tables:
                out.matrices.append(p)
                out.parts.append(rows[p])
            else:
                out.rest.append(p)
        return out


@final
class Optimizers:
    """One or more torch optimizers, stepped as one, with states named after the parameters of `model`."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.optimizers = list(optimizers)
        self.base = [float(group["lr"]) for group in self.groups]
        self.params: list[nn.Parameter] = [p for group in self.groups for p in group["params"]]
        if not self.params:
            raise SpecError("optimizer: no parameter of the model requires a gradient; there is nothing to train.")

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers; torch makes new ones when it loads a state."""
        return [group for o in self.optimizers for group in o.param_groups]

    @property
    def lr(self) -> float:
        """The learning rate of the first group now."""
        return float(self.groups[0]["lr"])

    def set_factor(self, factor: float) -> None:
        """Every learning rate = its base value × `factor`."""
        for group, base in zip(self.groups, self.base, strict=True):
            group["lr"] = base * factor

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for o in self.optimizers:
            o.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self.params:
            p.grad = None

    def describe(self) -> str:
        """Who moves what, in one line."""
        shares = []
        for o in self.optimizers:
            params = [p for group in o.param_groups for p in group["params"]]
            name = type(o).__name__.removesuffix("Optimizer")
            shares.append(f"{name} on {len(params)} tensors ({sum(p.numel() for p in params):,} numbers)")
        return ", ".join(shares)

    def tensors(self) -> dict[str, Tensor]:
        """The state, one tensor for each parameter and quantity: NAME.exp_avg, NAME.momentum, ..."""
        return {
            f"{self.names[p]}.{key}": value
            for o in self.optimizers
            for p, state in o.state.items()
            for key, value in state.items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` gave. Errors: RunError when it belongs to other parameters."""
        states: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            param, _, key = name.rpartition(".")
            states.setdefault(param, {})[key] = value.clone()
        for o in self.optimizers:
            packed = o.state_dict()
            expected = {"momentum"} if isinstance(o, MuonOptimizer) else {"step", "exp_avg", "exp_avg_sq"}
            for group, numbered in zip(o.param_groups, packed["param_groups"], strict=True):
                for p, index in zip(group["params"], numbered["params"], strict=True):
                    state = states.pop(self.names[p], None)
                    if state is not None and state.keys() != expected:
                        raise RunError(
                            f"optimizer state of {self.names[p]!r}: got {', '.join(sorted(state))}, expected "
                            f"{', '.join(sorted(expected))}. It was saved with another optimizer; set that one."
                        )
                    if state is not None:
                        packed["state"][index] = state
            o.load_state_dict(packed)
        if states:
            raise RunError(f"optimizer: {next(iter(states))!r} is no parameter of the model. Was its spec changed?")


class OptimSpec(Spec):
    """Slot: what moves the parameters."""

    __slots__ = ()

    @abstractmethod
    def build(self, model: nn.Module) -> Optimizers:
        """Optimizers for every trainable parameter of `model`."""


@spec("adamw")
class AdamW(OptimSpec):
    """Adam with decoupled weight decay (arXiv 1711.05101); torch's, in one fused kernel where there is one."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def check(self) -> None:
        """Rates at least 0, betas below 1."""
        if self.lr < 0.0:
            raise self.refuse("lr", "0 or more")
        if not all(0.0 <= b < 1.0 for b in self.betas):
            raise self.refuse("betas", "two numbers from 0 to below 1")
        if self.eps <= 0.0:
            raise self.refuse("eps", "a small number above 0")
        if self.weight_decay < 0.0:
            raise self.refuse("weight_decay", "0 or more")

    def build(self, model: nn.Module) -> Optimizers:
        """AdamW on everything."""
        p = Parameters.of(model)
        return Optimizers(model, self.over([*p.matrices, *p.heads], p.rest))

    def over(self, decayed: Sequence[nn.Parameter], plain: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
        """torch's optimizer on these parameters; none when there are none."""
        groups = [
            {"params": list(params), "weight_decay": decay}
            for params, decay in ((decayed, self.weight_decay), (plain, 0.0))
            if params
        ]
        fused = _fusible([*decayed, *plain])
        return [torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)] if groups else []


@spec("muon")
class Muon(OptimSpec):
    """Muon on the matrices of hidden layers, `rest` on everything else.

    scale: "shape", with lr about 0.02; or "rms", with the lr and the weight decay of AdamW.
    iterations: Newton–Schulz steps.
    """

    lr: float = 0.02
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.01
    iterations: int = 4
    scale: Scale = "shape"
    rest: AdamW = AdamW(lr=3e-3, weight_decay=0.0)

    def check(self) -> None:
        """Rates at least 0, momentum below 1, a number of iterations there are coefficients for."""
        if self.lr < 0.0:
            raise self.refuse("lr", "0 or more")
        if not 0.0 <= self.momentum < 1.0:
            raise self.refuse("momentum", "a number from 0 to below 1")
        if self.weight_decay < 0.0:
            raise self.refuse("weight_decay", "0 or more")
        if self.iterations not in ITERATIONS:
            raise self.refuse("iterations", f"{min(ITERATIONS)} to {max(ITERATIONS)}")

    def build(self, model: nn.Module) -> Optimizers:
        """Muon and AdamW. Errors: SpecError when the model has no matrix for Muon."""
        p = Parameters.of(model)
        if not p.matrices:
            raise SpecError("muon: the model has no hidden nn.Linear to orthogonalise. Use AdamW.")
        muon = MuonOptimizer(
            p.matrices,
            p.parts,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            iterations=self.iterations,
            scale=self.scale,
        )
        return Optimizers(model, [muon, *self.rest.over(p.heads, p.rest)])


def _fusible(params: Iterable[nn.Parameter]) -> bool:
    """Whether torch has a fused kernel for all of them: floating-point, on a CPU or CUDA."""
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params)
