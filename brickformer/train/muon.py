"""Muon: momentum whose matrices are made nearly orthogonal before they are applied.

    B ← μB + (1-μ)G            momentum; Nesterov: G ← (1-μ)G + μB, else G ← B
    W ← (1-ηλ)W - η s O        O ≈ U Vᵀ for G = U Σ Vᵀ

    s = √max(1, rows/cols)     "shape": Jordan et al., Muon (2024)
    s = 0.2 √max(rows, cols)   "rms":   updates as large as AdamW's, so that its η fits; arXiv 2502.16982, eq. 4

O comes from a Newton–Schulz iteration X ← aX + b(XXᵀ)X + c(XXᵀ)²X on X = G/‖G‖, which leaves U and V alone and moves
every singular value towards 1. The coefficients differ from step to step and are the ones that bring the widest range
of singular values into 1 ± 0.3 (the greedy minimax quintics of arXiv 2505.16932): after 4 steps all above 0.0023 ‖G‖,
where five steps of one fixed quintic (3.4445, -4.7750, 2.0315) reach 0.0016 ‖G‖.

Matrices of one shape, up to transposition, are orthogonalised together in one batched product; the parts of a
FusedLinear one by one. In float32 on a CPU (bfloat16 crawls there), in bfloat16 on CUDA.
Shapes: N matrices of R rows and C columns, R ≤ C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, assert_never, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

Scale = Literal["shape", "rms"]
Quintic = tuple[float, float, float]

_SHARED: Final[tuple[Quintic, ...]] = (  # the last steps, which are the same however many there are
    (4.20616, -3.06128, 0.55735),
    (4.17767, -3.04194, 0.55518),
    (4.06159, -2.96276, 0.54633),
    (3.64762, -2.67515, 0.51421),
    (2.70590, -1.97562, 0.43682),
)
_FIRST: Final[dict[int, Quintic]] = {  # by the number of steps
    2: (7.02616, -19.11941, 13.63609),
    3: (8.05012, -23.06834, 16.71055),
    4: (8.33753, -24.18021, 17.57738),
    5: (8.40809, -24.45339, 17.79042),
    6: (8.42485, -24.51825, 17.84101),
}
ITERATIONS: Final = tuple(_FIRST)
"""Numbers of Newton–Schulz steps there are coefficients for."""


def quintics(iterations: int) -> tuple[Quintic, ...]:
    """(a, b, c) of each step, with a margin of 1 % against rounding: singular values up to 1.01 stay in bounds."""
    return (_FIRST[iterations], *_SHARED[len(_SHARED) - iterations + 1 :])


def newton_schulz(g: Float[Tensor, "N R C"], iterations: int) -> Float[Tensor, "N R C"]:
    """Each matrix with its singular values σ moved to 0.68 ... 1.30 (those too near 0: up towards it, in order).

    Needs R ≤ C. σ counts as near 0 below 0.0096, 0.0023, 0.0006 times the Frobenius norm for 3, 4, 5 iterations.
    """
    assert g.shape[-2] <= g.shape[-1], "the shorter side comes first"
    x: Tensor = g / (torch.linalg.vector_norm(g, dim=(-2, -1), keepdim=True) + 1e-20)
    if 2 * g.shape[-1] >= 3 * g.shape[-2] and g.dtype in (torch.float32, torch.float64):
        return _by_gram(x, quintics(iterations))
    for a, b, c in quintics(iterations):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _by_gram(x: Tensor, steps: Sequence[Quintic]) -> Tensor:
    """The same iteration on XXᵀ alone, (N, R, R): X_k = P_k X_0. Less work from C = 1.5 R on.

    XXᵀ squares the condition number: in float32 singular vectors mix by about 1 % where σ is below 0.0005 ‖G‖, which an
    optimizer does not feel; bfloat16 would not do.
    """
    gram = torch.bmm(x, x.mT)
    product: Tensor | None = None
    for i, (a, b, c) in enumerate(steps):
        q = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        q.diagonal(dim1=-2, dim2=-1).add_(a)
        product = q if product is None else torch.bmm(q, product)
        if i + 1 < len(steps):
            gram = torch.bmm(torch.bmm(q, gram), q)
    assert product is not None
    return torch.bmm(product, x)


def update_scale(rows: int, cols: int, scale: Scale) -> float:
    """s: how large the update of a (rows, cols) matrix is, in units of the learning rate."""
    match scale:
        case "shape":
            return float(max(1.0, rows / cols) ** 0.5)
        case "rms":
            return float(0.2 * max(rows, cols) ** 0.5)
        case other:
            assert_never(other)


@final
class MuonOptimizer(torch.optim.Optimizer):
    """Muon on matrices. `parts`: for each parameter, the rows of the projections stacked in it, one by one.

    The momentum is `state[p]["momentum"]`. Parameters without a gradient are left alone.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        parts: Sequence[tuple[int, ...]],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        iterations: int,
        scale: Scale,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        assert all(p.ndim == 2 and p.shape[0] == sum(rows) for p, rows in zip(matrices, parts, strict=True))
        self.parts = dict(zip(matrices, parts, strict=True))
        self.momentum, self.nesterov, self.iterations, self.scale = momentum, nesterov, iterations, scale

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update. `closure` is part of torch's signature and must be None."""
        assert closure is None, "MuonOptimizer takes no closure"
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
                self._apply(params, self._direction(params), group["lr"])

    def _direction(self, params: Sequence[nn.Parameter]) -> list[Tensor]:
        """Momentum of each parameter after this step, with Nesterov's look ahead."""
        grads = [p.grad for p in params if p.grad is not None]
        buffers = []
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            buffers.append(self.state[p]["momentum"])
        torch._foreach_lerp_(buffers, grads, 1.0 - self.momentum)
        return list(torch._foreach_lerp(grads, buffers, self.momentum)) if self.nesterov else buffers

    def _apply(self, params: Sequence[nn.Parameter], directions: Sequence[Tensor], lr: float) -> None:
        """Orthogonalise, one batch for each shape, and add to the weights."""
        batches: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for p, direction in zip(params, directions, strict=True):
            parts = self.parts[p]
            for weight, g in zip(p.split(parts), direction.split(parts), strict=True):
                short, long = sorted(g.shape)
                batches.setdefault((short, long), []).append((weight, g))
        for pairs in batches.values():
            stacked = torch.stack([_wide(g) for _, g in pairs])
            work = torch.bfloat16 if stacked.is_cuda else torch.promote_types(stacked.dtype, torch.float32)
            for (weight, _), o in zip(pairs, newton_schulz(stacked.to(work), self.iterations), strict=True):
                rows, cols = weight.shape
                turned = o if rows <= cols else o.mT
                weight.add_(turned.to(weight.dtype), alpha=-lr * update_scale(rows, cols, self.scale))


def _wide(g: Tensor) -> Tensor:
    """g, or its transpose, whichever has the shorter side first."""
    return g if g.shape[0] <= g.shape[1] else g.mT
