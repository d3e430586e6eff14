"""The edges of what a model takes: no rows, ids of other types, a device without numbers, odd indices in a path."""

from __future__ import annotations

import pytest
import torch

from brickformer import GLU, MLP, Attention, BrickError, Decoder, Layer, Rope, SpecError, pattern
from brickformer.cli.settings import changed
from brickformer.embed import Embed
from brickformer.mixers.shortconv import ShortConv
from brickformer.positions import Alibi, Sinusoid
from brickformer.shapes import shapes_of

SPEC = Decoder(11, 16, pattern([Layer(Attention(4, kv_heads=2, position=Rope()), GLU(8))], 2))


def test_a_batch_without_rows() -> None:
    model, ids = SPEC.build(), torch.zeros(0, 5, dtype=torch.long)
    assert model(ids).shape == (0, 5, 11)
    assert model(ids, None, model.init_state(0, 8)).shape == (0, 5, 11)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_ids_of_a_type_that_no_table_takes(dtype: torch.dtype) -> None:
    with pytest.raises(BrickError, match="int64 or int32"):
        SPEC.build()(torch.zeros(1, 3).to(dtype))


def test_built_without_numbers_a_model_takes_its_weights_later() -> None:
    """On `meta` nothing is computed; with the weights of a twin it is that twin, rotary rates included."""
    twin, ids = SPEC.build(), torch.arange(5)[None]
    with torch.device("meta"):
        model = SPEC.build()
    model.load_state_dict(twin.state_dict(), assign=True)
    assert torch.equal(model(ids), twin(ids))


COMPUTED = Decoder(11, 16, (Layer(Attention(4, position=Alibi()), MLP(8)),), embed=Embed(Sinusoid(9, "halves")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tables_that_are_not_saved_are_computed_where_they_were_emptied(dtype: torch.dtype) -> None:
    """`to_empty` leaves rubbish in every tensor; weights come from a file, computed tables from their settings."""
    twin, ids = COMPUTED.build().to(dtype), torch.arange(8)[None]
    with torch.device("meta"):
        on_meta = COMPUTED.build().to(dtype)
    for emptied in (on_meta, shapes_of(COMPUTED).to(dtype), COMPUTED.build().to(dtype)):
        emptied.to_empty(device="cpu")
        emptied.load_state_dict(twin.state_dict())
        assert torch.equal(emptied(ids), twin(ids))
    with torch.device("meta"):
        assigned = COMPUTED.build().to(dtype)
    for waiting in (assigned, shapes_of(COMPUTED).to(dtype)):
        waiting.load_state_dict(twin.state_dict(), assign=True)
        assert torch.equal(waiting(ids), twin(ids))


@pytest.mark.parametrize("index", ["²", "--1", "-", "5"])
def test_an_index_that_is_none(index: str) -> None:
    with pytest.raises(SpecError, match="or \\*"):
        SPEC.but(**{f"layers.{index}.place": "post"})
    with pytest.raises(SpecError, match="or \\*"):
        changed(SPEC, [(f"layers.{index}.place", "post")])


def test_gradients_of_each_row_by_torchs_transforms() -> None:
    """vmap over grad knows neither numbers nor functions with a backward of their own."""
    model = Decoder(20, 16, pattern([Layer(ShortConv(Attention(2, position=Rope())), GLU(24))], 2)).build()
    weights, ids = dict(model.named_parameters()), torch.randint(0, 20, (3, 1, 5))

    def loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(model, weights, (row,))
        return out.square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, ids)
    for i, row in enumerate(ids):
        alone = torch.autograd.grad(loss(weights, row), list(weights.values()))
        for name, g in zip(weights, alone, strict=True):
            torch.testing.assert_close(each[name][i], g, rtol=1e-4, atol=1e-4)
