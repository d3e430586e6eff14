"""LSTM: the recurrence that attention replaced (Hochreiter and Schmidhuber 1997; arXiv 1409.3215).

    i, f, g, o = x_t W_x + h_{t-1} W_h + b
    c_t = σ(f) c_{t-1} + σ(i) tanh(g)           h_t = σ(o) tanh(c_t)           out = h W_o

bidirectional: a second one reads from the end, and W_o merges the two: for encoders. torch's own `nn.LSTM` does the
work. It can neither leave padding out of what a state learns nor forget at the beginning of a document: such calls
walk from token to token by the formula above (exact, slower, and still without waiting for the device). So does a
decode step: for one token `nn.LSTM` spends most of its time on getting ready.
Shapes: B batch, T tokens, D model width, H hidden width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.errors import StateError
from brickformer.linear import BranchOut
from brickformer.mask import Span
from brickformer.mixers.base import Mixer, MixerSpec, expect_state
from brickformer.mixers.line import Line
from brickformer.mixers.recurrent import RecurrentState
from brickformer.ranges import check_width
from brickformer.spec import spec
from brickformer.state import State


@spec("lstm")
class LSTM(MixerSpec):
    """Long short-term memory. hidden: H, its width, default dim. bidirectional: read both ways, in encoders."""

    hidden: int | None = None
    bidirectional: bool = False

    def check(self) -> None:
        """A width is at least 1."""
        if self.hidden is not None:
            check_width(self, "hidden", self.hidden)

    def build(self, dim: int) -> Mixer:
        """The module."""
        hidden = self.hidden or dim
        ways = [_remembering(nn.LSTM(dim, hidden, batch_first=True)) for _ in range(1 + self.bidirectional)]
        return LSTMMixer(*ways, out=BranchOut(len(ways) * hidden, dim))


def _remembering(lstm: nn.LSTM) -> nn.LSTM:
    """Its forget gates start open: their bias is 1 (Gers et al. 2000)."""
    _, _, on_input, on_hidden = lstm.all_weights[0]
    for bias, value in ((on_input, 1.0), (on_hidden, 0.0)):
        nn.init.constant_(bias[lstm.hidden_size : 2 * lstm.hidden_size], value)
    return lstm


@final
class LSTMState(RecurrentState):
    """h, c: (B, H)."""

    brick = "lstm"

    def __init__(self, h: Float[Tensor, "B H"], c: Float[Tensor, "B H"]) -> None:
        super().__init__()
        self.h, self.c = h, c


@final
class LSTMMixer(Mixer):
    """One LSTM, or two that read against each other; then a projection."""

    def __init__(self, ahead: nn.LSTM, back: nn.LSTM | None = None, *, out: BranchOut) -> None:
        super().__init__()
        self.ahead, self.back, self.out = ahead, back, out
        self.causal = back is None

    def forward(self, x: Float[Tensor, "B T D"], at: Span, state: State | None = None) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""
        if state is not None:
            kept = expect_state(state, LSTMState, "lstm")
            if self.back is not None:
                raise self._two_way()
            size = (self.ahead.hidden_size,)
            kept.admit(len(x), at, h=size, c=size)
            y, kept.h, kept.c = _read(self.ahead, x, at, (kept.h.to(x.dtype), kept.c.to(x.dtype)))
            return self.out(y)
        empty = x.new_zeros(2, len(x), self.ahead.hidden_size).unbind()
        y, _, _ = _read(self.ahead, x, at, empty, remember=False)
        if self.back is not None:
            turned = replace(
                at, pos=None if at.pos is None else at.pos.flip(1), doc=None if at.doc is None else at.doc.flip(1)
            )
            z, _, _ = _read(self.back, x.flip(1), turned, empty, remember=False)
            y = torch.cat([y, z.flip(1)], -1)
        return self.out(y)

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """An empty state; its size does not depend on max_len. Errors: StateError when it reads both ways."""
        if self.back is not None:
            raise self._two_way()
        return LSTMState(*torch.zeros(2, batch, self.ahead.hidden_size, device=device, dtype=dtype).unbind())

    def _two_way(self) -> StateError:
        return StateError("lstm: reads both ways, so it cannot decode step by step. Use bidirectional=False.")


def _read(
    lstm: nn.LSTM, x: Tensor, at: Span, state: tuple[Tensor, ...], remember: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, D) in the order it is read -> (B, T, H); and h, c after the last real token, if they are remembered."""
    line = Line.of(at)
    x = line.pack(x)
    plain = line.since is None and (line.live is None or not remember)  # padding at the end changes no answer before it
    if plain and line.length > 1:
        y, (h, c) = lstm(x, (state[0][None], state[1][None]))
        return line.unpack(y), h[0], c[0]
    y, h, c = _walk(lstm, x, line, *state)
    return line.unpack(y), h, c


def _walk(lstm: nn.LSTM, x: Tensor, line: Line, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The formula, token by token: padding is passed over, a document begins with zeros."""
    w_x, w_h, b_x, b_h = lstm.all_weights[0]
    out = []
    for t, gates in enumerate(F.linear(x, w_x, b_x + b_h).unbind(1)):  # (B, 4H)
        if line.since is not None:
            begins = line.since[:, t, None] == 0
            h, c = h.masked_fill(begins, 0.0), c.masked_fill(begins, 0.0)
        i, f, g, o = (gates + F.linear(h, w_h)).chunk(4, -1)
        new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        new_h = o.sigmoid() * new_c.tanh()
        if line.live is not None:
            live = line.live[:, t, None]
            new_h, new_c = torch.where(live, new_h, h), torch.where(live, new_c, c)
        h, c = new_h, new_c
        out.append(h)
    return torch.stack(out, 1), h, c
