"""Kernels of other people for the scans, where their library is installed and the tokens are on a CUDA device.

    selective_scan      mamba_ssm   arXiv 2312.00752
    ssd                 mamba_ssm   arXiv 2405.21060, in 16-bit types
    gated_delta_rule    fla         arXiv 2412.06464, in 16-bit types

They take over the one case in which the time is spent: a call from an empty memory that keeps no state, without
packed documents and outside of torch.compile. Everything else is pure torch, and so is everything where nothing is
installed. Each function speaks like its namesake beside its brick, with which it is compared where there is a device.
Shapes: B batch, T tokens, I inner channels, N states; H heads, G groups of them, P head width; K key, V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

Kernel = Callable[..., Any]
Find = Callable[[], Kernel | None]

HALF: Final = (torch.bfloat16, torch.float16)
SINGLE: Final = (torch.float32, *HALF)


@cache
def mamba_kernel() -> Kernel | None:
    """mamba_ssm's selective scan, if it is installed."""
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn as kernel  # type: ignore[import-not-found]
    except ImportError:
        return None
    return kernel


@cache
def mamba2_kernel() -> Kernel | None:
    """mamba_ssm's chunk scan, if it is installed."""
    try:
        from mamba_ssm.ops.triton.ssd_combined import (  # type: ignore[import-not-found]
            mamba_chunk_scan_combined as kernel,
        )
    except ImportError:
        return None
    return kernel


@cache
def delta_kernel() -> Kernel | None:
    """fla's gated delta rule in chunks, if it is installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel  # type: ignore[import-not-found]
    except ImportError:
        return None
    return kernel


def serves(find: Find, x: Tensor, types: tuple[torch.dtype, ...]) -> bool:
    """Whether a kernel can take tokens like x."""
    return x.is_cuda and x.dtype in types and not torch.compiler.is_compiling() and find() is not None


def selective_scan(
    dt: Float[Tensor, "B T I"],
    x: Float[Tensor, "B T I"],
    a: Float[Tensor, "N I"],
    b: Float[Tensor, "B T N"],
    c: Float[Tensor, "B T N"],
) -> Float[Tensor, "B T I"]:
    """`mamba.selective_scan` from an empty memory."""
    kernel = mamba_kernel()
    assert kernel is not None
    x, dt, b, c = (v.mT.contiguous() for v in (x, dt, b, c))  # time last
    return kernel(x, dt, a.t().contiguous(), b, c).mT


def ssd(
    dt: Float[Tensor, "B T H"],
    x: Float[Tensor, "B T H P"],
    a: Float[Tensor, " H"],
    b: Float[Tensor, "B T G N"],
    c: Float[Tensor, "B T G N"],
    dtype: torch.dtype,
) -> Float[Tensor, "B T H P"]:
    """`mamba2.ssd` from an empty memory; what is multiplied is of type dtype, the decays are not."""
    kernel = mamba2_kernel()
    assert kernel is not None
    x, b, c = (v.to(dtype).contiguous() for v in (x, b, c))
    return kernel(x, dt, a, b, c, chunk_size=256).to(dt.dtype)


def gated_delta_rule(
    q: Float[Tensor, "B T G K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T H V"],
    log_a: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    dtype: torch.dtype,
) -> Float[Tensor, "B T H V"]:
    """`delta.gated_delta_rule` from an empty memory; what is multiplied is of type dtype, the decays are not."""
    kernel = delta_kernel()
    assert kernel is not None
    q, k = (w.repeat_interleave(v.shape[2] // w.shape[2], 2) for w in (q, k))
    q, k, v, beta = (w.to(dtype).contiguous() for w in (q, k, v, beta))
    y, _ = kernel(q, k, v, log_a, beta, scale=q.shape[3] ** -0.5)
    return y.to(log_a.dtype)
