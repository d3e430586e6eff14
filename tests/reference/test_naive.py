"""Our models against naive.py: outputs and gradients, padded and packed, for every cell of the pairwise table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from contract.bricks import Cell, pairs
from contract.checks import close, draw
from reference.naive import Tokens, UnknownBrickError, Weights, decode, encode, encode_with_head, translate
from torch import Tensor

from brickformer.mask import EMPTY, Span
from brickformer.models import AnyModel, DecoderModel, EncoderDecoderModel, EncoderModel

pytestmark = pytest.mark.unchecked

ELSEWHERE = {
    "lstm": "tests/mixers: torch's cell, step by step",
    "mamba": "tests/mixers: the recurrence, step by step",
    "mamba2": "tests/mixers: the recurrence, step by step",
    "gated_delta": "tests/mixers: the recurrence, step by step",
    "yarn": "tests/reference/test_transformers.py",
    "llama3": "tests/reference/test_transformers.py",
}
VALID = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 1, 0]]).bool()
DOC = torch.tensor([[0, 0, 0, 1, 1], [1, 2, 2, 2, 2], [5, 5, 5, 5, 5]])


def kinds(data: Any) -> set[str]:
    """Every kind of brick in plain data."""
    if isinstance(data, dict):
        return {data["kind"]}.union(*map(kinds, data.values()))
    return set().union(*map(kinds, data)) if isinstance(data, list) else set()


def tokens(at: Span, rows: int) -> Tokens:
    """Where tokens are, as plain numbers."""
    where = at.positions(torch.device("cpu")).expand(rows, -1).tolist()
    return Tokens(
        [[None if p == EMPTY else p for p in row] for row in where], None if at.doc is None else at.doc.tolist()
    )


def ours(model: AnyModel, ids: Tensor, at: Span) -> Tensor:
    """The model's answer to ids at a span (both sides of an encoder-decoder read it)."""
    match model:
        case DecoderModel():
            return model(ids, at)
        case EncoderModel():
            at = model.embed.place(at)
            return model.logits(model.stack(model.embed(ids, at), at))
        case EncoderDecoderModel():
            memory = model.encode(ids, at.real())
            return model.decode(ids, memory, Span(0, ids.shape[1]))


def theirs(model: AnyModel, w: Weights, ids: Tensor, at: Span) -> Tensor:
    """What naive.py answers."""
    spec, here = model.spec.to_dict(), tokens(at, len(ids))
    match model:
        case DecoderModel():
            return decode(spec, w, ids, here)
        case EncoderModel():
            return encode_with_head(spec, w, ids, here)
        case EncoderDecoderModel():
            return translate(spec, w, ids, here, ids, tokens(Span(0, ids.shape[1]), len(ids)))


CELLS = [cell for cell in pairs() if not kinds(cell.spec().to_dict()) & set(ELSEWHERE)]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_outputs_and_gradients_equal_the_papers(cell: Cell) -> None:
    model = cell.build()
    names = [name for name, _ in model.named_parameters()]
    one: dict[tuple[int, torch.Size], Tensor] = {}  # what has several names is one table, with one gradient
    state = model.state_dict().items()
    copied = {name: one.setdefault((p.data_ptr(), p.shape), p.detach().clone()) for name, p in state}
    leaves = [copied[name].requires_grad_() for name in names]
    ids = draw(model, 3, 5)
    at = Span.of(ids, valid=VALID)
    real = VALID if not isinstance(model, EncoderDecoderModel) else torch.ones_like(VALID)
    got, expected = ours(model, ids, at), theirs(model, Weights(copied), ids, at)
    close(got[real], expected[real], "outputs", 1e-11)
    weight = torch.arange(got[real].numel(), dtype=torch.float64).sin().view_as(got[real])
    got_grads = torch.autograd.grad((got[real] * weight).sum(), list(model.parameters()), allow_unused=True)
    expected_grads = torch.autograd.grad((expected[real] * weight).sum(), leaves, allow_unused=True)
    for name, g, e in zip(names, got_grads, expected_grads, strict=True):
        zero = torch.zeros(())
        close(zero if g is None else g, (zero if g is None else torch.zeros_like(g)) if e is None else e, name, 1e-9)


@pytest.mark.parametrize("cell", [c for c in CELLS if c.family == "decoder"][::3], ids=str)
def test_packed_documents_equal_the_papers(cell: Cell) -> None:
    model = cell.build()
    ids = draw(model, 3, 5)
    at = Span.of(ids, doc=DOC)
    close(ours(model, ids, at), theirs(model, Weights(dict(model.state_dict())), ids, at), "packed", 1e-11)


def test_an_encoder_without_a_head_gives_its_vectors() -> None:
    model = Cell("encoder", absolute="sinusoid", place="post").build()
    assert isinstance(model, EncoderModel)
    bare = model.spec.but(head=None).build().double()
    bare.load_state_dict({name: p for name, p in model.state_dict().items() if not name.startswith("head.")})
    ids = draw(model, 3, 5)
    expected, _ = encode(bare.spec.to_dict(), Weights(dict(bare.state_dict())), ids, tokens(Span(0, 5), 3))
    close(bare(ids), expected, "vectors", 1e-11)


def test_most_of_the_table_is_compared() -> None:
    """What naive.py does not know is listed with the place of its own reference; the list is not out of date."""
    everything = set().union(*(kinds(cell.spec().to_dict()) for cell in pairs()))
    assert set(ELSEWHERE) <= everything
    assert everything - set(ELSEWHERE) <= set().union(*(kinds(cell.spec().to_dict()) for cell in CELLS))
    assert len(CELLS) >= 60


def test_the_reference_can_tell() -> None:
    """A reference that agrees with anything is worth nothing: small changes of the spec change its answer."""
    model = Cell(mixer="gqa").build()
    ids, w = draw(model, 3, 5), Weights(dict(model.state_dict()))
    at = tokens(Span(0, 5), 3)
    right = decode(model.spec.to_dict(), w, ids, at)
    for path, value in (
        ("mixer.scale", 1.0),
        ("mixer.position", None),
        ("mixer.mask.causal", False),
        ("place", "branch"),
    ):
        try:
            other = decode(model.spec.but(**{f"layers.*.{path}": value}).to_dict(), w, ids, at)
        except KeyError:
            continue  # other parameters: noticed as well
        assert (other - right).abs().max() > 1e-3, path
    with pytest.raises(UnknownBrickError):
        decode(Cell(mixer="mamba", position="none").spec().to_dict(), w, ids, at)
    assert math.isfinite(float(right.sum()))
