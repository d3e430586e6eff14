"""Cross-attention: queries from the decoder, keys and values from the encoder's memory (arXiv 1706.03762, 3.2.3).

Its input comes from two worlds, so the memory is an argument it cannot run without. Keys and values of the memory are
projected once and kept in a `CrossKV`.
Shapes: B batch, T target tokens, S source tokens, D model width, H heads, G key heads, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxtyping import Float, Int
from torch import Tensor, nn

from brickformer.attend import Attend, Backend
from brickformer.errors import StateError
from brickformer.linear import BranchOut, FusedLinear, Linear
from brickformer.mask import FULL, Span
from brickformer.mixers.attention import check_heads, head_width, merge_heads, split_heads
from brickformer.norms import NormSpec
from brickformer.ranges import check_dropout, check_size
from brickformer.spec import Spec, spec
from brickformer.state import CrossKV


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What the encoder says: value (B, S, D), and where its tokens are (padding has no position)."""

    value: Float[Tensor, "B S D"]
    at: Span

    def select(self, rows: Int[Tensor, " R"]) -> Memory:
        """The memory of some rows of the batch, in their order."""
        return Memory(self.value[rows], self.at.select(rows))


@spec("cross")
class Cross(Spec):
    """Cross-attention. Fields as in `Attention`; it has no mask of its own: every real source token may be seen."""

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    qk_norm: NormSpec | None = None
    dropout: float = 0.0
    bias: bool = False
    scale: float | None = None
    backend: Backend = "auto"

    def check(self) -> None:
        """Heads divide into key heads."""
        check_heads(self, self.heads, self.kv_heads)
        check_dropout(self, self.dropout)
        check_size(self, "scale", self.scale)

    def build(self, dim: int) -> CrossAttention:
        """The module. Errors: SpecError when the widths do not fit."""
        width = head_width(self, dim, self.heads, self.head_dim)
        groups = self.kv_heads or self.heads
        return CrossAttention(
            Linear(dim, self.heads * width, bias=self.bias),
            FusedLinear(dim, (groups * width, groups * width), bias=self.bias),
            BranchOut(self.heads * width, dim, bias=self.bias),
            heads=self.heads,
            attend=Attend(FULL, scale=self.scale, dropout=self.dropout, backend=self.backend),
            q_norm=self.qk_norm.build(width) if self.qk_norm else nn.Identity(),
            k_norm=self.qk_norm.build(width) if self.qk_norm else nn.Identity(),
        )


@final
class CrossAttention(nn.Module):
    """The decoder asks, the memory answers."""

    def __init__(
        self,
        q: nn.Linear,
        kv: FusedLinear,
        out: BranchOut,
        *,
        heads: int,
        attend: Attend,
        q_norm: nn.Module,
        k_norm: nn.Module,
    ) -> None:
        super().__init__()
        self.q, self.kv, self.out, self.attend = q, kv, out, attend
        self.q_norm, self.k_norm = q_norm, k_norm
        self.width = q.out_features // heads

    def forward(
        self, x: Float[Tensor, "B T D"], at: Span, memory: Memory | None, state: CrossKV | None = None
    ) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D). With a filled state the memory is not needed. Errors: StateError without either."""
        q = self.q_norm(split_heads(self.q(x), self.width))  # (B, H, T, K)
        kept = None if state is None else state.get(len(x))
        k, v, k_at = kept or self._project(memory, state)
        return self.out(merge_heads(self.attend(q, k, v, at, k_at)))

    def _project(self, memory: Memory | None, state: CrossKV | None) -> tuple[Tensor, Tensor, Span]:
        if memory is None:
            raise StateError(
                "cross-attention: got no memory, and the state holds none. Pass memory=model.encode(src): without it "
                "the decoder would talk to itself."
            )
        k, v = (split_heads(y, self.width) for y in self.kv(memory.value).split(self.kv.parts, dim=-1))
        k = self.k_norm(k)
        if state is not None:
            state.put(k, v, memory.at)
        return k, v, memory.at
