"""Kernels of attention, each told the same thing in its own words: matrix products, torch's fused one, FlexAttention.

`attend` alone calls them. A mask comes lowered (`mask.lower`); a query that may see no key gets zeros from each.

Shapes: q (B, H, T, K), k (B, G, S, K), v (B, G, S, V), bias (#B, #H, T, S), all -> (B, H, T, V).
"""

from __future__ import annotations

from typing import Any, Literal, assert_never, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from brickformer.mask import Block, Dense, Everything, IsCausal, Lowered, Mask, Span

SHORT, SHORT_CAUSAL, BLOCK = 64 * 64, 512, 128
"""On a CPU, forward and backward are quicker by `matmul` than fused: up to SHORT scores a head (2 to 5 times for 8
tokens), and up to SHORT_CAUSAL tokens under the causal triangle, cut into BLOCK queries at a time and what they see (a
quarter less time at 256 and 512 tokens). Beyond, and where no backward follows, fused is quicker."""


def as_map(lowered: Lowered, q: Tensor, k: Tensor) -> Tensor:
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


def with_sink(
    lowered: Lowered, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor
) -> tuple[Lowered, Tensor, Tensor, Tensor]:
    """The sink as one more key: of zeros, so that its score is the bias it gets, with a value of zeros."""
    allowed = F.pad(as_map(lowered, q, k), (0, 1), value=True)
    k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    if bias is None:
        bias = q.new_zeros(1, 1, q.shape[2], k.shape[2] - 1)
    column = sinks.to(bias.dtype).view(1, -1, 1, 1).expand(len(bias), -1, bias.shape[2], 1)
    bias = torch.cat([bias.expand(-1, len(sinks), -1, -1), column], dim=-1)
    return Dense(allowed), k, v, bias


def one_key_head_a_head(x: Tensor, q: Tensor) -> Tensor:
    """(B, G, S, K) -> (B, H, S, K): query heads g·H/G ... (g+1)·H/G - 1 share key head g."""
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def quicker(
    lowered: Lowered, tokens: int, keys: int, device: torch.device, learning: bool
) -> Literal["matmul", "sdpa"]:
    """learning: a backward follows."""
    if not learning or device.type != "cpu" or tokens == 1:
        return "sdpa"
    short = keys <= SHORT_CAUSAL if isinstance(lowered, IsCausal) else tokens * keys <= SHORT
    return "matmul" if short else "sdpa"


def local_blocks(mask: Mask, q: Span, k: Span) -> list[tuple[slice, slice]]:
    """Where a window is short beside the row: blocks of queries, each with the keys it may see. Else none.

    T queries with a window of W then cost T · 2W instead of T², in time and in memory.
    """
    plain = q.pos is None and q.doc is None and k.pos is None and k.doc is None
    if mask.window is None or not plain or k.start > q.start or k.end < q.end:
        return []
    step = max(mask.window, BLOCK)
    if q.length <= 2 * step:
        return []
    blocks = []
    for first in range(q.start, q.end, step):
        end = min(first + step, q.end)
        low, high = max(k.start, first - mask.window + 1), min(k.end, end if mask.causal else end + mask.window - 1)
        blocks.append((slice(first - q.start, end - q.start), slice(low - k.start, high - k.start)))
    return blocks


def matmul(
    q: Tensor, k: Tensor, v: Tensor, lowered: Lowered, bias: Tensor | None, *, scale: float | None, dropout: float
) -> Tensor:
    """The reference in fewer passes over the scores: the mask is one small tensor that is added to them."""
    allowed, keys = as_map(lowered, q, k), k.shape[2]
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    k, v = one_key_head_a_head(k, q), one_key_head_a_head(v, q)
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
    scores = q @ k.transpose(-2, -1)
    # In float32 at least, and half of the lowest number: no score, bias or rounding makes it -inf or outweighs it.
    dtype = torch.promote_types(torch.float32, scores.dtype if bias is None else bias.dtype)
    hidden = torch.zeros(allowed.shape, dtype=dtype, device=q.device)
    hidden = hidden.masked_fill(~allowed, torch.finfo(dtype).min / 2)
    weights = torch.softmax(scores + (hidden if bias is None else bias + hidden), dim=-1).to(v.dtype)
    return (F.dropout(weights, dropout) if dropout > 0.0 else weights) @ v


def sdpa(
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
                mask = bias.masked_fill(~as_map(lowered, q, k), -torch.inf)
        case Dense(allowed=allowed):
            mask = allowed if bias is None else bias.masked_fill(~allowed, -torch.inf)
        case Block():
            raise AssertionError("a block mask is lowered for flex only")
        case other:
            assert_never(other)
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(q.dtype)
    width, value = q.shape[-1], v.shape[-1]
    if width != value and q.device.type == "cpu" and q.shape[2] * k.shape[2] > SHORT:
        # torch has no fused kernel for values of another width there, and would write all scores down
        scale = width**-0.5 if scale is None else scale
        q, k = (F.pad(x, (0, max(0, value - width))) for x in (q, k))
        v = F.pad(v, (0, max(0, width - value)))
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out if out.shape[-1] == value else out[..., :value]


def flex(
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
