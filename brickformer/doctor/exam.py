"""What the probes share: the patient, one trace of it, and where in the model a difference begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor, nn

from brickformer.doctor.guard import OutOfTime
from brickformer.doctor.outputs import differ, parts
from brickformer.doctor.patient import Patient
from brickformer.doctor.report import Finding
from brickformer.doctor.trace import Trace, traced

Where = Callable[[Tensor, Tensor], bool]


def _willing(locate: Callable[..., str]) -> Callable[..., str]:
    """A place is worth having, and no place costs a finding: '' where it cannot be told."""

    @wraps(locate)
    def tried(*args: Any) -> str:
        try:
            return locate(*args)
        except (Exception, OutOfTime):
            return ""

    return tried


@dataclass
class Exam:
    """One examination."""

    p: Patient

    @cached_property
    def ids(self) -> Tensor:
        """Two rows of input."""
        return self.p.draw(2)

    @cached_property
    def out(self) -> Tensor:
        """What the patient says to them."""
        return self.p(self.ids)

    @cached_property
    def trace(self) -> Trace:
        """A run with every attention watched."""
        return self.traced(self.p.model)

    @cached_property
    def fresh_trace(self) -> Trace:
        """The same with the weights as they came."""
        return self.traced(self.p.fresh)

    def traced(self, model: nn.Module, ids: Tensor | None = None, grad: bool = False) -> Trace:
        """A run of one row with every attention watched. Errors: whatever the model raises."""
        with traced(model) as trace:
            self.p(self.ids[:1] if ids is None else ids, model=model, grad=grad)
        return trace

    @_willing
    def begins(
        self,
        one: Callable[[], Any],
        two: Callable[[], Any],
        wrong: Where,
        cut: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, y: (x, y),
    ) -> str:
        """The first module whose output is wrong although its inputs are not: (path). '' where none is.

        cut makes tensors of two lengths comparable.
        """
        a, b = self.record(one), self.record(two)

        def bad(xs: list[Tensor], ys: list[Tensor]) -> bool:
            pairs = [cut(x, y) for x, y in zip(xs, ys, strict=False)]
            return any(x.shape == y.shape and _safe(wrong, x, y) for x, y in pairs)

        for (path, ins_a, outs_a), (path_b, ins_b, outs_b) in zip(a, b, strict=False):
            if path != path_b:
                return ""
            bad_out, bad_in = bad(outs_a, outs_b), bad(ins_a, ins_b)
            if bad_out and not bad_in:
                return path or type(self.p.subject.model).__name__
            if bad_out and bad_in and path:
                return _parent(path) or type(self.p.subject.model).__name__
        return ""

    @_willing
    def ends(self, one: Callable[[], Any], two: Callable[[], Any]) -> str:
        """The first module in which a difference of the input is lost."""
        for (path, ins_a, outs_a), (path_b, ins_b, outs_b) in zip(self.record(one), self.record(two), strict=False):
            if path != path_b:
                return ""
            moved_in = any(x.shape == y.shape and not torch.equal(x, y) for x, y in zip(ins_a, ins_b, strict=False))
            moved = any(x.shape == y.shape and not torch.equal(x, y) for x, y in zip(outs_a, outs_b, strict=False))
            if path and outs_a and moved_in and not moved:
                return path
        return ""

    def record(
        self, run: Callable[[], Any], model: nn.Module | None = None
    ) -> list[tuple[str, list[Tensor], list[Tensor]]]:
        """(path, inputs, outputs) of every module's call, in the order in which they returned."""
        seen: list[tuple[str, list[Tensor], list[Tensor]]] = []
        handles = []
        for path, module in (self.p.model if model is None else model).named_modules():

            def keep(m: nn.Module, args: Any, kwargs: Any, out: Any, path: str = path) -> None:
                ins = [
                    x.detach().clone()
                    for _, x in parts([*args, *kwargs.values()])
                    if x.is_floating_point() and not x.is_nested
                ]
                outs = [x.detach().clone() for _, x in parts(out) if x.is_floating_point() and not x.is_nested]
                seen.append((path, ins, outs))

            handles.append(module.register_forward_hook(keep, with_kwargs=True))
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        return seen

    @_willing
    def not_finite(self, run: Callable[[], Any], model: nn.Module | None = None) -> str:
        """The first module whose output is not finite although its inputs are."""
        for path, ins, outs in self.record(run, model):
            if path and all(bool(x.isfinite().all()) for x in ins) and any(not bool(x.isfinite().all()) for x in outs):
                return path if "." not in path or not _plain(self.p.model, path) else _parent(path)
        return ""

    def tokenwise(self, wrong: Callable[[Tensor], bool]) -> Where:
        """A test of (B, T, ...) tensors by the (B, T) of what moved; others are never wrong."""
        tokens, allowed, flip = self.p.tokens, self.p.allowed, self.p.seq_first

        def test(x: Tensor, y: Tensor) -> bool:
            if x.ndim != 3:
                return False
            if flip:
                x, y = x.transpose(0, 1), y.transpose(0, 1)
            if x.shape[1] != tokens:
                return False
            return wrong(differ(x, y) > allowed)

        return test


def _safe(wrong: Callable[[Tensor, Tensor], bool], x: Tensor, y: Tensor) -> bool:
    return x.numel() > 0 and wrong(x, y)


def _plain(model: nn.Module, path: str) -> bool:
    """Softmax and dropout do what they are told: the module around them is meant."""
    return isinstance(model.get_submodule(path), nn.Softmax | nn.Dropout)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


@dataclass(frozen=True)
class Probe:
    """name: a word. says: what a healthy model does. why_not: the reason where a model does not owe it."""

    name: str
    says: str
    run: Callable[[Exam], list[Finding]]
    why_not: Callable[[Exam], str | None] = lambda e: None


def number(x: float | Tensor) -> str:
    """``0.49``."""
    return f"{float(x):.3g}"


def no_tokens(e: Exam) -> str | None:
    """One answer a row: nothing to compare token by token."""
    return "one answer a row" if e.p.shape == "pooled" else None


def causal_only(e: Exam) -> str | None:
    """Only models that must not see the future."""
    if e.p.kind == "encoder":
        return "an encoder sees both ways"
    return no_tokens(e)


def grads(value: Tensor, of: list[Tensor], keep: bool = False) -> list[Tensor | None]:
    """Gradients, None where there is none. keep: the graph is asked again."""
    return list(torch.autograd.grad(value, of, allow_unused=True, retain_graph=keep))
