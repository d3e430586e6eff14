"""Muon against SVD, against the coefficients computed anew, and against its update written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brickformer.linear import FusedLinear
from brickformer.train.muon import ITERATIONS, MuonOptimizer, Scale, newton_schulz, quintics, update_scale

SHAPES = [(1, 1), (1, 9), (16, 16), (16, 20), (16, 40), (30, 31)]
SMALL = {2: 0.04, 3: 0.0096, 4: 0.0023, 5: 0.0006, 6: 0.00015}  # singular values below this share of ‖G‖ may stay small


def matrix(rows: int, cols: int, smallest: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """(G, U, V) with G = U Σ Vᵀ, Frobenius norm 1, and singular values from large down to `smallest`."""
    u = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(cols, rows, dtype=torch.float64)).Q if cols >= rows else None
    assert v is not None
    sigma = torch.logspace(0, np.log10(smallest), rows, dtype=torch.float64)
    sigma = (sigma / sigma.norm()).clamp(min=smallest)
    return ((u * sigma) @ v.T).to(dtype), u, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("iterations", ITERATIONS)
def test_singular_vectors_stay_and_singular_values_go_to_one(
    iterations: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    g, u, v = matrix(*shape, smallest=SMALL[iterations], dtype=dtype)
    o = newton_schulz(g[None], iterations)[0]
    assert o.dtype == dtype
    inner = u.T @ o.double() @ v  # the polar factor U Vᵀ would give the identity
    rest = inner - torch.diag(inner.diagonal())
    # XXᵀ squares the condition: where it carries the iteration (2·C ≥ 3·R), float32 blurs the smallest singular vectors
    blur = max(2e-4, 2e-9 / SMALL[iterations] ** 2 if 2 * shape[1] >= 3 * shape[0] else 0.0)
    assert rest.abs().max() < (blur if dtype == torch.float32 else 1e-10)
    assert inner.diagonal().min() > 0.68
    assert inner.diagonal().max() < 1.301
    outside = o.double() - u @ (u.T @ o.double() @ v) @ v.T
    assert outside.abs().max() < (2e-4 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_size_of_the_gradient_does_not_matter(scale: float) -> None:
    g = torch.randn(2, 8, 12)
    torch.testing.assert_close(newton_schulz(g * scale, 4), newton_schulz(g, 4), rtol=1e-4, atol=1e-4)


def test_deficient_and_empty_matrices_give_finite_results() -> None:
    one = torch.outer(torch.randn(8), torch.randn(8))
    assert newton_schulz(torch.zeros(1, 8, 8), 4).eq(0).all()
    values = torch.linalg.svdvals(newton_schulz(one[None], 5)[0])
    assert 0.68 < values[0] < 1.301
    assert values[1] < 1e-2


def test_bfloat16_stays_in_bounds() -> None:
    for rank in (1, 4, 32):
        g = (torch.randn(3, 32, rank) @ torch.randn(3, rank, 64)).bfloat16()
        values = torch.linalg.svdvals(newton_schulz(g, 5).float())[:, :rank]
        assert values.max() < 1.4


def test_a_batch_is_its_matrices_one_by_one() -> None:
    g = torch.randn(5, 8, 20, dtype=torch.float64)
    single = torch.stack([newton_schulz(x[None], 4)[0] for x in g])
    torch.testing.assert_close(newton_schulz(g, 4), single)


def minimax(low: float, high: float) -> tuple[np.ndarray, float]:
    """(a, b, c) and error of the odd quintic nearest to 1 on [low, high], by Remez exchange on a fine grid."""
    grid = np.linspace(low, high, 20001)
    points = np.linspace(low, high, 4)
    for _ in range(60):
        system = np.stack([points, points**3, points**5, (-1.0) ** np.arange(4)], axis=1)
        *abc, error = np.linalg.solve(system, np.ones(4))
        off = abc[0] * grid + abc[1] * grid**3 + abc[2] * grid**5 - 1
        turns = np.flatnonzero(np.diff(np.sign(np.diff(off)))) + 1
        new = np.array([low, *grid[turns], high])
        if len(new) != 4 or np.allclose(new, points, atol=1e-12):
            break
        points = new
    return np.array(abc), abs(error)


@pytest.mark.parametrize("iterations", ITERATIONS)
def test_coefficients_are_the_minimax_ones(iterations: int) -> None:
    """Search the lower bound whose greedy minimax chain ends at 1 ± 0.3; with the margin, its coefficients are used."""

    def chain(low: float) -> tuple[list[np.ndarray], float]:
        steps, high, error = [], 1.0, 1.0
        for _ in range(iterations):
            abc, error = minimax(low, high)
            steps.append(abc)
            low, high = 1 - error, 1 + error
        return steps, error

    below, above = 1e-5, 0.2
    for _ in range(50):
        middle = (below * above) ** 0.5
        below, above = (middle, above) if chain(middle)[1] > 0.3 else (below, middle)
    margin = 1.01 ** -np.array([1.0, 3.0, 5.0])
    expected = np.stack(chain(above)[0]) * margin
    np.testing.assert_allclose(np.array(quintics(iterations)), expected, rtol=2e-3)


def test_scales() -> None:
    """Jordan et al.: √max(1, rows/cols). arXiv 2502.16982, eq. 4: 0.2 √max(rows, cols)."""
    assert [update_scale(r, c, "shape") for r, c in ((4, 4), (16, 4), (4, 16))] == [1.0, 2.0, 1.0]
    assert [update_scale(r, c, "rms") for r, c in ((100, 4), (4, 100))] == pytest.approx([2.0, 2.0])


def polynomial(g: np.ndarray, iterations: int) -> np.ndarray:
    """What Newton–Schulz computes, by SVD: each singular value through the quintics, singular vectors kept."""
    u, s, vt = np.linalg.svd(g, full_matrices=False)
    s = s / np.linalg.norm(g)
    for a, b, c in quintics(iterations):
        s = a * s + b * s**3 + c * s**5
    return np.asarray((u * s) @ vt)


@pytest.mark.parametrize("scale", ["shape", "rms"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (5, 12)])
def test_four_steps_equal_the_formula_written_out(shape: tuple[int, int], nesterov: bool, scale: Scale) -> None:
    lr, mu, decay, iterations = 0.05, 0.9, 0.1, 4
    p = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    w, momentum = p.detach().numpy().copy(), np.zeros(shape)
    optimizer = MuonOptimizer(
        [p],
        [(shape[0],)],
        lr=lr,
        momentum=mu,
        nesterov=nesterov,
        weight_decay=decay,
        iterations=iterations,
        scale=scale,
    )
    size = max(1, shape[0] / shape[1]) ** 0.5 if scale == "shape" else 0.2 * max(shape) ** 0.5
    for _ in range(4):
        p.grad = torch.randn(shape, dtype=torch.float64)
        g = p.grad.numpy().copy()
        optimizer.step()
        momentum = mu * momentum + (1 - mu) * g
        ahead = (1 - mu) * g + mu * momentum if nesterov else momentum
        w = (1 - lr * decay) * w - lr * size * polynomial(ahead, iterations)
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-8, atol=1e-10)


def build(params: list[nn.Parameter], parts: list[tuple[int, ...]]) -> MuonOptimizer:
    return MuonOptimizer(
        params, parts, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, iterations=4, scale="shape"
    )


def test_parts_of_a_fused_linear_are_moved_like_linears_of_their_own() -> None:
    fused = FusedLinear(6, (6, 3, 9), bias=False).double()
    apart = [nn.Parameter(fused.part(i).detach().clone()) for i in range(3)]
    one, many = build([fused.weight], [fused.parts]), build(apart, [(6,), (3,), (9,)])
    for _ in range(3):
        grad = torch.randn(18, 6, dtype=torch.float64)
        fused.weight.grad = grad.clone()
        for p, g in zip(apart, grad.split((6, 3, 9)), strict=True):
            p.grad = g.clone()
        one.step()
        many.step()
    torch.testing.assert_close(fused.weight.detach(), torch.cat([p.detach() for p in apart]))


def test_fused_parts_differ_from_one_large_matrix() -> None:
    """The test above could not fail if parts made no difference."""
    start, grad = torch.randn(8, 6), torch.randn(8, 6)
    moved = []
    for parts in ((4, 4), (8,)):
        p = nn.Parameter(start.clone())
        p.grad = grad.clone()
        build([p], [parts]).step()
        moved.append(p.detach())
    assert (moved[0] - moved[1]).abs().max() > 1e-3


def test_a_matrix_and_its_transpose_move_alike_and_together() -> None:
    """Square scale aside, Muon does not know rows from columns; shapes (4, 9) and (9, 4) share one batch."""
    w, g = torch.randn(4, 9, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64)
    wide, tall = nn.Parameter(w.clone()), nn.Parameter(w.T.clone())
    wide.grad, tall.grad = g.clone(), g.T.clone()
    MuonOptimizer(
        [wide, tall],
        [(4,), (9,)],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=0.0,
        iterations=4,
        scale="rms",
    ).step()
    torch.testing.assert_close(wide.detach(), tall.detach().T)
    assert (wide.detach() - w).abs().max() > 1e-3


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    a, b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    before = b.detach().clone()
    a.grad = torch.randn(4, 4)
    optimizer = build([a, b], [(4,), (4,)])
    optimizer.step()
    assert torch.equal(b.detach(), before)
    assert b not in optimizer.state
