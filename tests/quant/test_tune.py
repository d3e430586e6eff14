"""Tuning: predictions on data that was not learned from, slopes against their formula, and nothing left behind."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brickformer import llama, vaswani
from brickformer.errors import BrickError
from brickformer.quant import NF4, Calibration, Int4, Int8, QuantLinear, Scheme, encode, quantize
from brickformer.quant import tune as module
from brickformer.quant.tune import _Latent, tune
from brickformer.surgery import places

SCHEMES = [Int4(), Int4(symmetric=False), Int4(group=16), NF4(), Int8()]


CHAIN = (4.0 * torch.randn(40, 40, generator=torch.Generator().manual_seed(5))).softmax(-1)


def text(seed: int, rows: int = 16, length: int = 32) -> Tensor:
    """A Markov chain: each token says what comes next."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (rows, 1), generator=draw)
    while ids.shape[1] < length:
        ids = torch.cat([ids, CHAIN[ids[:, -1]].multinomial(1, generator=draw)], 1)
    return ids


@cache
def _trained() -> nn.Module:
    """A decoder that has learned the chain: what it predicts is worth keeping."""
    torch.manual_seed(0)
    model = llama(vocab=40, dim=32, depth=2, heads=4, hidden=48).build()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(300):
        ids = text(step)
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def trained() -> nn.Module:
    return copy.deepcopy(_trained())


def new() -> Tensor:
    """What nobody has read."""
    return torch.cat([text(2000 + i) for i in range(8)])


def apart(full: nn.Module, coded: nn.Module, *ids: Tensor) -> float:
    """Σ p ln (p / q), written out."""
    with torch.no_grad():
        p, q = (m(*ids).double().softmax(-1) for m in (full, coded))
    return float((p * (p.log() - q.log())).sum(-1).mean())


def readings(count: int) -> list[Callable[[nn.Module], Tensor]]:
    return [lambda m, ids=ids: m(ids) for ids in [text(1000 + i) for i in range(count)]]


def calibration(count: int = 8, steps: int = 40, **more: object) -> Calibration:
    return Calibration(readings(count), tune=steps, **more)


@pytest.mark.parametrize(
    ("scheme", "most"), [(Int4(), 0.75), (Int4(symmetric=False), 0.75), (NF4(), 0.75), (Int8(), 0.85)], ids=repr
)
def test_predictions_are_nearer_on_data_that_was_not_learned_from(scheme: Scheme, most: float) -> None:
    full, found = trained(), []
    for steps in (0, 60):
        coded = copy.deepcopy(full)
        quantize(coded, scheme, calibration(steps=steps))
        found.append(apart(full, coded, new()))
    assert found[1] < most * found[0]


@pytest.mark.parametrize(("method", "head"), [("awq", "same"), ("gptq", "int8"), ("gptq", "keep")])
def test_with_every_method_and_head(method: str, head: str) -> None:
    full = trained()
    coded = copy.deepcopy(full)
    quantize(coded, Int4(), calibration(steps=0, method=method), head=head)
    before = apart(full, coded, new())
    coded = copy.deepcopy(full)
    report = quantize(coded, Int4(), calibration(method=method), head=head)
    assert apart(full, coded, new()) < before
    assert all(math.isfinite(m.error) and (m.error > 0) == (m.kind != "kept") for m in report)


class _Experts(nn.Module):
    """Each batch goes to one of them, by its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.experts[int(ids[0, 0])](F.one_hot(ids, 40).float())


def test_an_expert_that_no_data_reaches_stays_as_it_was() -> None:
    """The first is met by all data, the second from the second batch on, the third never. Error: of its outputs where
    the first batch comes there, else of its weights."""
    full, rows = _Experts(), [text(i) for i in range(4)]
    for i, ids in enumerate(rows):
        ids[0, 0] = min(i, 1)
    readings = [lambda m, ids=ids: m(ids) for ids in rows]
    plain, coded = copy.deepcopy(full), copy.deepcopy(full)
    first = {m.name[-1]: m for m in quantize(plain, Int4(), Calibration(readings))}
    report = {m.name[-1]: m for m in quantize(coded, Int4(), Calibration([*readings, readings[0]], tune=40))}
    assert [report[i].tuned for i in "012"] == [True, True, False] and report["2"] == first["2"]
    assert not any(m.tuned for m in first.values())
    for i in "12":
        w, again = full.experts[int(i)].weight.detach(), coded.experts[int(i)].weight
        assert report[i].error == pytest.approx(float((again - w).norm() / w.norm()), rel=1e-3)
    assert report["1"].error != first["1"].error
    x = F.one_hot(torch.cat([rows[0], rows[0]]), 40).float()
    w = full.experts[0].weight.detach()
    off = coded.experts[0].weight - w
    assert report["0"].error == pytest.approx(float((x @ off.T).norm() / (x @ w.T).norm()), rel=1e-3)


def test_an_encoder_decoder() -> None:
    full = vaswani(vocab=40, dim=32, depth=1, heads=4, hidden=48).build().eval()
    coded = copy.deepcopy(full)
    readings = [lambda m, ids=ids: m(ids, ids) for ids in map(text, range(4))]
    quantize(coded, Int4())
    names = [p.name for p in places(coded, QuantLinear)]
    before = apart(full, coded, text(9), text(9))
    assert tune(coded, full, names, readings, steps=30)
    assert apart(full, coded, text(9), text(9)) < before


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@pytest.mark.parametrize("inputs", [64, 50, 7])
def test_what_does_not_move_stays_as_it_was(scheme: Scheme, inputs: int) -> None:
    """Whatever codes were chosen: u stands for them, and what comes back is the same to the bit."""
    full = nn.Linear(inputs, 6)
    with torch.no_grad():
        full.weight[2] = 0.0
    moved = full.weight.detach() + 0.1 * torch.randn(6, inputs)  # other codes than the nearest
    coded = encode(moved, scheme)
    made = QuantLinear(scheme, (6,), inputs, bias=full.bias, coded=coded)
    latent = _Latent(made, full)
    back = latent.coded()
    assert torch.equal(back.codes, coded.codes) and torch.equal(back.scales, coded.scales)
    assert (back.zeros is None) == (coded.zeros is None) and back.inputs == inputs
    if back.zeros is not None and coded.zeros is not None:
        assert torch.equal(back.zeros, coded.zeros)
    torch.testing.assert_close(latent.weight(), coded.weight(), rtol=1e-6, atol=1e-7)
    x = torch.randn(3, inputs)
    torch.testing.assert_close(latent.forward(x), F.linear(x, coded.weight(), full.bias))


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_u_begins_beside_the_full_weight_inside_its_code(scheme: Scheme) -> None:
    full = nn.Linear(64, 8, bias=False)
    coded = encode(full.weight, scheme)
    made = QuantLinear(scheme, (8,), 64, coded=coded)
    latent = _Latent(made, full)
    start = (latent.units * latent.scale).detach().flatten(1)
    error, before = (start - full.weight).abs(), (coded.weight() - full.weight).abs()
    assert (error <= before + 1e-6).all() and error.mean() < 0.3 * before.mean()


def test_inputs_that_are_divided() -> None:
    """Weights have grown by d and inputs are divided by it: u is of the grown ones, and answers are W x."""
    full, d = nn.Linear(64, 8), torch.rand(64) + 0.5
    made = QuantLinear(Int8(), (8,), 64, bias=full.bias, divide=d, coded=encode(full.weight * d, Int8()))
    latent, x = _Latent(made, full), torch.randn(5, 64)
    torch.testing.assert_close((latent.units * latent.scale).flatten(1), full.weight * d, rtol=0.02, atol=1e-3)
    torch.testing.assert_close(latent.forward(x), full(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_slopes(scheme: Scheme) -> None:
    """∂ŵ/∂u = s, ∂ŵ/∂s = the number of the code: asked with a random slope of the weights."""
    full = nn.Linear(48, 5, bias=False)
    made = QuantLinear(scheme, (5,), 48, coded=encode(full.weight, scheme))
    latent, slope = _Latent(made, full), torch.randn(5, 48)
    units, scale = torch.autograd.grad(latent.weight(), [latent.units, latent.scale], slope)
    size = scheme.size or 48
    padded = F.pad(slope, (0, -48 % size)).view(5, -1, size)
    torch.testing.assert_close(units, padded * made.scales.float()[..., None])
    number = F.pad(made.coded.weight(), (0, -48 % size)).view(5, -1, size) / made.scales.float()[..., None]
    torch.testing.assert_close(scale, (padded * number).sum(-1, keepdim=True), rtol=1e-4, atol=1e-5)


def test_what_is_no_better_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRAVEL", 60.0)
    full = trained()
    coded = copy.deepcopy(full)
    readings = calibration().readings
    quantize(coded, Int4(), Calibration(readings))
    before = {n: t.clone() for n, t in coded.state_dict().items()}
    names = [p.name for p in places(coded, QuantLinear)]
    assert not tune(coded, full, names, readings, steps=3)
    assert all(torch.equal(before[n], t) for n, t in coded.state_dict().items())
    plain = quantize(trained(), Int4(), Calibration(readings))
    assert quantize(trained(), Int4(), Calibration(readings, tune=3)) == plain  # and nothing says that it is tuned


@pytest.mark.parametrize("last", ["raises", "is not finite"])
def test_a_judgement_that_fails_changes_nothing(last: str) -> None:
    """The last reading comes when codes and scales have been put in place."""
    full = trained()
    coded = copy.deepcopy(full)
    quantize(coded, Int4())
    before = {n: t.clone() for n, t in coded.state_dict().items()}
    names, calls = [p.name for p in places(coded, QuantLinear)], 0

    def reading(model: nn.Module) -> Tensor:
        nonlocal calls
        calls += model is coded
        if calls == 4:  # before, two steps, after
            assert not all(torch.equal(before[n], t) for n, t in coded.state_dict().items())
            if last == "raises":
                raise KeyboardInterrupt
            return model(text(1)) * math.inf
        return model(text(1))

    with pytest.raises((KeyboardInterrupt, BrickError)):
        tune(coded, full, names, [reading], steps=2)
    assert calls == 4 and all(torch.equal(before[n], t) for n, t in coded.state_dict().items())


def test_the_first_reading_is_a_judge_and_no_teacher() -> None:
    full = trained()
    coded = copy.deepcopy(full)
    quantize(coded, Int4())
    asked: list[tuple[int, bool]] = []

    def reading(number: int, ids: Tensor) -> object:
        def read(model: nn.Module) -> Tensor:
            if model is coded:
                asked.append((number, torch.is_grad_enabled()))
            return model(ids)

        return read

    readings = [reading(i, ids) for i, ids in enumerate(map(text, range(4)))]
    tune(coded, full, [p.name for p in places(coded, QuantLinear)], readings, steps=6)
    assert [i for i, learning in asked if not learning] == [0, 0]
    taught = [i for i, learning in asked if learning]
    assert sorted(taught) == [1, 1, 2, 2, 3, 3] and sorted(taught[:3]) == [1, 2, 3]


def test_one_reading_is_enough() -> None:
    coded = trained()
    quantize(coded, Int4(), calibration(count=1, steps=2))


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("inference", [False, True])
def test_nothing_is_left_behind(inference: bool, method: str) -> None:
    """Neither slopes, nor another forward, nor dropout off; under whatever mode it was called."""
    full = trained().train()
    full.embed.drop = nn.Dropout(0.2)
    coded = copy.deepcopy(full)
    data = calibration(count=3, steps=4, method=method)
    with torch.inference_mode(inference):
        quantize(coded, Int4(), data)
    assert all(m.training for m in coded.modules())
    assert all(p.grad is None and p.requires_grad for p in coded.parameters())
    assert not any("forward" in m.__dict__ for m in coded.modules())
    coded.eval()
    assert coded(text(1)).isfinite().all()


def test_an_error_while_learning_changes_nothing() -> None:
    full = trained().train()
    coded = copy.deepcopy(full)
    quantize(coded, Int4())
    before = {n: t.clone() for n, t in coded.state_dict().items()}
    calls = 0

    def breaks(model: nn.Module) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return model(text(1))

    with pytest.raises(KeyboardInterrupt):
        tune(coded, full, [p.name for p in places(coded, QuantLinear)], [breaks, breaks], steps=50)
    assert all(torch.equal(before[n], t) for n, t in coded.state_dict().items())
    assert not any("forward" in m.__dict__ for m in coded.modules()) and all(m.training for m in coded.modules())


def test_progress_counts_steps_too() -> None:
    told: list[tuple[int, int]] = []
    quantize(trained(), Int4(), calibration(count=3, steps=5), progress=lambda *at: told.append(at))
    done, whole = zip(*told, strict=True)
    assert list(done) == list(range(1, 15)) and set(whole) == {14}


def test_half_precision() -> None:
    full = trained().to(torch.bfloat16)
    coded = copy.deepcopy(full)
    quantize(coded, Int4(), calibration(count=3, steps=4))
    assert coded(text(1)).dtype is torch.bfloat16
