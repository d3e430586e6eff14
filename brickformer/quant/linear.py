"""Coded modules: what stands in the place of a linear map or of a token table once its weights are small.

    y = (x / d) Wᵀ + b       W in 8 or 4 bits; d: what inputs were divided by when their weights grew (see awq.py)

Shapes: x (..., I) -> (..., O); ids (B, T) -> (B, T, D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from brickformer.linear import CodedMap
from brickformer.quant.codes import Coded, sizes
from brickformer.quant.grid import Scheme
from brickformer.quant.products import Product, choose, few, made, one_row, spells


@final
class _Kernel:
    """The product for few rows, made at first use; shallow copies of a module share it."""

    def __init__(self) -> None:
        self.made_of: int | None = None
        self.product: Product | None = None

    def __call__(self, coded: Coded) -> Product | None:
        place = coded.codes.data_ptr()
        if self.made_of != place:
            self.product, self.made_of = made(coded), place
        return self.product

    def forget(self) -> None:
        """Other numbers may lie in the same place now."""
        self.made_of = self.product = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kernel:
        return _Kernel()


class _Coded(nn.Module):
    """Tensors of one coded matrix, as buffers."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(self, scheme: Scheme, outputs: int, inputs: int, coded: Coded | None) -> None:
        super().__init__()
        self.scheme, self._outputs, self._inputs = scheme, outputs, inputs
        for name, (shape, dtype) in sizes(scheme, outputs, inputs).items():
            found = None if coded is None else getattr(coded, name)
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta") if found is None else found)
        if not scheme.shifts:
            self.zeros = None

    @property
    def coded(self) -> Coded:
        """The packed matrix."""
        return Coded(self.scheme, self._inputs, self.codes, self.scales, self.zeros)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Scales stay in bfloat16 whatever the model's type: another one would be other weights."""
        before = self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scales.dtype is not before.dtype:
            self.scales = before.to(self.scales.device)
        return self

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self._inputs}, {self._outputs}, {self.scheme!r}"


@final
class QuantLinear(_Coded, CodedMap):
    """A linear map on coded weights. parts: as in `FusedLinear`. divide: d, (I,), or None."""

    divide: Tensor | None

    def __init__(
        self,
        scheme: Scheme,
        parts: tuple[int, ...],
        inputs: int,
        *,
        bias: nn.Parameter | None = None,
        divide: Tensor | None = None,
        coded: Coded | None = None,
    ) -> None:
        super().__init__(scheme, sum(parts), inputs, coded)
        self.in_features, self.out_features, self.parts = inputs, sum(parts), parts
        self.bias = bias
        self.register_buffer("divide", divide)
        self._kernel = _Kernel()

    @property
    def weight(self) -> Float[Tensor, "O I"]:
        """The matrix that this stands for, in float32, made anew at each reading: for code that looks at weights."""
        w = self.coded.weight()
        return w if self.divide is None else w / self.divide

    def put(self, coded: Coded) -> None:
        """Other codes and scales of the same sizes."""
        self.codes, self.scales = coded.codes, coded.scales
        self._kernel.forget()

    def explain(self) -> str:
        """Which product a decode step takes, and why."""
        name, why = choose(self.coded)
        return f"{name}: {why}"

    def forward(self, input: Float[Tensor, "*N I"]) -> Float[Tensor, "*N O"]:
        """(..., I) -> (..., O). input: as `nn.Linear` names it."""
        x, size = input, input.numel()
        if 0 < size <= few(x.device) * self.in_features and not (x.requires_grad and torch.is_grad_enabled()):
            compiling = torch.compiler.is_compiling()
            if compiling and size == self.in_features and spells(self.coded):
                return one_row(x, self.coded, self.bias, self.divide)
            product = self._kernel.product if compiling else self._kernel(self.coded)
            if product is not None:
                return _few(x, product, self.out_features, self.bias, self.divide)
        if self.divide is not None:
            x = x / self.divide.to(x.dtype)
        return F.linear(x, self.coded.weight(x.dtype), self.bias)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loading copies into the same memory, so what was made of it is out of date."""
        super()._load_from_state_dict(*args, **kwargs)
        self._kernel.forget()

    def product(self) -> Callable[[Tensor], Tensor]:
        """`forward` without a look at the module; the sums and their order are the same. A graph that is compiled
        after this has been asked for holds this product too."""
        kernel, most = self._kernel(self.coded), few(self.codes.device) * self.in_features
        outputs, bias, divide = self.out_features, self.bias, self.divide
        if kernel is None:
            return self.forward

        def product(x: Tensor) -> Tensor:
            if not 0 < x.numel() <= most or (x.requires_grad and torch.is_grad_enabled()):
                return self.forward(x)
            return _few(x, kernel, outputs, bias, divide)

        return product


def _few(x: Tensor, product: Product, outputs: int, bias: Tensor | None, divide: Tensor | None) -> Tensor:
    """Few rows: (..., I) -> (..., O). A bias in the type of x also brings the product back to it."""
    if divide is not None:
        x = x / divide.to(x.dtype)
    y = product(x.reshape(-1, x.shape[-1]).to(torch.bfloat16))
    y = y.to(x.dtype) if bias is None else (y + bias).to(x.dtype)
    return y.reshape(*x.shape[:-1], outputs)


@final
class QuantEmbedding(_Coded):
    """A token table of coded rows. weight: empty; it says where the table is and of which type its vectors are."""

    weight: Tensor

    def __init__(
        self, scheme: Scheme, tokens: int, dim: int, *, like: Tensor | None = None, coded: Coded | None = None
    ) -> None:
        super().__init__(scheme, tokens, dim, coded)
        self.num_embeddings, self.embedding_dim = tokens, dim
        self.register_buffer("weight", torch.empty(0) if like is None else like.new_empty(0), persistent=False)

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """(B, T) -> (B, T, D)."""
        return self.coded.rows(ids.flatten()).view(*ids.shape, -1).to(self.weight.dtype)
