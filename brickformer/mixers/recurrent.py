"""What mixers with a recurrent memory share: the state, the short convolution, the way through a long sequence.

    x -> Line.pack -> block by block: (tokens, tail, h) -> (out, tail, h) -> Line.unpack

A linear recurrence (Mamba, Mamba-2, the gated delta rule) carries two things from token to token: the last W-1 tokens
that its convolution still sees, and its memory h. Long calls are worked off in blocks whose intermediate values are of
bounded size, so what is carried from block to block is what a state carries from call to call, and a decode step is a
block of one token. Decays and memories are computed in float32 at least.
Shapes: B batch, T tokens, D model width, I inner channels, W width of the convolution.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, Final, Self, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from brickformer.errors import StateError
from brickformer.mask import Span
from brickformer.mixers.base import Mixer, expect_state
from brickformer.mixers.kernels import Find, serves
from brickformer.mixers.line import Line
from brickformer.state import State

STEP_RANGE: Final = (1e-3, 1e-1)
"""Initial step sizes lie in this range, evenly in their logarithm (arXiv 2312.00752, 3.6)."""


class RecurrentState(State):
    """Slot: a summary of everything seen, of a size that does not grow. length: slots seen. brick: whose it is.

    Its tensors, and nothing else that depends on the batch, have the batch as their first axis.
    """

    brick: ClassVar[str]

    def __init__(self) -> None:
        self.length = 0  # written down with the rest when a prompt is saved

    @final
    def admit(self, batch: int, at: Span, **sizes: tuple[int, ...]) -> None:
        """Note that the tokens at `at` come next. sizes: what a row of each tensor must look like.

        Errors: StateError for another batch, another layer's sizes, or packed documents.
        """
        for name, size in sizes.items():
            got = tuple(self.__dict__[name].shape)
            if got != (batch, *size):
                raise StateError(
                    f"{self.brick}: the state's {name} has shape {got}, expected {(batch, *size)}. "
                    f"Make the state with this model's init_state({batch}, ...)."
                )
        if at.doc is not None:
            raise StateError(
                f"{self.brick}: a state cannot keep packed documents apart. Decode each document in a row of its own."
            )
        self.length = at.end

    @final
    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep these rows."""
        self.__dict__.update({name: x[rows] for name, x in self.__dict__.items() if isinstance(x, Tensor)})

    @final
    def clone(self) -> Self:
        """An independent copy."""
        other = object.__new__(type(self))
        other.__dict__.update({name: x.clone() if isinstance(x, Tensor) else x for name, x in self.__dict__.items()})
        return other

    @final
    def rewind(self, to: int) -> None:
        """Errors: StateError, unless there is nothing to forget."""
        if to != self.length:
            raise StateError(
                f"{self.brick}: a recurrent state cannot rewind (from slot {self.length} to {to}): it is a summary of "
                "the tokens, not the tokens. clone() it before going ahead, and go on from the clone."
            )

    @property
    def nbytes(self) -> int:
        """Bytes held: as many after a million tokens as after one."""
        return sum(x.nbytes for x in self.__dict__.values() if isinstance(x, Tensor))


class LinearState(RecurrentState):
    """Slot: states of linear recurrences. tail: (B, W-1, channels) of the convolution. h: (B, ...) the memory."""

    @final
    def __init__(self, tail: Float[Tensor, "B W C"], h: Float[Tensor, "B *h"]) -> None:
        super().__init__()
        self.tail, self.h = tail, h


class LinearRecurrence(Mixer):
    """Slot: mixers with a short convolution and a memory that is linear in what is written.

    memory: the type of their state. tail_size, h_size: what a row of it looks like. numbers: how many numbers a token
    needs while its block is computed. kernel, kernel_types: what may take over, see kernels.py.
    """

    causal = True
    memory: ClassVar[type[LinearState]]
    kernel: ClassVar[Find]
    kernel_types: ClassVar[tuple[torch.dtype, ...]]
    tail_size: tuple[int, ...]
    h_size: tuple[int, ...]
    numbers: int

    @abstractmethod
    def block(self, x: Tensor, line: Line, tail: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(B, T, D) tokens on a line, after tail and h -> (B, T, D), tail and h after them.

        h is None where it is empty before and not wanted after, and the kernel may take over.
        """

    def forward(self, x: Float[Tensor, "B T D"], at: Span, state: State | None = None) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""
        line = Line.of(at)
        x = line.pack(x)
        if state is None:
            tail, h = x.new_zeros(len(x), *self.tail_size), x.new_zeros(len(x), *self.h_size, dtype=wide(x))
            if line.since is None and serves(type(self).kernel, x, self.kernel_types):
                return line.unpack(self.block(x, line, tail, None)[0])
            return line.unpack(self._through(x, line, tail, h)[0])
        kept = expect_state(state, self.memory, self.memory.brick)
        kept.admit(len(x), at, tail=self.tail_size, h=self.h_size)
        y, kept.tail, kept.h = self._through(x, line, kept.tail.to(x.dtype), kept.h.to(wide(x)))
        return line.unpack(y)

    def _through(self, x: Tensor, line: Line, tail: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Block by block."""
        out = []
        for piece, run in line.blocks(x, block_length(len(x), self.numbers, x.device)):
            y, tail, after = self.block(piece, run, tail, h)
            assert after is not None
            h = after
            out.append(y)
        return out[0] if len(out) == 1 else torch.cat(out, 1), tail, h

    @final
    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """An empty state; its size does not depend on max_len."""
        tail = torch.zeros(batch, *self.tail_size, device=device, dtype=dtype)
        return self.memory(tail, torch.zeros(batch, *self.h_size, device=device, dtype=wide(tail)))


def block_length(batch: int, numbers: int, device: torch.device) -> int:
    """Tokens of a block, when a token of every row needs so many numbers: a multiple of 64.

    On a CPU what a block needs should stay in the cache; elsewhere a block should keep the whole device busy.
    """
    budget = 2**22 if device.type == "cpu" else 2**26
    return max(1, budget // (64 * max(batch, 1) * numbers)) * 64


def wide(x: Tensor) -> torch.dtype:
    """The type of decays and memories: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def step_biases(count: int) -> Float[Tensor, " count"]:
    """Biases whose softplus is a random step size, drawn evenly in its logarithm from STEP_RANGE."""
    low, high = map(math.log, STEP_RANGE)
    step = (low + (high - low) * torch.rand(count)).exp()
    return step + torch.log(-torch.expm1(-step))


def short_conv(channels: int, width: int, *, bias: bool) -> nn.Conv1d:
    """The weights of a causal convolution of each channel alone, over W tokens; `convolve` applies them."""
    return nn.Conv1d(channels, channels, width, groups=channels, bias=bias)


def convolve(
    x: Float[Tensor, "B T I"], conv: nn.Conv1d, line: Line, tail: Float[Tensor, "B W I"]
) -> tuple[Float[Tensor, "B T I"], Float[Tensor, "B W I"]]:
    """silu(bias + Σ_j weight_j x_{t-j}), j = 0 ... W-1, inside a document; and the tail of W-1 real tokens after these.

    tail: the real tokens before these, zeros where there are none.
    """
    tokens, before = x.shape[1], tail.shape[1]
    seen = torch.cat([tail, x], 1)  # (B, W-1+T, I)
    weight = conv.weight[:, 0].t()  # (W, I), the oldest token first
    out = x * weight[before] if conv.bias is None else torch.addcmul(conv.bias, x, weight[before])
    for back in range(1, before + 1):
        tap = seen[:, before - back : before - back + tokens]
        if line.since is not None:
            tap = tap.masked_fill((line.since < back)[..., None], 0.0)
        out = torch.addcmul(out, tap, weight[before - back])
    if line.live is None:
        return F.silu(out), seen[:, tokens:].clone()  # a view would hold on to the whole block
    last = line.live.sum(1, keepdim=True) + torch.arange(before, device=x.device)  # (B, W-1)
    return F.silu(out), seen.gather(1, last[..., None].expand(len(x), -1, x.shape[2]))
