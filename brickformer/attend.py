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
from typing import Any, Literal, assert_never, final, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from brickformer.errors import SpecError
from brickformer.mask import Block, Dense, Everything, IsCausal, Lowered, Mask, Span, lower

Backend = Literal["auto", "reference", "matmul", "sdpa", "flex"]
SHORT, SHORT_CAUSAL, BLOCK = 64 * 64, 512, 128
"""On a CPU, forward and backward are quicker by `matmul` than fused: up to SHORT scores a head (2 to 5 times for 8
tokens), and up to SHORT_CAUSAL tokens under the causal triangle, cut into BLOCK queries at a time and what they see (a
quarter less time at 256 and 512 tokens). Beyond, and where no backward follows, fused is quicker."""


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
    return weights @ _one_key_head_a_head(v, q)


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
    scores = q @ _one_key_head_a_head(k, q).transpose(-2, -1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    # The lowest finite number, not 0 (a zero score still gets weight) and not -inf (a row of -inf is NaN).
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if sinks is not None:  # one more key, which every query sees and which gives nothing
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return torch.softmax(scores, dim=-1)[..., : k.shape[2]].masked_fill(~allowed, 0.0)


def _one_key_head_a_head(x: Tensor, q: Tensor) -> Tensor:
    """(B, G, S, K) -> (B, H, S, K): query heads g·H/G ... (g+1)·H/G - 1 share key head g."""
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


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
        dropout = self.dropout if self.training else 0.0
        match self._choose(q.device):
            case "reference":
                allowed = _as_map(lower(self.mask, q_at, k_at, device=q.device), q, k)
                return reference(
                    q, k, v, allowed, bias=bias, scale=self.scale, softcap=self.softcap, sinks=sinks, dropout=dropout
                )
            case "matmul" | "sdpa" | "quicker" as backend:
                lowered = lower(self.mask, q_at, k_at, device=q.device)
                if backend == "quicker":
                    learning = q.requires_grad and torch.is_grad_enabled()
                    backend = _quicker(lowered, q.shape[2], k.shape[2], q.device, learning)
                if sinks is not None:
                    lowered, k, v, bias = _with_sink(lowered, q, k, v, bias, sinks)
                run = _matmul if backend == "matmul" else _sdpa
                return run(q, k, v, lowered, bias, scale=self.scale, dropout=dropout)
            case "flex":
                assert sinks is None, "refused when built"
                if q.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
                    raise SpecError(
                        "attention: got backend 'flex' with gradients on a CPU, where FlexAttention has none. Use "
                        "backend='auto', a GPU, or torch.no_grad()."
                    )
                lowered = lower(self.mask, q_at, k_at, device=q.device, flex=True)
                return _flex(q, k, v, lowered, bias, scale=self.scale, softcap=self.softcap)
            case other:
                assert_never(other)

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
        allowed = _as_map(lower(self.mask, q_at, k_at, device=q.device), q, k)
        return attention_weights(q, k, allowed, bias=bias, scale=self.scale, softcap=self.softcap, sinks=sinks)

    def explain(self, q_at: Span, k_at: Span, *, device: torch.device | None = None, learning: bool = False) -> str:
        """Which kernel a call would take, how the mask is told, and why: ``sdpa, dense mask: keys are padded``.

        learning: a backward pass follows.
        """
        device = device or torch.device("cpu")
        lowered = lower(self.mask, q_at, k_at, device=device)
        backend = self._choose(device)
        if backend == "quicker":
            backend = _quicker(lowered, q_at.length, k_at.length, device, learning)
        why = ""
        if self.softcap is not None:
            why = f"soft cap {self.softcap:g}, which sdpa cannot do"
        elif backend == "matmul" and self.backend == "auto":
            why = "short: quicker than fused"
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


def _as_map(lowered: Lowered, q: Tensor, k: Tensor) -> Tensor:
    """Any lowering as a boolean map, (B or 1, 1, T, S)."""
    tokens, keys = q.shape[2], k.shape[2]
    match lowered:
        case Dense(allowed=allowed):
            return allowed
        case IsCausal():
            return torch.ones(1, 1, tokens, keys, dtype=torch.bool, device=q.device).tril()
        case Everything(last=last):
            everything = torch.ones(1, 1, tokens, keys, dtype=torch.bool, device=q.device)
            if last is not None:
                everything[..., : keys - last] = False
            return everything
        case Block():
            raise AssertionError("a block mask is lowered for flex only")
        case other:
            assert_never(other)


def _with_sink(
    lowered: Lowered, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor
) -> tuple[Lowered, Tensor, Tensor, Tensor]:
    """The sink as one more key: of zeros, so that its score is the bias it gets, with a value of zeros."""
    allowed = F.pad(_as_map(lowered, q, k), (0, 1), value=True)
    k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    if bias is None:
        bias = q.new_zeros(1, 1, q.shape[2], k.shape[2] - 1)
    column = sinks.to(bias.dtype).view(1, -1, 1, 1).expand(len(bias), -1, bias.shape[2], 1)
    bias = torch.cat([bias.expand(-1, len(sinks), -1, -1), column], dim=-1)
    return Dense(allowed), k, v, bias


def _quicker(
    lowered: Lowered, tokens: int, keys: int, device: torch.device, learning: bool
) -> Literal["matmul", "sdpa"]:
    """learning: a backward follows."""
    if not learning or device.type != "cpu" or tokens == 1:
        return "sdpa"
    short = keys <= SHORT_CAUSAL if isinstance(lowered, IsCausal) else tokens * keys <= SHORT
    return "matmul" if short else "sdpa"


def _matmul(
    q: Tensor, k: Tensor, v: Tensor, lowered: Lowered, bias: Tensor | None, *, scale: float | None, dropout: float
) -> Tensor:
    """The reference in fewer passes over the scores: the mask is one small tensor that is added to them."""
    allowed, keys = _as_map(lowered, q, k), k.shape[2]
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    k, v = _one_key_head_a_head(k, q), _one_key_head_a_head(v, q)
    if not isinstance(lowered, IsCausal) or keys <= BLOCK:
        out = _product(q, k, v, allowed, bias, dropout)
        return out.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0) if isinstance(lowered, Dense) else out
    blocks = []
    k, v = k.contiguous(), v.contiguous()
    for first in range(0, keys, BLOCK):
        end = min(first + BLOCK, keys)
        here = None if bias is None else bias[:, :, first:end, :end]
        seen = allowed[:, :, first:end, :end]
        blocks.append(_product(q[:, :, first:end], k[:, :, :end], v[:, :, :end], seen, here, dropout))
    return torch.cat(blocks, dim=2)


def _product(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
    """softmax(q kᵀ + bias, where allowed) v."""
    dtype = q.dtype if bias is None else torch.promote_types(q.dtype, bias.dtype)
    # Half of the lowest number: a score, a bias or a rounding below 0 cannot make it -inf.
    hidden = torch.zeros(allowed.shape, dtype=dtype, device=q.device)
    hidden = hidden.masked_fill(~allowed, torch.finfo(dtype).min / 2)
    weights = torch.softmax(q @ k.transpose(-2, -1) + (hidden if bias is None else bias + hidden), dim=-1).to(v.dtype)
    return (F.dropout(weights, dropout) if dropout > 0.0 else weights) @ v


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, lowered: Lowered, bias: Tensor | None, *, scale: float | None, dropout: float
) -> Tensor:
    """torch's scaled_dot_product_attention: FlashAttention and its kin where the device has them (arXiv 2205.14135)."""
    mask, is_causal = bias, False
    match lowered:
        case Everything(last=last):
            if last is not None:
                k, v = k[:, :, -last:], v[:, :, -last:]
                mask = None if bias is None else bias[..., -last:]
        case IsCausal():
            is_causal = bias is None
            if bias is not None:
                mask = bias.masked_fill(~_as_map(lowered, q, k), -torch.inf)
        case Dense(allowed=allowed):
            mask = allowed if bias is None else bias.masked_fill(~allowed, -torch.inf)
        case Block():
            raise AssertionError("a block mask is lowered for flex only")
        case other:
            assert_never(other)
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lowered: Lowered,
    bias: Tensor | None,
    *,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """FlexAttention: compiled on CUDA, where it is made for; run as it is elsewhere."""
    from torch.nn.attention.flex_attention import flex_attention

    block_mask: Any = None
    match lowered:
        case Block(block_mask=made):
            block_mask = made
        case Everything(last=last):
            if last is not None:
                k, v = k[:, :, -last:], v[:, :, -last:]
                bias = None if bias is None else bias[..., -last:]
        case IsCausal():
            at = Span(0, q.shape[2])
            block_mask = _causal_block(at, q)
        case Dense():
            raise AssertionError("flex is told by block masks")
        case other:
            assert_never(other)

    @no_type_check  # torch traces it, which it cannot do through the shape checks of pytest
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias[b if len(bias) > 1 else 0, h if bias.shape[1] > 1 else 0, i, j]
        return score

    run: Any = torch.compile(flex_attention) if q.device.type == "cuda" else flex_attention
    plain = softcap is None and bias is None
    out: Tensor = run(
        q,
        k,
        v,
        score_mod=None if plain else score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out


def _causal_block(at: Span, q: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: j <= i, None, None, at.length, at.length, device=q.device.type)
