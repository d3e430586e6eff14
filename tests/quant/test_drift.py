"""Drift: the correction against plain least squares, what is compared with what, and what it is worth."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from brickformer import llama
from brickformer.linear import FusedLinear
from brickformer.quant import Calibration, Int4, QuantLinear, quantize
from brickformer.quant.away import AwayLinear, put_away
from brickformer.quant.drift import followed, twin
from brickformer.quant.hessian import DAMP, gather
from brickformer.surgery import places, replace


@pytest.mark.parametrize("rows", [200, 9])
def test_it_is_least_squares(rows: int) -> None:
    """‖W̃ x̂ - W x‖² and λ ‖W̃ - W‖² as rows of one system, solved in float64."""
    w, x = torch.randn(5, 12), torch.randn(rows, 12)
    off = x + 0.3 * torch.randn(rows, 12)
    h, d = off.t() @ off / rows, (x - off).t() @ off / rows
    damp = (DAMP * h.diagonal().mean()).double().sqrt()
    a = torch.cat([off.double() / rows**0.5, damp * torch.eye(12, dtype=torch.float64)])
    b = torch.cat([(x @ w.t()).double() / rows**0.5, damp * w.double().t()])
    expected = torch.linalg.lstsq(a, b).solution.t()
    torch.testing.assert_close(followed(w, h, d), expected.float(), rtol=1e-3, atol=1e-4)


def test_nothing_to_follow() -> None:
    w, h = torch.randn(3, 4), torch.eye(4)
    assert followed(w, h, torch.zeros(4, 4)).equal(w)
    assert followed(w, torch.zeros(4, 4), h).equal(w)
    assert followed(w, torch.full((4, 4), -1.0) + 2.0 * h, h).isfinite().all(), "no root"


def test_inputs_of_two_models_are_compared_token_by_token() -> None:
    one, two = nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 3))
    x = torch.randn(5, 2, 4)
    away = x + 0.1 * torch.randn(5, 2, 4)
    fed = gather(one, ["0"], [lambda m: m(x if m is one else away)] * 2, two)["0"]
    a, b = x.reshape(-1, 4), away.reshape(-1, 4)
    torch.testing.assert_close(fed.h, a.t() @ a / 10)
    assert fed.d is not None
    torch.testing.assert_close(fed.d, (b - a).t() @ a / 10)
    for stranger in (torch.randn(5, 2, 4), x[:4]):  # other tokens; fewer tokens
        fed = gather(one, ["0"], [lambda m, s=stranger: m(x if m is one else s)], two)["0"]
        assert fed.d is not None and not fed.d.any() and fed.h.any()


def test_readings_end_when_all_is_known() -> None:
    """All inputs of maps that are met twice and once are gathered, of every reading, and what comes after is left."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    after: list[int] = []

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = a, b

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(self.b(self.a(x)))
            after.append(1)
            return y

    xs = [torch.randn(3, 4) for _ in range(4)]
    fed = gather(Two(), ["a", "b"], [lambda m, x=x: m(x) for x in xs])
    x = torch.cat(xs)
    once = b(a(x))
    twice = torch.cat([x, once])
    torch.testing.assert_close(fed["a"].h, (twice.t() @ twice / 24).detach())
    torch.testing.assert_close(fed["b"].h, (a(x).t() @ a(x) / 12).detach())
    assert len(after) == 1, "the first reading counts, the others stop"


def test_a_twin_keeps_the_full_model() -> None:
    model = llama(vocab=40, dim=32, depth=2, heads=4, hidden=48, tied=True).build().eval()
    ids = torch.randint(0, 40, (2, 9))
    with torch.no_grad(), put_away(model, [place.name for place in places(model, nn.Linear)]):
        before, full = model(ids), twin(model)
        shared = {p.data_ptr() for p in model.parameters()}
        assert {p.data_ptr() for p in full.parameters()} == shared
        for place in list(places(model, AwayLinear, nn.Linear)):
            old: Any = place.module
            parts = old.parts if isinstance(old, (AwayLinear, FusedLinear)) else (old.out_features,)
            replace(model, place.name, QuantLinear(Int4(), parts, old.in_features, bias=None))  # empty
        assert full(ids).equal(before)


class Deep(nn.Module):
    """Errors add up from layer to layer."""

    def __init__(self, depth: int = 6, dim: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_model_as_a_whole_answers_better(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On data that was not read."""
    mix = torch.randn(32, 32)
    seen, held = (torch.randn(600, 32) @ mix / 6 for _ in range(2))
    state = Deep().state_dict()

    def error() -> float:
        model, full = Deep(), Deep()
        model.load_state_dict(state)
        full.load_state_dict(state)
        readings = [lambda m, x=x: m(x) for x in seen.split(200)]
        quantize(model, Int4(), Calibration(readings, method))  # type: ignore[arg-type]
        return float((model(held) - full(held)).norm())

    with torch.no_grad():
        ours = error()
        monkeypatch.setattr(sys.modules["brickformer.quant.quantize"], "followed", lambda w, h, d: w)
        assert ours < 0.95 * error()


def test_the_full_model_is_let_go() -> None:
    model, x = Deep(2), torch.randn(20, 32)
    old = weakref.ref(model.layers[0].weight)
    quantize(model, Int4(), Calibration([lambda m: m(x)]))
    gc.collect()
    assert old() is None
