"""Folders that cannot be used: one clear line each, and nothing half written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from brickformer import hf
from brickformer.cli import main
from brickformer.errors import BrickError, RunError
from brickformer.presets import llama

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama in three shards."""
    folder = tmp_path_factory.mktemp("good") / "model"
    hf.save(llama(vocab=9, dim=16, depth=1, heads=2, hidden=8, tied=True).build(), folder, shard=2500)
    return folder


def config(folder: Path, **fields: Any) -> None:
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (data | fields).items() if v != "absent"}))


def joined(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """One file with all tensors, changed."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    file = folder / "model.safetensors.index.json"
    data = json.loads(file.read_text())
    change(data["weight_map"])
    file.write_text(json.dumps(data))


NORM = "model.norm.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


def pickled(folder: Path) -> None:
    """A .bin file that would call a function."""
    joined(folder, lambda tensors: None)
    (folder / "model.safetensors").unlink()

    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("run!",))

    torch.save({"a": Evil()}, folder / "pytorch_model.bin")


CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"no config\.json in it"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json: broken: .* line 1"),
    "unknown family": (
        lambda f: config(f, model_type="lama"),
        r"model_type: no table for 'lama'; did you mean 'llama'",
    ),
    "no family": (lambda f: config(f, model_type="absent"), r"model_type: missing"),
    "unknown field": (lambda f: config(f, clip_qkv=8.0), r"clip_qkv: got '8\.0', a field that no table understands"),
    "field of a wrong type": (lambda f: config(f, hidden_size="16"), r"hidden_size: got '16', expected a whole number"),
    "field missing": (lambda f: config(f, hidden_size="absent"), r"hidden_size: missing"),
    "unknown activation": (lambda f: config(f, hidden_act="mish"), r"hidden_act: got 'mish', expected a known one"),
    "unknown scaling": (
        lambda f: config(f, rope_parameters="absent", rope_scaling={"rope_type": "longrope"}),
        r"rope_type: got 'longrope', expected default, linear",
    ),
    "unknown field of a scaling": (
        lambda f: config(f, rope_parameters="absent", rope_scaling={"type": "linear", "factor": 2.0, "more": 1}),
        r"rope_scaling: more: got '1', a field that no table",
    ),
    "scalings that disagree": (
        lambda f: config(f, rope_scaling={"type": "linear", "factor": 2.0}),
        r"rope_scaling: .*expected what rope_parameters says",
    ),
    "another task": (
        lambda f: config(f, architectures=["LlamaForSequenceClassification"]),
        r"architectures: .*expected LlamaForCausalLM or LlamaModel",
    ),
    "packed weights": (lambda f: config(f, quantization_config={"bits": 4}), r"quantization_config: .*packed"),
    "code of its own": (lambda f: config(f, auto_map={"AutoModel": "m.M"}), r"auto_map: .*none is run"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], r"no weights: expected model\.safetensors"),
    "shard missing": (lambda f: shard(f).unlink(), r"model-00001-of-0000\d\.safetensors: missing"),
    "shard cut off": (
        lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-8]),
        r"model-00001-of-0000\d\.safetensors: broken",
    ),
    "shard leads out": (
        lambda f: index(f, lambda m: m.update({NORM: "../x.safetensors"})),
        r"weight_map: got '\.\./x\.safetensors', expected the name of a weights file in this folder",
    ),
    "index lies": (lambda f: index(f, lambda m: m.update({"no": m[NORM]})), r"no tensor 'no' in it, where .* says"),
    "index without a map": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        r"broken: no 'weight_map'",
    ),
    "wrong shape": (
        lambda f: config(f, num_key_value_heads=1),
        r"k_proj\.weight' has shape \(16, 16\), expected \(8, 16\)",
    ),
    "tensor missing": (lambda f: joined(f, lambda t: t.pop(NORM) is None), r"no tensor 'model\.norm\.weight'"),
    "tensor too much": (
        lambda f: joined(f, lambda t: t.update({"model.norm.bias": torch.zeros(16)})),
        r"'model\.norm\.bias' belongs to no part of a llama .*did you mean 'model\.norm\.weight'",
    ),
    "tied, but different": (
        lambda f: joined(f, lambda t: t.update({"lm_head.weight": torch.zeros(9, 16)})),
        r"'lm_head\.weight' and 'model\.embed_tokens\.weight' are tied, but their values differ",
    ),
    "NaN": (
        lambda f: joined(f, lambda t: t[Q][0, :2].fill_(torch.nan)),
        r"q_proj\.weight' holds 2 values that are NaN",
    ),
    "pickle that runs code": (pickled, r"pytorch_model\.bin: cannot be read as weights alone"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_one_clear_line(
    case: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, message = CASES[case]
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    hf.load(folder)  # so that it is the change that is refused
    spoil(folder)
    with pytest.raises(BrickError, match=message):
        hf.load(folder)
    monkeypatch.chdir(tmp_path)
    assert main(["import", "model"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and 1 <= len(said.err.strip().splitlines()) <= 2 and "run!" not in said.err
    assert not (tmp_path / "runs").exists()


def test_no_such_folder(tmp_path: Path) -> None:
    (tmp_path / "model-a").mkdir()
    with pytest.raises(RunError, match="model-b: no such folder; did you mean .*model-a"):
        hf.load(tmp_path / "model-b")


def test_a_tied_tensor_under_both_names_is_taken(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "model")
    joined(tmp_path / "model", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model: Any = hf.load(tmp_path / "model").model
    assert model.head.project.weight is model.embed.tokens.weight


def test_the_older_form_is_read(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "model")
    joined(tmp_path / "model", lambda t: torch.save(t, tmp_path / "model" / "pytorch_model.bin"))
    (tmp_path / "model" / "model.safetensors").unlink()
    a, b = hf.load(tmp_path / "model").model.state_dict(), hf.load(good).model.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_a_folder_that_is_there_is_left_alone(good: Path, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(RunError, match="is there already. Name a new folder"):
        hf.save(hf.load(good).model, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["note"]


def test_what_fails_leaves_nothing(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("brickformer.hf.save")

    def spoiled(*args: Any) -> None:
        raise RunError("spoiled")

    monkeypatch.setattr(module, "compare", spoiled)
    with pytest.raises(RunError, match="spoiled"):
        hf.save(hf.load(good).model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_logits_that_are_off_are_noticed(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with transformers is one: a configuration that says something else does not pass."""
    module = import_module("brickformer.hf.save")

    honest = module.configuration

    def wrong(*args: Any) -> Any:
        family, fields = honest(*args)
        return family, fields | {"rms_norm_eps": 0.5}

    monkeypatch.setattr(module, "configuration", wrong)
    with pytest.raises(RunError, match="logits are off by"):
        hf.save(hf.load(good).model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
