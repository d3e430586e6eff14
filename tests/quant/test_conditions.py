"""Whatever mode a model and its caller are in: read the same, and left as it was; what is not learned from is told."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from quant.test_tune import readings, text, trained
from torch import Tensor, nn

from brickformer import GLU, Attention, Decoder, Layer
from brickformer.errors import BrickError
from brickformer.moe import MoE, Router
from brickformer.quant import Calibration, Int4, QuantLinear, quantize
from brickformer.quant.tune import tune
from brickformer.surgery import places


class _Foreign(nn.Module):
    """What a model of others may do in training: draw, and keep what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(40, 32), nn.BatchNorm1d(32), nn.Linear(32, 40)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.first(F.one_hot(ids.flatten(), 40).float()))
        return self.last(F.dropout(h, 0.3, self.training))


def _experts() -> nn.Module:
    router = Router(top_k=1, bias_rate=0.1)
    return Decoder(vocab=40, dim=32, layers=(Layer(Attention(heads=2), MoE(3, GLU(32), router)),)).build()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("build", [_Foreign, _experts])
def test_a_model_in_training_is_read_as_in_use(build: type[nn.Module], steps: int) -> None:
    one, other = build().eval(), None
    other = copy.deepcopy(one).train()
    modes = {name: not name.endswith(("last", "qkv")) for name, _ in other.named_modules()}
    for name, module in other.named_modules():
        module.training = modes[name]
    kept = {n: b.clone() for n, b in other.named_buffers()}
    draws = torch.get_rng_state()
    found = [quantize(m, Int4(), Calibration(readings(3), tune=steps)) for m in (one, other)]
    assert found[0] == found[1] and torch.equal(torch.get_rng_state(), draws)
    assert {n: m.training for n, m in other.named_modules()} == modes
    assert kept and all(torch.equal(b, dict(other.named_buffers())[n]) for n, b in kept.items())


def test_modes_come_back_after_an_error() -> None:
    model = trained().train()

    def broken(m: nn.Module) -> Tensor:
        m(text(1)[:, :2])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model, Int4(), Calibration([broken]))
    assert all(m.training for m in model.modules()) and not any(places(model, QuantLinear))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_autocast_is_for_readings_and_not_for_our_arithmetic(method: str) -> None:
    """The same as where each reading brings its own."""
    inside = [torch.autocast("cpu", torch.bfloat16)(r) for r in readings(2)]
    wanted, found = trained(), trained()
    want = quantize(wanted, Int4(), Calibration(inside, method=method, tune=2))
    types = []

    def reading(m: nn.Module) -> Tensor:
        types.append((y := m(text(1000))).dtype)
        return y

    with torch.autocast("cpu", torch.bfloat16):
        assert quantize(found, Int4(), Calibration(readings(2), method=method, tune=2)) == want
        quantize(trained(), Int4(), Calibration([reading]))
    assert set(types) == {torch.bfloat16}
    both = zip(wanted.state_dict().items(), found.state_dict().items(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in both)


def test_data_made_for_inference_alone() -> None:
    with torch.inference_mode():
        ids = text(1)
    with pytest.raises(BrickError, match="tune: a reading meets tensors made in torch.inference_mode"):
        quantize(trained(), Int4(), Calibration([lambda m: m(ids)], tune=2))


def test_what_cannot_be_learned_from_is_told_before_the_work() -> None:
    ids = text(1)
    returns = {"NoneType": None, "dict": {"logits": 1}}
    returns |= {
        r"a tensor \(\) of torch.float32": torch.tensor(1.5),
        r"a tensor \(16, 32\) of torch.int64": ids,
    }  # a loss
    for what, returned in returns.items():
        model = trained()
        readings = [lambda m, returned=returned: (m(ids), returned)[1]]
        with pytest.raises(BrickError, match=rf"tune: a reading returned {what}, expected logits"):
            quantize(model, Int4(), Calibration(readings, tune=3))
        assert not any(places(model, QuantLinear))
        quantize(model, Int4(), Calibration(readings))  # without tuning nobody asks
    for steps in (-1, 1.5, True, "3"):
        with pytest.raises(BrickError, match=r"tune: got .*, expected a number of steps"):
            quantize(trained(), Int4(), Calibration([lambda m: m(ids)], tune=steps))  # type: ignore[arg-type]


def test_predictions_that_are_not_finite() -> None:
    full, ids = trained(), text(1)
    coded = copy.deepcopy(full)
    quantize(coded, Int4())
    names = [p.name for p in places(coded, QuantLinear)]
    with pytest.raises(BrickError, match="tune: predictions are not finite"):
        tune(coded, full, names, [lambda m: m(ids) * math.inf], steps=3)


def test_a_model_that_computes_without_gradients() -> None:
    full = trained()
    coded = copy.deepcopy(full)
    quantize(coded, Int4())
    names = [p.name for p in places(coded, QuantLinear)]
    with pytest.raises(BrickError, match="tune: a reading computes without gradients"):
        tune(coded, full, names, [torch.no_grad()(readings(1)[0])], steps=3)
