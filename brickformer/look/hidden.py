"""What mixers without attention look at.

A linear recurrence is a weighted sum over earlier tokens, so it has an attention matrix as well (arXiv 2403.01590):

    Mamba          α(t, s) = C_t · exp(A Σ_{s<r≤t} Δ_r) Δ_s B_s          one a channel
    Mamba-2        α(t, s) = C_t · B_s Δ_s Π_{s<r≤t} a_r                 one a head
    gated delta    y_t = Σ_s α(t, s) v_s                                 one a head: the rule, asked about unit vectors

The brick's own scan is given unit vectors in place of its values: what comes out at t of what went in at s is α(t, s).
An LSTM is not linear: shown is ‖∂y_t/∂x_s‖, the influence of each input. Signs and lengths are left out: a row is |α|,
divided by its sum; Mamba's row is the mean over its channels.
Only the rows asked for are computed, in tiles: a long text needs no T × T numbers.
Shapes: B batch, T tokens, R rows, D width, H heads, N states, I channels. Rows of a batch are taken one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from brickformer.mask import Span
from brickformer.mixers.base import Mixer
from brickformer.mixers.delta import GatedDeltaMixer, gated_delta_rule, unit
from brickformer.mixers.line import Line
from brickformer.mixers.lstm import LSTMMixer
from brickformer.mixers.mamba import MambaMixer
from brickformer.mixers.mamba2 import Mamba2Mixer, ssd
from brickformer.mixers.recurrent import LinearRecurrence, convolve, wide

NUMBERS: Final = 2**24
"""Numbers held at once: 64 MB of float32."""

HasHidden = MambaMixer | Mamba2Mixer | GatedDeltaMixer


def hidden_attention(
    mixer: HasHidden, x: Float[Tensor, "1 T D"], rows: Int[Tensor, " R"] | None = None
) -> Float[Tensor, "H R T"]:
    """α of a row of tokens without padding, signs and lengths kept; of Mamba for every channel. rows: default: all."""
    rows = torch.arange(x.shape[1], device=x.device) if rows is None else rows
    match mixer:
        case MambaMixer():
            return torch.cat([torch.cat(list(_mamba(mixer, x, some))) for some in _tiles(mixer, x, rows)], 1)
        case Mamba2Mixer():
            return _mamba2(mixer, x, rows)
        case GatedDeltaMixer():
            return _delta(mixer, x, rows)


def looked_at(mixer: Mixer, x: Float[Tensor, "1 T D"], rows: Int[Tensor, " R"]) -> Float[Tensor, "H R T"] | None:
    """Rows that sum to 1, for a row of tokens without padding; None where nothing of the kind is known."""
    match mixer:
        case MambaMixer():
            alpha = torch.cat([_of_channels(_mamba(mixer, x, tile)) for tile in _tiles(mixer, x, rows)])[None]
        case Mamba2Mixer() | GatedDeltaMixer():
            alpha = hidden_attention(mixer, x, rows).abs()
        case LSTMMixer():
            alpha = influence(mixer, x, rows)[None]
        case _:
            return None
    return alpha / alpha.sum(-1, keepdim=True).clamp_min(torch.finfo(alpha.dtype).tiny)


def influence(mixer: Mixer, x: Float[Tensor, "1 T D"], rows: Int[Tensor, " R"] | None = None) -> Float[Tensor, "R T"]:
    """‖∂y_t/∂x_s‖ (Frobenius) of any mixer, estimated by 8 random directions of y; R backward passes of 8 rows."""
    tokens, draws = x.shape[1], 8
    asked = range(tokens) if rows is None else rows.tolist()
    directions = torch.randn(draws, x.shape[2], generator=torch.Generator().manual_seed(0)).to(x)
    with torch.enable_grad():
        copies = x.detach().expand(draws, -1, -1).clone().requires_grad_()
        y = mixer.forward(copies, Span(0, tokens))  # not mixer(...): who watches it must not be watched
        out = []
        for t in asked:
            (g,) = torch.autograd.grad((y[:, t] * directions).sum(), copies, retain_graph=True)
            out.append(g.square().sum(-1).mean(0).sqrt())
    return torch.stack(out)


def _line(mixer: LinearRecurrence, x: Tensor) -> tuple[Line, Tensor]:
    """An empty past."""
    return Line(x.shape[1]), x.new_zeros(1, *mixer.tail_size)


def _tiles(mixer: MambaMixer, x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """As many rows at a time as one channel has room for."""
    return rows.split(max(1, NUMBERS // (x.shape[1] * mixer.A_log.shape[1])))


def _of_channels(alpha: Iterator[Tensor]) -> Float[Tensor, "R T"]:
    """Σ over channels of |α|; some at a time."""
    total = next(alpha).abs().sum(0)
    for some in alpha:
        total += some.abs().sum(0)
    return total


def _mamba(mixer: MambaMixer, x: Tensor, rows: Tensor) -> Iterator[Float[Tensor, "I R T"]]:
    """Some channels at a time."""
    line, tail = _line(mixer, x)
    u, _ = mixer.into(x).chunk(2, -1)
    u, _ = convolve(u, mixer.conv, line, tail)
    dt, b, c = (v[0] for v in mixer.selected(u))  # (T, I), 2 × (T, N)
    a, b, c = -mixer.A_log.to(dt.dtype).exp(), b.to(dt.dtype), c.to(dt.dtype)  # (I, N), 2 × (T, N)
    tokens, passed, c = len(dt), dt.cumsum(0), c[rows]
    earlier = torch.arange(tokens, device=x.device) <= rows[:, None]
    per = max(1, NUMBERS // (len(rows) * tokens * a.shape[1]))
    for i in range(0, a.shape[0], per):
        some = slice(i, i + per)
        since = (passed[rows, None, some] - passed[None, :, some]).masked_fill(~earlier[..., None], 0.0)  # (R, T, I')
        decay = (since[..., None] * a[some]).exp()  # (R, T, I', N)
        alpha = torch.einsum("tsin,tn,sn->its", decay, c, b) * dt[:, some].t()[:, None, :]
        yield alpha.masked_fill(~earlier, 0.0)


def _mamba2(mixer: Mamba2Mixer, x: Tensor, rows: Tensor) -> Tensor:
    line, tail = _line(mixer, x)
    inner, _, shared, _, heads = mixer.into.parts
    _, mixed, dt = mixer.into(x).split([inner, inner + 2 * shared, heads], -1)
    mixed, _ = convolve(mixed, mixer.conv, line, tail)
    mixed, dt = mixed.to(wide(x)), F.softplus(dt.to(wide(x)) + mixer.dt_bias.to(wide(x)))
    _, b, c = mixed.split([inner, shared, shared], -1)
    b, c = (v.unflatten(-1, (mixer.groups, -1)) for v in (b, c))
    out = []
    for ones in _unit_vectors(x, heads):
        empty = ones.new_zeros(1, mixer.groups, heads // mixer.groups * ones.shape[-1], shared // mixer.groups)
        y, _ = ssd(dt, ones, -mixer.A_log.to(wide(x)).exp(), b, c, empty)  # (1, T, H, S)
        out.append(y[0, rows].transpose(0, 1))
    return torch.cat(out, -1)


def _delta(mixer: GatedDeltaMixer, x: Tensor, rows: Tensor) -> Tensor:
    line, tail = _line(mixer, x)
    keys, _, values, _, heads, _ = mixer.into.parts
    mixed, _, beta, dt = mixer.into(x).split([2 * keys + values, values, heads, heads], -1)
    mixed, _ = convolve(mixed, mixer.conv, line, tail)
    mixed, beta, dt = (v.to(wide(x)) for v in (mixed, beta, dt))
    log_a = -mixer.A_log.to(wide(x)).exp() * F.softplus(dt + mixer.dt_bias.to(wide(x)))
    q, k, _ = mixed.split([keys, keys, values], -1)
    q, k = (unit(w.unflatten(-1, (-1, mixer.width))) for w in (q, k))
    out = []
    for ones in _unit_vectors(x, heads):
        empty = ones.new_zeros(1, heads, mixer.width, ones.shape[-1])
        y, _ = gated_delta_rule(q, k, ones, log_a, beta.sigmoid(), empty)
        out.append(y[0, rows].transpose(0, 1))
    return torch.cat(out, -1)


def _unit_vectors(x: Tensor, heads: int) -> Iterator[Float[Tensor, "1 T H S"]]:
    """Token s writes 1 into channel s: some tokens at a time."""
    tokens = torch.arange(x.shape[1], device=x.device)
    for some in tokens.split(max(1, NUMBERS // (len(tokens) * heads))):
        ones = (tokens[:, None] == some).to(wide(x))
        yield ones[None, :, None].expand(1, -1, heads, -1).contiguous()
