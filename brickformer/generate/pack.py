"""Pack: the weights of a decoder once more, in the layout in which a CPU multiplies a single vector fastest.

    y = W x + b,   x one vector      all of W is read for every token, so decoding takes as long as reading memory does

Rows of W as they lie make a product of many short sums; in float32 a matrix with at least as many outputs as inputs is
read faster by columns, y += W[:, i] x_i, each thread its share of them, and any other one in the blocks that oneDNN
makes for itself: one matrix-vector product does not use all threads, a batch of as many does.
Both are copies, so packing takes as many bytes again as the decoder's matrices. Several rows at once, other types and
other devices go the usual way. The sums are the same up to their order.

A twin of the decoder shares every parameter, buffer and hook with it; only what its linear maps call is another, and
residuals leave out dropout and norms that are none. Maps on coded weights bring a product of their own (`CodedMap`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor, nn

from brickformer.layers import Residual
from brickformer.linear import CodedMap, is_plain
from brickformer.models import DecoderModel
from brickformer.product import product

M = TypeVar("M", bound=nn.Module)


@final
class Packed:
    """A decoder and its packed twin. The twin is made anew when weights have changed since."""

    def __init__(self, decoder: DecoderModel) -> None:
        self._decoder = decoder
        self._twin: DecoderModel | None = None
        self._made_of: list[tuple[int, int]] = []

    def fresh(self) -> DecoderModel:
        """The twin of the decoder as it is now. Asked for once a batch of answers, not once a token."""
        held = (*self._decoder.parameters(), *self._decoder.buffers())
        now = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in held]
        if self._twin is None or now != self._made_of:
            self._twin, self._made_of = _twin(self._decoder, {}).eval(), now
        return self._twin


def _twin(module: M, made: dict[int, nn.Module]) -> M:
    """The same modules around the same parameters; every linear map with a product of its own."""
    if id(module) in made:
        return made[id(module)]  # type: ignore[return-value]
    other = made[id(module)] = copy(module)
    inside = {name: None if child is None else _twin(child, made) for name, child in module._modules.items()}
    other.__dict__["_modules"] = inside
    match module:
        case nn.Linear():
            product = _product(module) if is_plain(module) else None
        case CodedMap():
            product = module.product()
        case Residual():
            product = _joined(cast(Residual, other))
        case _:
            product = None
    if product is not None:
        other.__dict__["forward"] = product
    return other


def _joined(around: Residual) -> Callable[..., Tensor] | None:
    """x + f(into(x)), where nothing else happens around a branch and nobody watches that nothing."""
    idle = (around.out, around.after)
    if around.skip != 1.0 or not all(isinstance(m, nn.Identity) for m in idle):
        return None
    if any(m._forward_hooks or m._forward_pre_hooks for m in (*idle, around.drop)):
        return None
    into = around.into
    return lambda x, f: x + f(into(x))


def _product(linear: nn.Linear) -> Callable[[Tensor], Tensor] | None:
    """x -> W x + b on a packed copy of W for one vector x; None where nothing is known to be faster."""
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    outputs, inputs = weight.shape
    if weight.device.type != "cpu":
        return None
    if weight.dtype is torch.float32 and outputs >= inputs:
        threads = torch.get_num_threads()
        parts = threads if inputs % threads == 0 else 1
        columns = weight.t().contiguous().view(parts, inputs // parts, outputs)  # (parts, I / parts, O)

        def by_columns(x: Tensor) -> Tensor:
            if x.numel() != inputs:
                return product(x, weight, bias)
            if parts == 1:
                y = torch.mv(columns[0].t(), x.reshape(inputs))
            else:
                y = torch.bmm(x.reshape(parts, 1, inputs // parts), columns).sum(0)
            return (y if bias is None else y + bias).view(*x.shape[:-1], outputs)

        return by_columns
    if not _blocks(weight.dtype):
        return None
    onednn: Any = torch.ops.mkldnn
    blocks = onednn._reorder_linear_weight(weight, 1)

    def by_blocks(x: Tensor) -> Tensor:
        if x.numel() != inputs:
            return product(x, weight, bias)
        y: Tensor = onednn._linear_pointwise(x, blocks, bias, "none", [], "")
        return y

    return by_blocks


def _blocks(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and multiplies this type."""
    if not torch.backends.mkldnn.is_available():
        return False
    onednn: Any = torch.ops.mkldnn
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(onednn._is_mkldnn_bf16_supported())
        case _:
            return False
