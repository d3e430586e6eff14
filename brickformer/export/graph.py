"""A graph in the making: nodes, weights and what goes in and out, for ONNX (https://onnx.ai) in opset 21.

Graphs are written node by node from our own bricks, not traced: what is not known is refused by name, and each brick
becomes the operators that ONNX Runtime runs fastest. Operators of the domain com.microsoft are ONNX Runtime's own.

    MatMulNBits  y = x Wᵀ, W in blocks of 4 or 8 bits; at accuracy level 4, x in blocks of 8 bits too
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from brickformer.errors import BrickError

OPSET: Final = 21
LIMIT: Final = 2_000_000_000
"""Bytes that one file may have: protobuf ends there."""
MICROSOFT: Final = "com.microsoft"


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A matrix (outputs, inputs) in blocks of `size` along its inputs.

    codes: (outputs, blocks, size·bits/8) uint8, of 4 bits the first in the lower half. scales: (outputs, blocks).
    zeros: as codes, of blocks, or None for 8 (128 for 8 bits). divide: (inputs,) what inputs are divided by, or None.
    """

    bits: int
    size: int
    inputs: int
    outputs: int
    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.uint8] | None
    divide: npt.NDArray[np.float32] | None


def split_rows(weight: Tensor | Blocks, parts: Sequence[int]) -> list[Tensor | Blocks]:
    """A matrix of sum(parts) outputs as one matrix a part."""
    if isinstance(weight, Tensor):
        return list(weight.split(list(parts)))
    cuts: list[Tensor | Blocks] = []
    for end, n in zip(accumulate(parts), parts, strict=True):
        at = slice(end - n, end)
        zeros = None if weight.zeros is None else weight.zeros[at]
        cuts.append(replace(weight, outputs=n, codes=weight.codes[at], scales=weight.scales[at], zeros=zeros))
    return cuts


@final
class Graph:
    """Nodes in the order in which they run."""

    def __init__(self) -> None:
        try:
            import onnx
        except ImportError:
            raise BrickError('onnx is not installed. Install it: pip install "brickformer[onnx]"') from None
        self.onnx = onnx
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self._count = 0

    def input(self, name: str, shape: Sequence[int | str], dtype: str = "FLOAT") -> str:
        """Something the caller gives."""
        self.inputs.append(self._value(name, shape, dtype))
        return name

    def output(self, value: str, name: str, shape: Sequence[int | str]) -> None:
        """Something the caller gets, under a name."""
        for node in self.nodes:  # the node itself gets the name: a copy would cost a cache its shared buffer
            for names in (node.input, node.output):
                names[:] = [name if n == value else n for n in names]
        self.outputs.append(self._value(name, shape, "FLOAT"))

    def _value(self, name: str, shape: Sequence[int | str], dtype: str) -> Any:
        kind = getattr(self.onnx.TensorProto, dtype)
        return self.onnx.helper.make_tensor_value_info(name, kind, list(shape))

    def weight(self, name: str, value: Tensor | npt.NDArray[Any]) -> str:
        """A constant, once under each name."""
        if name not in self.weights:
            array = value.detach().float().cpu().numpy() if isinstance(value, Tensor) else value
            self.weights[name] = self.onnx.numpy_helper.from_array(np.asarray(array, order="C"), name)
        return name

    def ints(self, *values: int) -> str:
        """A constant list of integers."""
        return self.weight("ints_" + "_".join(map(str, values)), np.array(values, dtype=np.int64))

    def number(self, value: float) -> str:
        """A constant number."""
        return self.weight(f"number_{value!r}", np.array(value, dtype=np.float32))

    def op(self, kind: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """One node; the name of its output, or the list of them."""
        names = [f"{kind}_{self._count}_{i}" for i in range(outputs)]
        self._count += 1
        made = self.onnx.helper.make_node(kind, list(inputs), names, domain=domain, **attributes)
        self.nodes.append(made)
        return names[0] if outputs == 1 else names

    def add(self, x: str, y: str) -> str:
        """x + y."""
        out: str = self.op("Add", x, y)
        return out

    def norm(self, kind: str, x: str, *weights: str, eps: float) -> str:
        """A norm over the last axis; together with the sum that x is, where it was made last: one node does both."""
        last = self.nodes[-1] if self.nodes else None
        if last is None or last.op_type != "Add" or last.output[0] != x or set(last.input) & set(self.weights):
            out: str = self.op(kind, x, *weights, axis=-1, epsilon=eps)
            return out
        self.nodes.pop()
        out = self.op(f"Skip{kind}", *last.input, *weights, domain=MICROSOFT, epsilon=eps)
        self.nodes[-1].output.extend(["", "", x])
        return out

    def matmul(self, x: str, weight: Tensor | Blocks, bias: Tensor | None, name: str) -> str:
        """x Wᵀ + b."""
        if isinstance(weight, Tensor):
            y: str = self.op("MatMul", x, self.weight(f"{name}.weight", weight.detach().float().t()))
            return y if bias is None else self.add(y, self.weight(f"{name}.bias", bias))
        if weight.divide is not None:
            x = self.op("Mul", x, self.weight(f"{name}.multiply", 1.0 / weight.divide))
        inputs = [
            x,
            self.weight(f"{name}.codes", weight.codes),
            self.weight(f"{name}.scales", weight.scales.reshape(-1)),
            "" if weight.zeros is None else self.weight(f"{name}.zeros", weight.zeros.reshape(-1)),
            "",
            "" if bias is None else self.weight(f"{name}.bias", bias),
        ]
        while not inputs[-1]:
            inputs.pop()
        sizes = {"K": weight.inputs, "N": weight.outputs, "bits": weight.bits, "block_size": weight.size}
        out: str = self.op("MatMulNBits", *inputs, domain=MICROSOFT, accuracy_level=4, **sizes)
        return out

    def bytes(self, name: str) -> bytes:
        """The file. Errors: BrickError where it would be larger than a file can be."""
        helper = self.onnx.helper
        size = sum(len(w.raw_data) for w in self.weights.values())
        if size > LIMIT:
            raise BrickError(
                f"export: {name} has {size / 1e9:.1f} GB of weights, expected at most {LIMIT / 1e9:.0f} GB in one "
                f"graph. Export it with --bits 4."
            )
        made = helper.make_graph(self.nodes, name, self.inputs, self.outputs, list(self.weights.values()))
        domains = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(made, opset_imports=domains, ir_version=10, producer_name="brickformer")
        out: bytes = model.SerializeToString()
        return out
