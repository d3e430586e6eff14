"""What an LSTM looks at: the influence of each input on each output.

    I(t, s) = ‖∂y_t/∂x_s‖ (Frobenius)      estimated by 8 random directions u of y: I² ≈ mean ‖∂(u · y_t)/∂x_s‖²

The derivative is walked back by hand, from the last token to the first, all rows side by side (Hochreiter and
Schmidhuber 1997, backwards):

    γ_c += γ_h σ(o) (1 - tanh²c_s)
    δ = (γ_c g i', γ_c c_{s-1} f', γ_c i g', γ_h tanh(c_s) o')        x' = the derivative of the gate's nonlinearity
    ∂/∂x_s = δ W_x;   γ_h ← δ W_h;   γ_c ← γ_c f

Kept are the gates of each token once, not the graph of a copy for each direction; a row whose γ have faded below FADED
is done: nothing before it is seen.
Shapes: T tokens, D width, H hidden width, R rows, U directions.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from brickformer.mixers.lstm import LSTMMixer
from brickformer.mixers.recurrent import wide

DIRECTIONS: Final = 8

FADED: Final = 1e-30
"""Derivatives below it are zeros: numbers that float32 can hardly hold, and that a processor is slow with."""

_LOOK: Final = 64  # tokens from one look at what has faded to the next


@torch.no_grad()
def influence(
    mixer: LSTMMixer, x: Float[Tensor, "1 T D"], rows: Int[Tensor, " R"] | None = None
) -> Float[Tensor, "R T"]:
    """I(t, s) for a row of tokens without padding. rows: default: all."""
    tokens = x.shape[1]
    rows = torch.arange(tokens, device=x.device) if rows is None else rows
    ones = torch.eye(mixer.ahead.hidden_size * (1 if mixer.back is None else 2)).to(x)
    out = (mixer.out(ones) - mixer.out(torch.zeros_like(ones[:1]))).to(wide(x))  # (H or 2H, D), whatever kind of map
    x = x[0].to(wide(x))
    directions = torch.randn(DIRECTIONS, out.shape[1], generator=torch.Generator().manual_seed(0)).to(x) @ out.t()
    first, *second = directions.split(mixer.ahead.hidden_size, 1)
    squares, own = _walked_back(mixer.ahead, x, rows, first)
    if mixer.back is not None:  # y adds what both say: their derivatives meet at s = t alone
        other, mine = _walked_back(mixer.back, x.flip(0), tokens - 1 - rows, second[0])
        squares += other.flip(1)
        squares[torch.arange(len(rows), device=x.device), rows] += 2 * (own * mine).sum((1, 2))
    return squares.div(DIRECTIONS).sqrt()


def _walked_back(
    lstm: nn.LSTM, x: Float[Tensor, "T D"], rows: Int[Tensor, " R"], u: Float[Tensor, "U H"]
) -> tuple[Float[Tensor, "R T"], Float[Tensor, "R U D"]]:
    """Σ over directions of ‖∂(u · h_t)/∂x_s‖², and the derivatives at s = t."""
    w_x, w_h, b_x, b_h = (w.to(x.dtype) for w in lstm.all_weights[0])
    gates, cells = _gates(x, w_x, w_h, b_x + b_h)
    empty = torch.zeros_like(cells[:1])
    i, f, g, o = gates.unbind(1)  # (T, H) each
    before, shown = torch.cat([empty, cells[:-1]]), cells.tanh()
    by_cell = torch.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g)], 1)  # (T, 3, H)
    by_out, into_cell = shown * o * (1 - o), o * (1 - shown * shown)  # (T, H)
    back = torch.cat([w_x, w_h], 1)  # (4H, D + H)
    squares, own = x.new_zeros(len(rows), len(x)), x.new_zeros(len(rows), len(u), x.shape[1])
    places: dict[int, list[int]] = {}
    for r, t in enumerate(rows.tolist()):
        places.setdefault(t, []).append(r)
    alive = rows.new_zeros(0)
    h, c = x.new_zeros(2, 0, *u.shape).unbind()  # γ_h, γ_c of the rows that are alive: (R', U, H)
    for s in range(max(places, default=-1), -1, -1):
        begun = places.get(s, [])
        if begun:
            alive = torch.cat([alive, alive.new_tensor(begun)])
            h = torch.cat([h, u.expand(len(begun), -1, -1)])
            c = torch.cat([c, torch.zeros_like(h[-len(begun) :])])
        if not len(alive):
            continue
        c = torch.addcmul(c, h, into_cell[s])
        inner = (c.unsqueeze(2) * by_cell[s]).flatten(2)
        d_x, d_h = (torch.cat([inner, h * by_out[s]], 2) @ back).split([x.shape[1], u.shape[1]], 2)
        squares[alive, s] = d_x.square().sum((1, 2))
        if begun:
            own[begun] = d_x[-len(begun) :]
        h, c = d_h, c * f[s]
        if s % _LOOK == 0:
            left = torch.maximum(h.abs().amax((1, 2)), c.abs().amax((1, 2))) > FADED
            alive, h, c = alive[left], h[left], c[left]
    return squares, own


def _gates(
    x: Float[Tensor, "T D"], w_x: Tensor, w_h: Tensor, b: Tensor
) -> tuple[Float[Tensor, "T 4 H"], Float[Tensor, "T H"]]:
    """i, f, g, o after their nonlinearities, and c, of every token, from zeros."""
    h = c = x.new_zeros(w_h.shape[1])
    gates, cells = [], []
    for given in F.linear(x, w_x, b):
        i, f, g, o = (given + w_h @ h).view(4, -1)
        now = torch.stack([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()])
        c = now[1] * c + now[0] * now[2]
        h = now[3] * c.tanh()
        gates.append(now)
        cells.append(c)
    return torch.stack(gates), torch.stack(cells)
