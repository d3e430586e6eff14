"""A whole model with its own weights: what can be asked of it without making it small.

Shapes: ids (B, T).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor

from brickformer.models import AnyModel, DecoderModel, EncoderDecoderModel, EncoderModel
from brickformer.proof.blame import said
from brickformer.proof.report import Row
from brickformer.proof.subject import Broken, number, worst


def weights_rows(model: AnyModel, tokens: int) -> list[Row]:
    """Rows about these very weights: finite, eval deterministic, save → load equal."""
    was_training = model.training
    model.eval()
    try:
        return [
            _row(f"{name}, own weights", run, model, tokens)
            for name, run in (("finite", finite), ("eval is deterministic", same_twice), ("save → load equal", saved))
        ]
    finally:
        model.train(was_training)


def _row(name: str, run: Callable[[AnyModel, int], str], model: AnyModel, tokens: int) -> Row:
    try:
        return Row(name, "holds", run(model, tokens))
    except Exception as e:
        return Row(name, "broken", said(e), "", model.spec.kind)


def _answer(model: AnyModel, tokens: int) -> Tensor:
    def ids(vocab: int, seed: int) -> Tensor:
        drawn = torch.randint(0, vocab, (2, tokens), generator=torch.Generator().manual_seed(seed))
        return drawn.to(next(model.parameters()).device)

    match model:
        case EncoderDecoderModel():
            return model(ids(model.spec.encoder.vocab, 1), ids(model.spec.decoder.vocab, 2))
        case DecoderModel() | EncoderModel():
            return model(ids(model.spec.vocab, 1))


@torch.no_grad()
def finite(model: AnyModel, tokens: int) -> str:
    """Every weight and every output is a number."""
    for name, p in model.named_parameters():
        if not bool(p.isfinite().all()):
            raise Broken(f"{name}: {int((~p.isfinite()).sum())} of {p.numel():,} numbers are not finite")
    if not bool(_answer(model, tokens).isfinite().all()):
        raise Broken("the output is not finite")
    return f"{sum(p.numel() for p in model.parameters()):,} numbers"


@torch.no_grad()
def same_twice(model: AnyModel, tokens: int) -> str:
    """The same call gives the same bits."""
    one, two = _answer(model, tokens), _answer(model, tokens)
    off, at = worst(two, one, "the same call again")
    if off > 0.0:
        raise Broken(f"the same call twice: token {at} is off by {number(off)}, allowed 0")
    return "two calls: the same bits"


@torch.no_grad()
def saved(model: AnyModel, tokens: int) -> str:
    """Written to safetensors and read into a model built anew: the same bits."""
    first = next(model.parameters())
    torch.manual_seed(4)
    other = type(model.spec).from_json(model.spec.to_json()).build().to(first.device, first.dtype).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_model(model, str(path))
        size = path.stat().st_size
        load_model(other, path, strict=True, device=str(first.device))
    off, at = worst(_answer(other, tokens), _answer(model, tokens), "the loaded model")
    if off > 0.0:
        raise Broken(f"the loaded model is off by {number(off)} at token {at}, allowed 0: a tensor is not in the file")
    return f"{size:,} bytes of safetensors into another model: the same bits"
