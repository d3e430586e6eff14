"""Attend: the only place where queries meet keys.

    out = softmax(q kᵀ · scale + bias, over the keys that the mask allows) v,    scale = 1/√K     (arXiv 1706.03762)

`reference` writes the formula out. The other backends hand the same thing to a fused kernel, told in its own words by
`mask.lower`. A query that may see no key gets zeros and finite gradients from every backend. "auto" takes a fused
kernel, but for learning from short sequences on a CPU, where two matrix products and a softmax are quicker.

Attend has no parameters: checkpoints don't know it. It is a module so that hooks can watch it.

Shapes: B batch, T query tokens, S key tokens, H heads, G key/value heads (H a multiple of G), K head width, V
width of a value (K nearly everywhere).
"""

from __future__ import annotations

import math
from typing import Literal, assert_never, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from brickformer.errors import SpecError
from brickformer.kernels import as_map, flex, local_blocks, matmul, one_key_head_a_head, quicker, sdpa, with_sink
from brickformer.mask import Block, Dense, Everything, IsCausal, Mask, Span, lower

Backend = Literal["auto", "reference", "matmul", "sdpa", "flex"]


def reference(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S V"],
    allowed: Bool[Tensor, "#B 1 #T S"],
    *,
    bias: Float[Tensor, "#B #H T S"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T V"]:
    """Attention as it is written in the paper: the teaching version, and what every fused kernel is tested against."""
    weights = attention_weights(q, k, allowed, bias=bias, scale=scale, softcap=softcap, sinks=sinks)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    return weights @ one_key_head_a_head(v, q)


def attention_weights(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    allowed: Bool[Tensor, "#B 1 #T S"],
    *,
    bias: Float[Tensor, "#B #H T S"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "B H T S"]:
    """The attention map. Rows sum to 1, or to 0 where a query may see nothing; below 1 by what a sink takes."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale  # keeps the variance of a score at 1
    scores = q @ one_key_head_a_head(k, q).transpose(-2, -1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    # The lowest finite number, not 0 (a zero score still gets weight) and not -inf (a row of -inf is NaN).
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if sinks is not None:  # one more key, which every query sees and which gives nothing
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return torch.softmax(scores, dim=-1)[..., : k.shape[2]].masked_fill(~allowed, 0.0)


@final
class Attend(nn.Module):
    """Scaled dot-product attention through the best kernel that is exact for the case.

    scale: default 1/√K. softcap: scores become cap·tanh(score/cap) (arXiv 2408.00118). dropout: on the weights, in
    training. backend: "auto" picks; naming one forces it, and raises where it cannot do the case.
    """

    def __init__(
        self,
        mask: Mask,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if backend in ("matmul", "sdpa") and softcap is not None:
            raise SpecError(f"attention: backend {backend!r} cannot cap scores. Use 'auto', 'flex' or 'reference'.")
        if backend == "flex" and dropout > 0.0:
            raise SpecError("attention: backend 'flex' cannot drop weights. Use dropout=0.0, or 'auto' or 'reference'.")
        self.mask, self.scale, self.softcap, self.dropout, self.backend = mask, scale, softcap, dropout, backend

    def forward(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S V"],
        q_at: Span,
        k_at: Span,
        bias: Float[Tensor, "#B #H T S"] | None = None,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H T V"]:
        """(B, H, T, K) queries at `q_at` over (B, G, S, K) keys and values at `k_at`.

        bias: added to the scores. sinks: the score, a head, of a key that gives nothing.
        """
        match self._choose(q.device):
            case "reference":
                allowed = as_map(lower(self.mask, q_at, k_at, device=q.device), q, k)
                return reference(
                    q,
                    k,
                    v,
                    allowed,
                    bias=bias,
                    scale=self.scale,
                    softcap=self.softcap,
                    sinks=sinks,
                    dropout=self._rate(),
                )
            case "matmul" | "sdpa" | "quicker" as backend:
                blocks = local_blocks(self.mask, q_at, k_at)
                if not blocks:
                    return self._fused(q, k, v, q_at, k_at, bias, sinks, backend)
                outs = []
                for rows, keys in blocks:
                    here = None if bias is None else bias[:, :, rows, keys]
                    at = _part(q_at, rows), _part(k_at, keys)
                    outs.append(self._fused(q[:, :, rows], k[:, :, keys], v[:, :, keys], *at, here, sinks, backend))
                return torch.cat(outs, dim=2)
            case "flex":
                assert sinks is None, "refused when built"
                if q.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
                    raise SpecError(
                        "attention: got backend 'flex' with gradients on a CPU, where FlexAttention has none. Use "
                        "backend='auto', a GPU, or torch.no_grad()."
                    )
                lowered = lower(self.mask, q_at, k_at, device=q.device, flex=True)
                return flex(q, k, v, lowered, bias, scale=self.scale, softcap=self.softcap)
            case other:
                assert_never(other)

    def _fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_at: Span,
        k_at: Span,
        bias: Tensor | None,
        sinks: Tensor | None,
        backend: Literal["matmul", "sdpa", "quicker"],
    ) -> Tensor:
        """One call of a kernel that is told a mask or nothing."""
        lowered = lower(self.mask, q_at, k_at, device=q.device)
        if backend == "quicker":
            learning = q.requires_grad and torch.is_grad_enabled()
            backend = quicker(lowered, q.shape[2], k.shape[2], q.device, learning)
        if sinks is not None:
            lowered, k, v, bias = with_sink(lowered, q, k, v, bias, sinks)
        run = matmul if backend == "matmul" else sdpa
        return run(q, k, v, lowered, bias, scale=self.scale, dropout=self._rate())

    def weights(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        q_at: Span,
        k_at: Span,
        bias: Float[Tensor, "#B #H T S"] | None = None,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H T S"]:
        """The map itself, whatever backend runs: the reference for tests, the source of heat maps."""
        allowed = as_map(lower(self.mask, q_at, k_at, device=q.device), q, k)
        return attention_weights(q, k, allowed, bias=bias, scale=self.scale, softcap=self.softcap, sinks=sinks)

    def explain(self, q_at: Span, k_at: Span, *, device: torch.device | None = None, learning: bool = False) -> str:
        """Which kernel a call would take, how the mask is told, and why: ``sdpa, dense mask: keys are padded``.

        learning: a backward pass follows.
        """
        device = device or torch.device("cpu")
        lowered = lower(self.mask, q_at, k_at, device=device)
        backend = self._choose(device)
        if backend == "quicker":
            backend = quicker(lowered, q_at.length, k_at.length, device, learning)
        why = ""
        if self.softcap is not None:
            why = f"soft cap {self.softcap:g}, which sdpa cannot do"
        elif backend == "matmul" and self.backend == "auto":
            why = "short: quicker than fused"
        blocks = local_blocks(self.mask, q_at, k_at) if backend in ("sdpa", "matmul") else []
        if blocks:
            return f"{backend}, {len(blocks)} blocks of queries, each with the keys in its window of {self.mask.window}"
        match lowered:
            case Everything(last=None):
                told = "no mask needed"
            case Everything(last=n):
                told = f"no mask needed: the last {n} keys are cut out"
            case IsCausal():
                told = "is_causal"
            case Dense(allowed=allowed):
                told = f"dense mask {tuple(allowed.shape)}: {self._why_dense(q_at, k_at)}"
            case Block():
                told = "block mask"
            case other:
                assert_never(other)
        return f"{backend}, {told}" + (f" ({why})" if why else "")

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"mask={self.mask!r}, backend={self.backend}"

    def _choose(self, device: torch.device) -> Literal["reference", "matmul", "sdpa", "flex", "quicker"]:
        """quicker: of matmul and sdpa, which depends on the mask."""
        if self.backend != "auto":
            return self.backend
        if self.softcap is None:
            return "quicker"
        return "flex" if device.type == "cuda" and self.dropout == 0.0 else "reference"

    def _rate(self) -> float:
        return self.dropout if self.training else 0.0

    def _why_dense(self, q: Span, k: Span) -> str:
        if k.doc is not None:
            return "documents are packed"
        if k.pos is not None:
            return "keys are padded or placed by hand"
        if q.pos is not None:
            return "queries are padded or placed by hand"
        if self.mask.window is not None:
            return f"a window of {self.mask.window} over {k.length} keys"
        return f"{q.length} queries start at slot {q.start}, after the first key"


def _part(at: Span, part: slice) -> Span:
    """A part of a plain run of positions."""
    return Span(at.start + part.start, part.stop - part.start)
