"""Specs, parameter names and shapes, counts and outputs are what they were; whoever changes one renews the file."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from golden.models import COMMAND, FOLDER, MODELS, digest, fill, record, say

from brickformer.models import ModelSpec

pytestmark = pytest.mark.unchecked


def kept(name: str) -> dict[str, Any]:
    """What the file says."""
    data: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return data


@pytest.fixture(scope="module", params=list(MODELS))
def both(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Name, what is, what was."""
    return request.param, record(MODELS[request.param]()), kept(request.param)


Both = tuple[str, dict[str, Any], dict[str, Any]]


def test_the_spec_is_what_it_was(both: Both) -> None:
    name, now, was = both
    assert now["spec"] == was["spec"], f"{name}: the spec says something else. If that is meant: {COMMAND}"


def test_an_old_file_is_still_read(both: Both) -> None:
    """A checkpoint stores this JSON: a renamed or a dropped field is a broken checkpoint."""
    name, _, was = both
    assert ModelSpec.from_json(json.dumps(was["spec"])) == MODELS[name]()


def test_parameters_are_what_they_were(both: Both) -> None:
    name, now, was = both
    assert list(now["shapes"].items()) == list(was["shapes"].items()), f"{name}: old weights would not load. {COMMAND}"
    assert now["parameters"] == was["parameters"]


def test_outputs_are_what_they_were(both: Both) -> None:
    name, now, was = both
    assert now["digest"].keys() == was["digest"].keys()
    for key, value in was["digest"].items():
        assert now["digest"][key] == pytest.approx(value, rel=1e-6, abs=1e-7), (
            f"{name}: {key}. If that is meant: {COMMAND}"
        )


def test_files_and_models_are_one_to_one() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(MODELS)


def test_a_digest_notices_one_weight() -> None:
    """And depends on neither the seed nor the initial values."""
    model = MODELS["llama"]().build().double().eval()
    fill(model)
    before = digest(say(model))
    torch.manual_seed(123)
    again = MODELS["llama"]().build().double().eval()
    fill(again)
    assert digest(say(again)) == before
    again.get_parameter("stack.layers.0.ffn.out.weight").data[3, 5] += 1e-3
    after = digest(say(again))
    changed = [key for key in before if after[key] != pytest.approx(before[key], rel=1e-6, abs=1e-7)]
    assert {"sin", "cos", "std", "first"} <= set(changed)
