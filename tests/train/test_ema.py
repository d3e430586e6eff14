"""The average of the weights against its recursion in plain Python."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from brickformer.errors import RunError
from brickformer.train.ema import Average


@pytest.mark.parametrize("decay", [0.2, 0.999])
def test_it_is_the_recursion(decay: float) -> None:
    model = nn.Linear(2, 1, bias=False).double()
    average = Average(model, decay)
    expected = model.weight.detach().clone()
    for step in range(1, 30):
        with torch.no_grad():
            model.weight += torch.randn(1, 2, dtype=torch.float64)
        average.update(step)
        d = min(decay, (1 + step) / (10 + step))
        expected = d * expected + (1 - d) * model.weight.detach()
        torch.testing.assert_close(average.shadow["weight"], expected)


def test_the_model_holds_the_average_inside_and_its_own_weights_afterwards() -> None:
    model = nn.Linear(3, 2)
    average = Average(model, 0.5)
    first = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    own = model.weight.detach().clone()
    with pytest.raises(KeyError), average.applied():
        assert torch.equal(model.weight, first)
        raise KeyError
    assert torch.equal(model.weight, own)
    assert model.weight.requires_grad


def test_a_tied_weight_is_averaged_once() -> None:
    table, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    average = Average(model, 0.5)
    with torch.no_grad():
        table.weight.fill_(10.0)
        average.shadow["0.weight"].fill_(0.0)
    average.update(100)
    assert average.shadow.keys() == {"0.weight"}
    assert average.shadow["0.weight"].eq(5.0).all()


def test_it_can_be_restored_and_refuses_that_of_another_model() -> None:
    average = Average(nn.Linear(3, 2), 0.5)
    saved = {name: t + 1 for name, t in average.shadow.items()}
    average.restore(saved)
    assert all(torch.equal(average.shadow[name], t) for name, t in saved.items())
    with pytest.raises(RunError, match="not this model's"):
        average.restore({"weight": torch.zeros(2, 3)})
