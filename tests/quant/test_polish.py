"""Polish: no code and no scale is left that, changed alone, would answer better. Every one is tried, in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from brickformer.quant import NF4, Calibration, Coded, Int4, Int8, Scheme, encode, quantize
from brickformer.quant.codes import pack, unpack
from brickformer.quant.gptq import gptq
from brickformer.quant.hessian import DAMP
from brickformer.quant.polish import polish

SCHEMES = [Int4(group=16), Int4(group=16, symmetric=False), NF4(group=16)]


def fed(inputs: int, rows: int = 400) -> tuple[Tensor, Tensor]:
    """Inputs that lean on each other, of unequal sizes, and their H."""
    x = torch.randn(rows, inputs // 4) @ torch.randn(inputs // 4, inputs) + 0.3 * torch.randn(rows, inputs)
    x = x * torch.rand(inputs).add(0.05)
    return x, x.t() @ x / rows


def cost(w: Tensor, coded: Coded, h: Tensor) -> Tensor:
    """tr (Ŵ - W) (H + λ) (Ŵ - W)ᵀ of each row, in float64."""
    h = h.double() + DAMP * h.double().diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    off = coded.weight().double() - w.double()
    return torch.einsum("oi,ij,oj->o", off, h, off)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@pytest.mark.parametrize("inputs", [32, 22])
def test_nothing_is_left_that_alone_would_answer_better(scheme: Scheme, inputs: int) -> None:
    w, (_, h) = torch.randn(6, inputs), fed(inputs)
    best = polish(w, gptq(w, scheme, h), h, sweeps=40)
    least = cost(w, best, h) * (1 + 1e-5)
    codes = unpack(best.codes)
    for j in range(inputs):
        for code in range(16):
            other = codes.clone()
            other[:, j] = code
            assert (cost(w, replace(best, codes=pack(other)), h) >= least.mul(1 - 2e-5)).all(), (j, code)
    for g in range(best.scales.shape[1]):
        for step in (-2, -1, 1, 2):  # the neighbours in bfloat16
            scales = best.scales.clone()
            scales[:, g] = (scales[:, g].view(torch.int16) + step).view(torch.bfloat16)
            assert (cost(w, replace(best, scales=scales), h) >= least.mul(1 - 2e-5)).all(), (g, step)


@pytest.mark.parametrize("scheme", [Int4(), Int4(symmetric=False), NF4()], ids=repr)
@pytest.mark.parametrize("start", [gptq, lambda w, scheme, h: encode(w, scheme)], ids=["gptq", "nearest"])
def test_no_sweep_does_harm_and_the_first_ones_help(scheme: Scheme, start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brickformer.quant.polish.ROWS", 5)
    w, (_, h) = torch.randn(12, 80), fed(80)
    coded = start(w, scheme, h)
    costs = [cost(w, polish(w, coded, h, sweeps=n), h) for n in range(4)]
    torch.testing.assert_close(costs[0], cost(w, coded, h))
    for before, after in pairwise(costs):
        assert (after <= before * (1 + 1e-4)).all()
    assert costs[-1].sum() < 0.9 * costs[0].sum()


def test_what_is_never_fed_and_what_is_zero() -> None:
    x, w = torch.randn(100, 32), torch.randn(8, 32)
    x[:, 5], w[3] = 0.0, 0.0
    for h in (x.t() @ x / 100, torch.zeros(32, 32)):
        again = polish(w, gptq(w, Int4(), h), h).weight()
        assert again.isfinite().all() and not again[3].any()
    eight = gptq(w, Int8(), x.t() @ x)
    assert polish(w, eight, x.t() @ x) is eight, "a row of 8 bits has one scale"


def test_quantize_takes_it() -> None:
    w, (x, h) = torch.randn(24, 64), fed(64)
    model = nn.Sequential(nn.Linear(64, 24, bias=False))
    model[0].weight.data = w.clone()
    quantize(model, Int4(), Calibration([lambda m: m(x)]))
    torch.testing.assert_close(model[0].weight, polish(w, gptq(w, Int4(), h), h).weight())
