"""The product of every linear map, by the quicker of two libraries.

    y = x Wᵀ + b,    dx = g W,    dW = gᵀ x,    db = Σ g

torch hands float32 products on a CPU to MKL. oneDNN, which torch ships too, does some of them better:

    few rows (writing)      reads W at two to three times the speed from 2 rows on, at 1.5 times for one row
    many rows (learning)    where the processor has AVX-512 and MKL stops at AVX2, which it does on processors of other
                            makers than its own: a tenth off forward and dx. Not off dW, whose factors both lie the
                            wrong way round: MKL keeps it. The call costs some 20 µs more, so small products stay.

A compiled graph writes a loop of its own for one row, y = Σ_i W[:, i] x_i spelled out, which the compiler joins with
what comes before and after; it reads W as fast as memory gives it, in any type, and neither library does.

Shapes: x (..., I), W (O, I), b (O,) -> (..., O).
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch._library.custom_ops import OPDEFS

LARGE: Final = 2**27  # multiplications from which on the library matters more than the call
MATRIX: Final = 2**18  # numbers in a matrix, from which on reading it takes longer than the call
FEW: Final = 64  # rows up to which reading the matrix is most of the work


def product(
    x: Float[Tensor, "*rows I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "*rows O"]:
    """x Wᵀ + b. What `F.linear` gives, to rounding."""
    size, rows = weight.numel(), x.numel() // weight.shape[1]
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if rows == 1 and not learning and torch.compiler.is_compiling() and x.device.type == "cpu":
        return spelled_out(x, weight, bias)
    if size < MATRIX or not _plain(x, weight):
        return F.linear(x, weight, bias)
    if learning:
        return by_onednn(x, weight, bias) if WIDE and rows * size >= LARGE else F.linear(x, weight, bias)
    if not WIDE and rows > FEW:
        return F.linear(x, weight, bias)
    return (by_onednn if torch.compiler.is_compiling() else _linear)(x, weight, bias)


def _plain(x: Tensor, weight: Tensor) -> bool:
    """Float32 on a CPU, and nothing around that would change that."""
    return (
        x.device.type == weight.device.type == "cpu"
        and x.dtype is weight.dtype is torch.float32
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()  # vmap and grad of torch.func know F.linear only
    )


def spelled_out(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One row, summed in float32 at least. Only for the compiler: as it stands it would write all of W * x out."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    once = x.reshape(-1).to(exact).as_strided((x.numel(),), (1,))  # a buffer: else x is computed anew for each row of W
    y = (weight.to(exact) * once).sum(-1)
    return (y if bias is None else y + bias).to(x.dtype).view(*x.shape[:-1], len(weight))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    onednn: Any = torch.ops.mkldnn
    return onednn._linear_pointwise(x, weight, bias, "none", [], "")


def _wide() -> bool:
    """Whether oneDNN has wider vectors than MKL may have: AVX-512 in the processor."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()


WIDE: Final = _wide()


NAME = f"{__package__}::by_onednn"
while NAME in OPDEFS:  # a second copy of this module in one process must not take the operator of the first
    NAME += "_"


@torch.library.custom_op(NAME, mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b by oneDNN, in float32 on a CPU; W may be a transposed view. An operator, so that graphs may hold it."""
    return _linear(x, weight, bias)


@by_onednn.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    need_x, need_weight, need_bias = ctx.needs_input_grad
    rows = g.reshape(-1, g.shape[-1])
    return (
        by_onednn(g, weight.t(), None) if need_x else None,
        rows.t() @ x.reshape(-1, x.shape[-1]) if need_weight else None,
        rows.sum(0) if ctx.has_bias and need_bias else None,
    )


by_onednn.register_autograd(_gradients, setup_context=_remember)
