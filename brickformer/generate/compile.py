"""Compile: the decode step as one graph, for the same tokens in less time.

    step(ids, state) = logits(hidden(ids, state))[:, -1]        through torch.compile, whole, lengths left open

The cache is allocated once and only the slot numbers change, so one graph serves every step and every length; another
one is made for padded rows, for one row instead of several, and for each thing a ring may have to do. What compiling
takes is measured apart from decoding: `Stats.compile_s`, 0 when everything needed had been compiled before.
Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from inspect import signature
from typing import Any, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, fx

from brickformer.errors import BrickError, RunError
from brickformer.linear import CodedMap
from brickformer.models import DecoderModel
from brickformer.pages import enlarge
from brickformer.state import StackState

Backend = Literal["inductor", "aot_eager", "eager"]


class CompileError(RunError):
    """The step cannot be compiled here: no row's fault."""


@final
class CompiledStep:
    """The decode step of one decoder. seconds: spent compiling so far. graphs: made so far.

    backend: "inductor" makes machine code; the others only capture the graph, which is what tests need.
    """

    def __init__(self, decoder: DecoderModel, backend: Backend = "inductor") -> None:
        self.seconds = 0.0
        self.graphs = 0
        self._decoder, self._inner = decoder, backend
        self._step: Any = None
        self._made_of: list[object] = []

    def renew(self) -> None:
        """A batch of answers begins: modules may have been put in, taken out, moved or watched since the last one."""
        now = list(_parts(self._decoder))
        if now != self._made_of:
            self._step, self._made_of = self._open(), now

    def _open(self) -> Any:
        decoder = self._decoder
        for module in decoder.modules():
            if isinstance(module, CodedMap):
                module.product()  # made now: a graph that is being compiled has no hands to pack weights with
        if self._inner == "inductor":
            enlarge((*decoder.parameters(), *decoder.buffers()))

        def step(ids: Tensor, state: StackState) -> Tensor:
            return decoder.logits(decoder.hidden(ids, None, state))[:, -1]

        newer = {"recompile_limit": 64, "isolate_recompiles": True}  # a ring takes several; models share none
        known = signature(torch.compile).parameters
        extra: Any = {name: value for name, value in newer.items() if name in known}
        if _unasked is not None:
            extra["options"] = {"guard_filter_fn": _unasked}
        return torch.compile(step, fullgraph=True, dynamic=True, backend=self._compile, **extra)

    def __call__(self, ids: Int[Tensor, "B 1"], state: StackState) -> Float[Tensor, "B V"]:
        """Logits after one more token a row. Errors: CompileError when the step cannot be compiled."""
        graphs, began = self.graphs, time.perf_counter()
        if self._step is None:
            self.renew()
        try:
            logits: Tensor = self._step(ids, state)
        except BrickError:
            raise
        except Exception as e:
            if not type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            why = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
            raise CompileError(f"compile: torch.compile gave up: {why:.200}. Generate without compiling.") from None
        if self.graphs > graphs:
            self.seconds += time.perf_counter() - began
        return logits

    def _compile(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        self.graphs += 1
        return lookup_backend(self._inner)(graph, inputs)


def _parts(decoder: DecoderModel) -> Iterator[object]:
    """All that a graph takes for granted of modules: which they are, who watches them, what kind their tensors are."""
    for module in decoder.modules():
        yield module
        yield [*module._forward_hooks.values()], [*module._forward_pre_hooks.values()], module.training
    for tensor in (*decoder.parameters(), *decoder.buffers()):
        yield tensor.shape, tensor.dtype, tensor.device
    for tensor in decoder.buffers():  # a graph holds what products have packed of codes, not only the codes
        yield tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


_unasked: Any = vars(torch.compiler).get("skip_guard_on_all_nn_modules_unsafe")
"""Which questions Dynamo leaves out; torch before 2.8 asks them all."""
