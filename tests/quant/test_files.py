"""Quantized runs on the disk: the same numbers again, never in full precision on the way, refused when altered."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from cli.conftest import TINY
from matplotlib.backends.backend_agg import FigureCanvasAgg

from brickformer.cli import main
from brickformer.errors import BrickError, RunError
from brickformer.files import read_tensors, write_tensors
from brickformer.quant import NF4, Int4, Int8, Matrix, QuantLinear, Receipt, Scheme
from brickformer.recipes import Session, Trained
from brickformer.recipes.onnx import export_run
from brickformer.recipes.published import imported
from brickformer.recipes.quantized import Plan, quantize_run
from brickformer.surgery import places
from brickformer.tasks import Imported


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    assert main(["train", "reverse", "--out", str(out), *TINY]) == 0
    return out / "reverse-001"


@pytest.fixture
def quantized(run: Path, tmp_path: Path) -> Path:
    return quantize_run(run, Plan(Int4(), calibrate=1), root=tmp_path)[0].path


PLANS = [
    Plan(Int8()),
    Plan(Int4(symmetric=False), calibrate=2),
    Plan(NF4(), calibrate=1, method="awq", head="int8"),
    Plan(Int4(), table=True, worst=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_is_loaded_is_what_was_quantized(run: Path, tmp_path: Path, plan: Plan) -> None:
    made, receipt = quantize_run(run, plan, root=tmp_path)
    again = Trained.open(made.path)
    tensors = safetensors.torch.load_file(made.path / "weights.safetensors")
    state = again.model.state_dict()
    assert all(state[name].equal(t) and state[name].dtype is t.dtype for name, t in tensors.items())
    kept = [m.name for m in receipt.matrices if m.kind == "kept"]
    assert len(kept) == plan.worst and not any(f"{n}.codes" in tensors for n in kept)
    src, tgt = torch.randint(3, 13, (2, 5)), torch.randint(3, 13, (2, 4))
    assert again.model(src, tgt).isfinite().all()
    assert receipt.after["file bytes"] == (made.path / "weights.safetensors").stat().st_size
    said = json.loads((made.path / "receipt.json").read_text())
    assert said["after"] == receipt.after and len(said["matrices"]) == len(receipt.matrices)
    assert (made.path / "receipt.png").read_bytes()[:4] == b"\x89PNG"
    assert str(plan.scheme) in receipt.table() and "loss" in receipt.table() and "exact" in receipt.table()
    if plan.worst:
        alone = quantize_run(run, Plan(plan.scheme, table=True), root=tmp_path)[1]
        assert set(alone.worst(2)) == set(kept)
    assert made.spec().keys() - Trained.open(run).run.model.to_dict().keys() == {"quantized"}


def test_tied_tables_stay_one(tmp_path: Path) -> None:
    assert main(["train", "reverse", "--out", str(tmp_path), *TINY, "--set", "model.decoder.head.tied=true"]) == 0
    plain = Trained.open(tmp_path / "reverse-001").model
    assert plain.decoder.head.project.weight is plain.decoder.embed.tokens.weight is plain.encoder.embed.tokens.weight
    made = quantize_run(tmp_path / "reverse-001", Plan(Int8(), table=True))[0]
    model = Trained.open(made.path).model
    codes = {
        m.codes.data_ptr() for m in (model.decoder.head.project, model.decoder.embed.tokens, model.encoder.embed.tokens)
    }
    assert len(codes) == 1


def test_nothing_is_unpacked_while_loading(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a matrix was made")

    monkeypatch.setattr("brickformer.quant.codes.Coded.weight", never)
    monkeypatch.setattr("brickformer.quant.codes.Coded.rows", never)
    modules = [p.module for p in places(Trained.open(quantized).model, QuantLinear)]
    assert modules and all(m.codes.dtype is torch.uint8 for m in modules)


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_files_that_were_cut_or_altered_are_refused(quantized: Path, tmp_path: Path) -> None:
    weights, spec = quantized / "weights.safetensors", quantized / "spec.json"
    whole, said = weights.read_bytes(), json.loads(spec.read_text())

    def refused(what: str) -> None:
        with pytest.raises(BrickError, match=what):
            Trained.open(quantized)
        weights.write_bytes(whole)
        spec.write_text(json.dumps(said))
        Trained.open(quantized)

    for size in (0, 5, 500, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:size])
        refused("weights.safetensors: broken")
    for at in (len(whole) - 1, len(whole) - len(whole) // 3, len(whole) // 2):
        flipped(weights, at)
        refused("its numbers are not those that were quantized")
    name = next(iter(said["quantized"]["modules"]))
    for entry, what in (
        (None, "entry of spec.json is broken"),
        ({**said["quantized"], "format": 7}, "format 7"),
        ({**said["quantized"], "modules": {}}, "does not fit spec.json"),
        (
            {**said["quantized"], "modules": {**said["quantized"]["modules"], "nowhere": {"kind": "int8"}}},
            "^nowhere: the model has no such module; spec.json was altered",
        ),
        ({**said["quantized"], "modules": {**said["quantized"]["modules"], name: {"kind": "int5"}}}, "int5"),
        ({**said["quantized"], "modules": {**said["quantized"]["modules"], name: {"kind": "int8"}}}, "does not fit"),
        ({**said["quantized"], "modules": {**said["quantized"]["modules"], name: 3}}, "entry of spec.json is broken"),
    ):
        spec.write_text(json.dumps({**said, "quantized": entry}))
        refused(what)


def test_twice_and_further_training_are_refused(quantized: Path, tmp_path: Path) -> None:
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(RunError, match="quantized already"):
        quantize_run(quantized, Plan(Int8()))
    with pytest.raises(RunError, match="quantized, which is for use"):
        Session.resume(quantized)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def _imported(path: Path, root: Path) -> Path:
    """The same model as a run that was imported: its data is not known."""
    trained = Trained.open(path)
    strange = dataclasses.replace(trained, run=trained.run.but(task=Imported("elsewhere"), name="strange"))
    return imported(strange, root).path


def test_a_model_that_was_imported_is_rounded_to_nearest(run: Path, tmp_path: Path) -> None:
    strange = _imported(run, tmp_path)
    made, receipt = quantize_run(strange, Plan(Int4()))
    own, known = quantize_run(run, Plan(Int4()), root=tmp_path)
    assert receipt.matrices == known.matrices and made.weights()[0].keys() == own.weights()[0].keys()
    assert set(receipt.after) == set(receipt.before) == {"file bytes", "ms a token"}
    assert set(known.after) == {"file bytes", "ms a token", "loss", "exact"}
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RunError, match="imported without data, so there is none to round by; leave --calibrate out"):
        quantize_run(strange, Plan(Int4(), calibrate=1))
    with pytest.raises(RunError, match="--data: goes with decoders, got encoder_decoder"):
        quantize_run(strange, Plan(Int4(), calibrate=1, data="book.txt"))
    assert sorted(tmp_path.iterdir()) == before


def test_a_text_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brickformer.recipes.quantized.WINDOW", 16)
    letters, own, other = "abcdefgh\n", tmp_path / "own.txt", tmp_path / "other.txt"
    own.write_text("".join(letters[(i + i // 5) % 9] for i in range(900)))
    other.write_text("".join(letters[(2 * i + i // 7) % 9] for i in range(600)))
    small = "--steps 3 --set train.batch=4 --set task.context=8 --set model.dim=16".split()
    assert main(["train", "text", "--data", str(own), "--out", str(tmp_path), *small]) == 0
    strange = _imported(tmp_path / "text-001", tmp_path)
    with pytest.raises(RunError, match="name a text: --data FILE, or leave --calibrate out"):
        quantize_run(strange, Plan(Int4(), calibrate=2))
    _, receipt = quantize_run(strange, Plan(Int4(), calibrate=2, data=str(other)))
    assert f"gptq on 2 batches of {other}" in receipt.table()
    trained = Trained.open(strange)
    ids = trained.target.encode(other.read_text())[540:]
    rows = torch.tensor([ids[at : at + 17] for at in (0, 16, 32)])
    with torch.inference_mode():
        logits = trained.model(rows[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert receipt.before["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert receipt.matrices != quantize_run(strange, Plan(Int4()))[1].matrices


def test_the_picture_has_every_matrix_and_its_whole_title() -> None:
    matrices = [Matrix(f"layers.{i}", (4, 4), "kept" if i == 1 else "int4", 0.1 * i, 64, 12) for i in range(4)]
    figure = Receipt(", ".join(f"kept: stack.layers.{i}" for i in range(9)), matrices).picture()
    FigureCanvasAgg(figure).draw()
    (ax,) = figure.axes
    assert [t.get_text() for t in ax.get_yticklabels()] == [m.name for m in matrices]
    ((said, row),) = [(t.get_text(), t.xy[1]) for t in ax.texts]
    box = ax.title.get_window_extent()
    assert (said, row) == ("kept", 1)
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1


def test_a_run_appears_whole(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is killed before has no folder that a person would find."""
    real, seen = Receipt.picture, []

    def spy(receipt: Receipt) -> Any:
        seen.extend(p.name for p in tmp_path.iterdir())
        return real(receipt)

    monkeypatch.setattr(Receipt, "picture", spy)
    made = quantize_run(run, Plan(Int8()), root=tmp_path)[0]
    assert seen == [f".{made.path.name}.part"] and [p.name for p in tmp_path.iterdir()] == [made.path.name]
    assert Trained.open(made.path)


@pytest.mark.parametrize("where", ["weights", "picture"])
def test_nothing_is_left_of_one_that_fails(
    run: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RunError("the disk is full")

    home = {
        "weights": "brickformer.train.RunFolder.save_weights",
        "picture": "brickformer.quant.Receipt.picture",
    }
    monkeypatch.setattr(home[where], full)
    with pytest.raises(RunError, match="full"):
        quantize_run(run, Plan(Int8()), root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "bad")
    tensors, metadata = read_tensors(run / "weights.safetensors")
    tensors["decoder.stack.layers.0.ffn.out.weight"][1, 2] = torch.inf
    write_tensors(tmp_path / "bad" / "weights.safetensors", tensors, metadata)
    with pytest.raises(BrickError, match=r"decoder.stack.layers.0.ffn.out.weight \[1, 2\] is inf"):
        quantize_run(tmp_path / "bad", Plan(Int8()))
    with pytest.raises(BrickError, match=r"decoder.stack.layers.0.ffn.out.weight \[1, 2\] is inf"):
        export_run(tmp_path / "bad", None)
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def test_schemes_are_bricks() -> None:
    for scheme in (Int8(), Int4(group=64, symmetric=False), NF4(group=32)):
        assert Scheme.from_json(scheme.to_json()) == scheme
