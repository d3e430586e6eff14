"""What is asked of every family: a tiny random model of theirs, written by their library, read by ours, and back.

A case is a class of theirs and the options that its configuration flips; the tests of a family are its list of cases.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor

from brickformer import hf
from brickformer.mask import EMPTY, Span
from brickformer.models import DecoderModel

V, T = 13, 11
NEAR = 1e-5
LEFT = torch.tensor([[1] * 11, [0] * 4 + [1] * 7]).bool()
RIGHT = torch.tensor([[1] * 11, [1] * 6 + [0] * 5]).bool()
NO_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@dataclass(frozen=True)
class Case:
    """name: the family, and what is flipped. kind: their class. options: of its configuration.

    takes_positions: whether their forward is told where the tokens of a padded row sit (else its mask alone says it).
    pads_left: whether theirs leaves padding on the left out of account.
    """

    name: str
    kind: Any
    options: dict[str, Any] = field(default_factory=dict)
    takes_positions: bool = True
    near: float = NEAR
    noise: float = 1.5
    pads_left: bool = True

    @property
    def family(self) -> str:
        return self.name.split("-")[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Their library without its bars and warnings."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)


def shake(model: torch.nn.Module, noise: float = 1.5) -> None:
    """Every parameter random: gains, biases, tables, none at its first value."""
    made = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.is_floating_point():
            drawn = torch.randn(p.shape, generator=made)
            p.data = drawn * p.shape[-1] ** -0.5 * noise if p.ndim > 1 else p.data + 0.3 * drawn


def written(case: Case, folder: Path) -> Any:
    """Their model, every parameter random, and the folder it was saved to."""
    torch.manual_seed(1)
    with quiet():
        config = case.kind.config_class(**case.options)
        config._attn_implementation = config._experts_implementation = "eager"
        model = case.kind(config).float().eval()
        shake(model, case.noise)
        model.save_pretrained(folder)
    return model


def ids_of(seed: int = 0, tokens: int = T) -> Tensor:
    return torch.randint(1, V, (2, tokens), generator=torch.Generator().manual_seed(seed))


def off(got: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(expected).all(), "their own logits are no numbers"
    return float((got - expected).abs().max())


def layer_by_layer(mine: DecoderModel, theirs: Any, ids: Tensor) -> str:
    """How far off the hidden states are after every layer: where it begins is where to look."""
    seen: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda m, i, out: seen.append(out)) for layer in mine.stack.layers]
    mine(ids)
    for hook in hooks:
        hook.remove()
    told = theirs(input_ids=ids, output_hidden_states=True).hidden_states
    first = f"embedding {off(mine.embed(ids, Span(0, ids.shape[1])), told[0]):.2g}"
    rest = [f"layer {i} {off(a, b):.2g}" for i, (a, b) in enumerate(zip(seen[:-1], told[1:], strict=False))]
    return ", ".join([first, *rest])


@torch.no_grad()
def same_logits(case: Case, mine: DecoderModel, theirs: Any) -> None:
    """Full, padded on either side, and token by token with a state: all that theirs says of real tokens."""
    ids = ids_of()
    full = theirs(input_ids=ids).logits
    away = off(mine(ids), full)
    assert away <= case.near, f"{case.name}: full: {away:.2g}; {layer_by_layer(mine, theirs, ids)}"
    for side, valid in (("left", LEFT), ("right", RIGHT)) if case.pads_left else (("right", RIGHT),):
        at = Span.of(ids, valid=valid)
        assert at.pos is not None
        told = {"position_ids": at.pos.masked_fill(at.pos == EMPTY, 1)} if case.takes_positions else {}
        padded = theirs(input_ids=ids, attention_mask=valid.long(), **told).logits
        away = off(mine(ids, at)[valid], padded[valid])
        assert away <= case.near, f"{case.name}: padded {side}: {away:.2g}"
    state = mine.init_state(2, T)
    steps = torch.cat([mine(ids[:, i : i + 1], state=state) for i in range(T)], 1)
    assert off(steps, full) <= case.near, f"{case.name}: step by step: {off(steps, full):.2g}"


def same_files(family: str, model: Any, config: Any, source: Path, target: Path) -> None:
    """Saved again: the same tensors to the last byte, the same configuration; without it, one that says the same."""
    hf.save(model, target / "like", like=config)
    assert json.loads((target / "like" / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    hf.save(model, target / "anew", family=family)  # reads itself back, and asks transformers
    again = hf.load(target / "anew").model
    assert hf.fit(again.spec, family).config == hf.fit(model.spec, family).config
    expected = safetensors.torch.load_file(source / "model.safetensors")
    for name in ("like", "anew"):
        got = safetensors.torch.load_file(target / name / "model.safetensors")
        assert sorted(got) == sorted(expected)
        for key, tensor in expected.items():
            assert got[key].dtype == tensor.dtype and got[key].shape == tensor.shape, key
            assert got[key].view(torch.uint8).equal(tensor.view(torch.uint8)), f"{key} is not the same to the last byte"


def proves(case: Case, folder: Path) -> None:
    """Everything above, for a decoder."""
    theirs = written(case, folder / "theirs")
    checkpoint = hf.load(folder / "theirs")
    assert isinstance(checkpoint.model, DecoderModel)
    same_logits(case, checkpoint.model, theirs)
    same_files(case.family, checkpoint.model, checkpoint.config, folder / "theirs", folder)
