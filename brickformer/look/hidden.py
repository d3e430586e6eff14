"""What mixers without attention look at.

A linear recurrence is a weighted sum over earlier tokens, so it has an attention matrix as well (arXiv 2403.01590):

    Mamba          α(t, s) = C_t · exp(A Σ_{s<r≤t} Δ_r) Δ_s B_s          one a channel
    Mamba-2        α(t, s) = C_t · B_s Δ_s Π_{s<r≤t} a_r                 one a head
    gated delta    y_t = Σ_s α(t, s) v_s                                 one a head

Mamba-2 and the delta rule: the brick's own scan is differentiated, α(t, s) = ∂y_t/∂v_s; a row takes one channel of
the values, so rows go side by side. Mamba, whose channels all decay otherwise: for keys s up to e ≤ t both factors of
exp(A Σ_{e<r≤t} Δ_r) · exp(A Σ_{s<r≤e} Δ_r) are at most 1, and a chunk of keys is a matrix product.
An LSTM is not linear: shown is the influence of each input (influence.py). Signs and lengths are left out: a row is
|α|, divided by its sum; Mamba's row is the mean over its channels.
Only the rows asked for are computed, in tiles: a long text needs no T × T numbers.
Shapes: B batch, T tokens, R rows, D width, H heads, N states, I channels. Rows of a batch are taken one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from brickformer.look.influence import influence
from brickformer.mixers.base import Mixer
from brickformer.mixers.chunked import CHUNK
from brickformer.mixers.delta import GatedDeltaMixer, gated_delta_rule, unit
from brickformer.mixers.line import Line
from brickformer.mixers.lstm import LSTMMixer
from brickformer.mixers.mamba import MambaMixer
from brickformer.mixers.mamba2 import Mamba2Mixer, ssd
from brickformer.mixers.recurrent import LinearRecurrence, convolve, wide

NUMBERS: Final = 2**22
"""Numbers of one tensor at most, but for what a mixer computes of a text anyway: 16 MB of float32."""

Rows = Iterator[tuple[Int[Tensor, " r"], Float[Tensor, "H r T"]]]
HasHidden = MambaMixer | Mamba2Mixer | GatedDeltaMixer


def hidden_attention(
    mixer: HasHidden, x: Float[Tensor, "1 T D"], rows: Int[Tensor, " R"] | None = None
) -> Float[Tensor, "H R T"]:
    """α of a row of tokens without padding, signs and lengths kept; of Mamba for every channel. rows: default: all."""
    rows = torch.arange(x.shape[1], device=x.device) if rows is None else rows
    match mixer:
        case MambaMixer():
            out = torch.zeros(mixer.into.parts[0], len(rows), x.shape[1], dtype=wide(x), device=x.device)
            for channels, who, keys, alpha in _mamba(mixer, x, rows):
                out[channels, who, keys] = alpha
            return out
        case Mamba2Mixer():
            return torch.cat([alpha for _, alpha in _mamba2(mixer, x, rows)], 1)
        case GatedDeltaMixer():
            return torch.cat([alpha for _, alpha in _delta(mixer, x, rows)], 1)


def looked_at(mixer: Mixer, x: Float[Tensor, "1 T D"], rows: Int[Tensor, " R"]) -> Rows:
    """Some rows at a time, each of sum 1, for tokens without padding; nothing where nothing of the kind is known."""
    parts: Rows
    match mixer:
        case MambaMixer():
            parts = ((some, _of_channels(mixer, x, some)) for some in _tiles(rows, x.shape[1]))
        case Mamba2Mixer():
            parts = _mamba2(mixer, x, rows)
        case GatedDeltaMixer():
            parts = _delta(mixer, x, rows)
        case LSTMMixer():
            parts = ((some, influence(mixer, x, some)[None]) for some in _tiles(rows, x.shape[1]))
        case _:
            return
    for some, alpha in parts:
        alpha = alpha.abs_()
        yield some, alpha.div_(alpha.sum(-1, keepdim=True).clamp_min(torch.finfo(alpha.dtype).tiny))


def _tiles(rows: Tensor, numbers: int) -> tuple[Tensor, ...]:
    """As many rows at a time as there is room for, when one needs so many numbers."""
    return rows.split(max(1, NUMBERS // numbers))


def _line(mixer: LinearRecurrence, x: Tensor) -> tuple[Line, Tensor]:
    """An empty past."""
    return Line(x.shape[1]), x.new_zeros(1, *mixer.tail_size)


def _of_channels(mixer: MambaMixer, x: Tensor, rows: Tensor) -> Float[Tensor, "1 R T"]:
    """Σ over channels of |α|."""
    total = torch.zeros(len(rows), x.shape[1], dtype=wide(x), device=x.device)
    for _, who, keys, alpha in _mamba(mixer, x, rows):
        total[who, keys] += alpha.abs_().sum(0)
    return total[None]


def _mamba(mixer: MambaMixer, x: Tensor, rows: Tensor) -> Iterator[tuple[slice, Tensor, slice, Tensor]]:
    """(channels, rows, keys, α): what is not met is 0."""
    line, tail = _line(mixer, x)
    u, _ = mixer.into(x).chunk(2, -1)
    u, _ = convolve(u, mixer.conv, line, tail)
    dt, b, c = (v[0] for v in mixer.selected(u))  # (T, I), 2 × (T, N)
    a, b, c = -mixer.A_log.to(dt.dtype).exp(), b.to(dt.dtype), c.to(dt.dtype)[rows]  # (I, N), (T, N), (R, N)
    states, end = a.shape[1], max(rows.tolist(), default=-1) + 1
    per = max(1, NUMBERS // (len(rows) * max(CHUNK, states) + CHUNK * CHUNK * states))
    for channels in map(slice, range(0, len(a), per), range(per, len(a) + per, per)):
        decay, passed = a[channels], dt[:, channels].double().cumsum(0)  # (I', N), (T, I')
        at = passed[rows]
        for s in range(0, end, CHUNK):
            keys = slice(s, min(s + CHUNK, end))
            last = keys.stop - 1
            there, wrote = passed[keys], dt[keys, channels].t()  # (S, I'), (I', S)
            after, among = (rows >= last).nonzero()[:, 0], ((rows >= s) & (rows < last)).nonzero()[:, 0]
            if len(after):
                # (R, I', N): what is left at t of the end of the chunk; (S, I', N): at its end of what s wrote
                asked = ((at[after] - passed[last]).to(dt.dtype)[..., None] * decay).exp_() * c[after, None]
                written = ((passed[last] - there).to(dt.dtype)[..., None] * decay).exp_() * b[keys, None]
                alpha = asked.transpose(0, 1) @ written.permute(1, 2, 0)  # (I', R, S)
                yield channels, after, keys, alpha.mul_(wrote[:, None])
            if len(among):
                since = (at[among, None] - there).to(dt.dtype)  # (R', S, I'), below 0 where s is later
                alpha = torch.einsum(
                    "tsin,tn,sn->its", (since.clamp_min(0.0)[..., None] * decay).exp_(), c[among], b[keys]
                )
                later = torch.arange(s, keys.stop, device=x.device) > rows[among, None]
                yield channels, among, keys, alpha.mul_(wrote[:, None]).masked_fill_(later, 0.0)


def _mamba2(mixer: Mamba2Mixer, x: Tensor, rows: Tensor) -> Rows:
    line, tail = _line(mixer, x)
    inner, _, shared, _, heads = mixer.into.parts
    _, mixed, dt = mixer.into(x).split([inner, inner + 2 * shared, heads], -1)
    mixed, _ = convolve(mixed, mixer.conv, line, tail)
    mixed, dt = mixed.to(wide(x)), F.softplus(dt.to(wide(x)) + mixer.dt_bias.to(wide(x)))
    _, b, c = mixed.split([inner, shared, shared], -1)
    b, c = (v.unflatten(-1, (mixer.groups, -1)) for v in (b, c))
    decay, grouped, states = -mixer.A_log.to(wide(x)).exp(), heads // mixer.groups, shared // mixer.groups

    def scan(values: Tensor) -> Tensor:
        empty = values.new_zeros(1, mixer.groups, grouped * values.shape[-1], states)
        return ssd(dt, values, decay, b, c, empty)[0]

    return _asked(scan, dt, rows, states)


def _delta(mixer: GatedDeltaMixer, x: Tensor, rows: Tensor) -> Rows:
    line, tail = _line(mixer, x)
    keys, _, values, _, heads, _ = mixer.into.parts
    mixed, _, beta, dt = mixer.into(x).split([2 * keys + values, values, heads, heads], -1)
    mixed, _ = convolve(mixed, mixer.conv, line, tail)
    mixed, beta, dt = (v.to(wide(x)) for v in (mixed, beta, dt))
    log_a = -mixer.A_log.to(wide(x)).exp() * F.softplus(dt + mixer.dt_bias.to(wide(x)))
    q, k, _ = mixed.split([keys, keys, values], -1)
    q, k = (unit(w.unflatten(-1, (-1, mixer.width))) for w in (q, k))

    def rule(values: Tensor) -> Tensor:
        empty = values.new_zeros(1, heads, mixer.width, values.shape[-1])
        return gated_delta_rule(q, k, values, log_a, beta.sigmoid(), empty)[0]

    return _asked(rule, log_a, rows, mixer.width)


def _asked(scan: Callable[[Tensor], Tensor], like: Float[Tensor, "1 T H"], rows: Tensor, states: int) -> Rows:
    """∂ scan(v)_t / ∂ v for the rows t: of values v (1, T, H, r), channel i is asked at rows[i] alone."""
    one = 4 * like[0].numel() * (1 + states // CHUNK)  # of a channel and its memory at each chunk, and their copies
    for some in _tiles(rows, one):
        with torch.enable_grad():
            values = like.new_zeros(*like.shape, len(some)).requires_grad_()
            y = scan(values)
        asked = torch.zeros_like(y)
        asked[0, some, :, torch.arange(len(some), device=some.device)] = 1.0
        (alpha,) = torch.autograd.grad(y, values, asked)
        yield some, alpha[0].permute(1, 2, 0).contiguous()
