"""Dropout: every probability that a spec can hold drops something in training and nothing in eval mode."""

from __future__ import annotations

import pytest
import torch
from contract.bricks import Cell
from contract.checks import draw, eval_is_deterministic, memory_of, say, side_of, training

from brickformer.attend import Attend
from brickformer.mask import FULL, Span
from brickformer.models import AnyModel

DECODER, ENCODER = Cell(), Cell(family="encoder", place="peri")
BOTH = Cell(family="encoder_decoder", cross="mha", ffn="mlp")
PARALLEL = Cell(arrange="parallel")
PLACES = [
    (DECODER, "embed.dropout"),
    (DECODER, "layers.*.dropout"),
    (PARALLEL, "layers.*.dropout"),
    (DECODER, "layers.1.mixer.dropout"),
    (Cell(mixer="written_out"), "layers.1.mixer.dropout"),
    (DECODER, "layers.0.ffn.dropout"),
    (ENCODER, "embed.dropout"),
    (ENCODER, "layers.*.dropout"),
    (ENCODER, "layers.0.mixer.dropout"),
    (BOTH, "encoder.embed.dropout"),
    (BOTH, "encoder.layers.*.mixer.dropout"),
    (BOTH, "decoder.layers.0.ffn.dropout"),
    (BOTH, "decoder.layers.*.cross.dropout"),
    (Cell(mixer="latent"), "layers.0.mixer.dropout"),
    (Cell(mixer="differential"), "layers.1.mixer.dropout"),
]


@pytest.mark.parametrize(("cell", "path"), PLACES, ids=[f"{cell}:{path}" for cell, path in PLACES])
def test_drops_in_training_only(cell: Cell, path: str) -> None:
    model = cell.build()
    dropping = model.spec.but(**{path: 0.5}).build().double().eval()
    dropping.load_state_dict(model.state_dict())
    ids = draw(model)
    expected = say(model, ids, memory=memory_of(model))
    assert torch.equal(say(dropping, ids, memory=memory_of(dropping)), expected)
    eval_is_deterministic(dropping)
    with training(dropping):
        one, two = (say(dropping, ids, memory=memory_of(dropping)) for _ in range(2))
    assert not torch.allclose(one, expected) and not torch.allclose(one, two)


def test_a_residual_drops_what_the_branch_adds_and_never_the_stream() -> None:
    model = Cell().build()
    layer = model.spec.but(**{"layers.*.dropout": 0.999999}).build().double().stack.layers[0]
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    assert torch.equal(layer(x, Span(0, 5)), x)


@pytest.mark.parametrize("backend", ["reference", "matmul", "sdpa"])
def test_weights_are_dropped_and_scaled_up(backend: str) -> None:
    """With all values 1 the output is the sum of the weights: 1 without dropout, a multiple of 1/(T·keep) with it."""
    attend = Attend(FULL, dropout=0.75, backend=backend).train()  # type: ignore[arg-type]
    q, k, v = torch.zeros(1, 2, 64, 4), torch.zeros(1, 2, 8, 4), torch.ones(1, 2, 8, 4)
    out = attend(q, k, v, Span(0, 64), Span(0, 8))
    counted = out * 8 * 0.25  # how many of the 8 weights were kept
    assert torch.allclose(counted, counted.round(), atol=1e-5)
    assert counted.round().unique().numel() > 1
    assert torch.allclose(attend.eval()(q, k, v, Span(0, 64), Span(0, 8)), torch.ones(1, 2, 64, 4))


def test_every_dropout_of_a_fully_dropping_model_is_heard() -> None:
    """Dropouts all over, as recipes set them: training differs from eval, and eval is the model without dropout."""
    for cell in (DECODER, ENCODER, BOTH):
        plain = cell.build()
        model: AnyModel = cell.spec(dropout=0.3).build().double().eval()
        model.load_state_dict(plain.state_dict())
        ids = draw(model)
        assert torch.equal(say(model, ids, memory=memory_of(model)), say(plain, ids, memory=memory_of(plain)))
        rates = [m.p for m in side_of(model).modules() if isinstance(m, torch.nn.Dropout)]
        assert rates.count(0.3) == 1 + 2 * (3 if cell is BOTH else 2)
