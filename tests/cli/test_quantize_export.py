"""`brick quantize`, `brick export` and `brick generate --engine onnx`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli.conftest import Brick, contents

from brickformer import save
from brickformer.errors import RunError
from brickformer.quant import Int4
from brickformer.recipes import Trained
from brickformer.recipes.quantized import Plan, quantize_run

ITEMS = ["7 1 4", "1 2 3 4", "9 8 7 6 5 4"]


def test_a_quantized_run_answers_as_before(brick: Brick, trained: Path) -> None:
    before, answers = contents(trained), brick("generate", trained, *ITEMS).out
    for more in (["--bits", "8"], ["--bits", "4", "--calibrate", "2", "--keep", "worst:1"]):
        said = brick("quantize", trained, *more, "--out", ".")
        assert said.code == 0 and "100.0 % → 100.0 %" in said.out and "file bytes" in said.out
        folder = Path(said.out.split("use it:  brick generate ")[1].split()[0])
        assert brick("generate", folder, *ITEMS).out == answers
        receipt = json.loads((folder / "receipt.json").read_text())
        assert (folder / "receipt.png").is_file() and receipt["after"]["exact"] == 1.0
        size = (folder / "weights.safetensors").stat().st_size
        assert size < 0.5 * (trained / "weights.safetensors").stat().st_size
    assert [m["kind"] for m in receipt["matrices"]].count("kept") == 1
    assert contents(trained) == before
    assert "a decode step by" not in brick("explain", trained).out
    explained = brick("explain", folder).out
    assert "× Int4(): a decode step by int4pack" in explained
    how = "Int4(), gptq on 2 batches, the 1 worst kept"
    assert said.out.startswith(f"{how}\n") and f"quantized: {how}\n" in explained and "receipt.txt" in said.out
    assert brick("show", folder).code == 0 and brick("score", folder, "7 1 4\t4 1 7").code == 0


def test_a_tuned_run_says_so(brick: Brick, tiny: Path) -> None:
    said = brick(
        "quantize", tiny, "--bits", "4", "--calibrate", "1", "--tune", "100", "--keep", "worst:1", "--out", "."
    )
    assert said.code == 0 and said.out.startswith("Int4(), gptq on 1 batch, tuned for 100 steps, the 1 worst kept\n")
    folder = Path(said.out.split("use it:  brick generate ")[1].split()[0])
    receipt = json.loads((folder / "receipt.json").read_text())
    assert {m["kind"]: m["tuned"] for m in receipt["matrices"]} == {"int4": True, "kept": False}
    assert brick("generate", folder, *ITEMS).code == 0
    for more in (["--tune", "4"], ["--calibrate", "3", "--tune", "-1"]):
        error = brick("quantize", tiny, "--bits", "4", *more, "--out", ".").error
        assert f"--tune: got {more[-1]} steps, expected some, and data to learn from: --calibrate N." in error


def test_tuning_that_was_undone_is_said(brick: Brick, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brickformer.quant.tune.TRAVEL", 60.0)
    said = brick("quantize", tiny, "--bits", "4", "--calibrate", "3", "--tune", "4", "--out", ".")
    how = "Int4(), gptq on 3 batches, 4 steps of tuning undone: no better"
    assert said.code == 0 and said.out.startswith(f"{how}\n") and "tuned" not in said.out
    folder = Path(said.out.split("use it:  brick generate ")[1].split()[0])
    receipt = json.loads((folder / "receipt.json").read_text())
    assert receipt["method"] == how and not any(m["tuned"] for m in receipt["matrices"])
    assert (folder / "receipt.txt").read_text().startswith(f"{how}\n")
    assert f"quantized: {how}\n" in brick("explain", folder).out


def test_bad_plans(tiny: Path, tmp_path: Path) -> None:
    for plan, said in (
        (Plan(Int4(), tune=4), "tune: got 4 steps and no data to learn from. Set calibrate=N too."),
        (Plan(Int4(), -2), "calibrate: got -2, expected 0 batches or more."),
    ):
        with pytest.raises(RunError, match=said):
            quantize_run(tiny, plan, root=tmp_path)
    assert not any(tmp_path.iterdir())


def test_bad_requests_to_quantize(brick: Brick, tiny: Path) -> None:
    assert "has not 4 bits. Use int4 or nf4" in brick("quantize", tiny, "--bits", "4", "--kind", "int8").error
    assert "Leave --group out" in brick("quantize", tiny, "--bits", "8", "--group", "32").error
    assert "16, 32, 64, 128 or 256" in brick("quantize", tiny, "--bits", "4", "--group", "7").error
    assert "no such field" in brick("quantize", tiny, "--bits", "4", "--set", "grup=32").error
    assert "0 batches or more" in brick("quantize", tiny, "--bits", "4", "--calibrate", "-1").error
    for name in ("nothing", ""):
        error = brick("quantize", tiny, "--bits", "4", "--keep", name).error
        assert "no such module; known: decoder, encoder" in error and len(error) < 400 and "norm" not in error
    for name in ("worst", "worst:x", "worst:0"):
        assert (
            f"--keep {name}: expected a name, or worst:N"
            in brick("quantize", tiny, "--bits", "4", "--keep", name).error
        )
    assert "add --calibrate N, or leave it out" in brick("quantize", tiny, "--bits", "4", "--method", "awq").error
    assert "brick: --group: got 7" in brick("quantize", tiny, "--bits", "4", "--group", "7").error
    Path("file").touch()
    assert "file: is a file" in brick("quantize", tiny, "--bits", "4", "--out", "file/runs").error
    assert "no such run folder" in brick("quantize", "nowhere", "--bits", "4").error
    made = brick("quantize", tiny, "--bits", "4", "--set", "symmetric=false", "--group", "16", "--out", ".")
    assert made.code == 0 and "Int4(group=16, symmetric=False)" in made.out
    assert "quantized already" in brick("quantize", "reverse-int4-001", "--bits", "8").error
    assert 'brick generate reverse-int4-001 "TEXT"' in made.out
    Path("reverse-int4-001/receipt.json").write_text("{}")
    assert "\nquantized\n  23 × Int4(group=16" in brick("explain", "reverse-int4-001").out
    assert "is for use" in brick("train", "--resume", "reverse-int4-001").error
    path = Path("reverse-int4-001/weights.safetensors")
    path.write_bytes(path.read_bytes()[:-9])
    assert "broken" in brick("generate", "reverse-int4-001", "7 1 4").error


def test_onnx_writes_the_same(brick: Brick, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    assert f"Run: brick export {run} --to onnx" in brick("generate", run, "7 1 4", "--engine", "onnx").error
    answers = brick("generate", run, *ITEMS).out
    for more, bits in (([], "float32"), (["--bits", "8"], "int8"), (["--bits", "4"], "int4")):
        shutil.rmtree(run / "onnx", ignore_errors=True)
        said = brick("export", run, "--to", "onnx", *more)
        assert said.code == 0 and "the same best token in" in said.out and "decoder.onnx" in said.out
        if not more:
            assert float(said.out.split("largest gap ")[1].split()[0]) < 1e-4
        theirs = brick("generate", run, *ITEMS, "--engine", "onnx", "--stats")
        assert theirs.out == answers and "ms a token" in theirs.err
        assert f"weights in {bits}" in said.out and f"ONNX Runtime, weights in {bits}" in theirs.err
    drawn = ["--set", "temperature=2.0", "--set", "seed=3", "--samples", "3"]
    shutil.rmtree(run / "onnx")
    brick("export", run, "--to", "onnx")
    assert brick("generate", run, *ITEMS, *drawn, "--engine", "onnx").out == brick("generate", run, *ITEMS, *drawn).out
    said = brick("generate", run, "7 1 4", "7 x 4", "1 2 3", "--engine", "onnx")
    assert said.code == 2 and said.out == "4 1 7\n3 2 1\n" and "'7 x 4'" in said.err


def test_bad_requests_to_export(brick: Brick, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny, run)
    assert brick("export", run, "--to", "onnx").code == 0
    for option in (["--set", "width=2"], ["--stream"], ["--no-cache"], ["--cache", "int8"], ["--draft", "lookup"]):
        assert "exclude each other" in brick("generate", run, "7 1 4", "--engine", "onnx", *option).error
    before = contents(run)
    assert "onnx: is there already. Remove it first" in brick("export", run, "--to", "onnx", "--bits", "4").error
    assert contents(run) == before
    shutil.rmtree(run / "onnx")
    before = contents(run)
    with monkeypatch.context() as patch:
        patch.setattr("brickformer.recipes.onnx.write_json", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        assert "the disk is full" in brick("export", run, "--to", "onnx", "--bits", "4").error
    assert contents(run) == before
    assert brick("export", run, "--to", "onnx").code == 0
    file = run / "onnx" / "decoder.onnx"
    file.write_bytes(file.read_bytes()[:-100])
    assert "broken" in brick("generate", run, "7 1 4", "--engine", "onnx").error
    (run / "onnx" / "onnx.json").write_text("{}")
    assert "Export it again" in brick("generate", run, "7 1 4", "--engine", "onnx").error
    brick("quantize", run, "--bits", "4", "--kind", "nf4", "--out", ".")
    for said in (
        brick("export", "reverse-nf4-001", "--to", "onnx"),
        brick("generate", "reverse-nf4-001", "7 1 4", "--engine", "onnx"),
    ):
        assert "nf4 cannot be written" in said.error and "brick export RUN --to onnx --bits 4" in said.error
    brick("quantize", run, "--bits", "4", "--out", ".")
    assert "Leave --bits out" in brick("export", "reverse-int4-001", "--to", "onnx", "--bits", "8").error


def test_graphs_of_another_time(brick: Brick, tiny: Path, tmp_path: Path) -> None:
    """Altered, of a former version, or exported before the weights changed."""
    run = tmp_path / "run"
    shutil.copytree(tiny, run)
    assert brick("export", run, "--to", "onnx", "--bits", "4").code == 0
    assert brick("generate", run, "7 1 4", "--engine", "onnx").code == 0

    def answer() -> str:
        return brick("generate", run, "7 1 4", "--engine", "onnx").error

    decoder, facts = run / "onnx" / "decoder.onnx", run / "onnx" / "onnx.json"
    graph, said = decoder.read_bytes(), json.loads(facts.read_text())
    at = len(graph) // 2
    decoder.write_bytes(graph[:at] + bytes([graph[at] ^ 1]) + graph[at + 1 :])
    assert "onnx: altered: it is not what was exported. Export it again" in answer()
    decoder.write_bytes(graph)
    for changed in ({"max_len": 10**6}, {"weights": "int8"}, {"sum": "0"}):
        facts.write_text(json.dumps(said | changed))
        assert "altered" in answer()
    facts.write_text(json.dumps(said | {"format": 1}))
    assert "in format 1; this version reads 2. Export it again" in answer()
    facts.write_text(json.dumps(said))
    assert brick("generate", run, "7 1 4", "--engine", "onnx").code == 0
    assert brick("train", "--resume", run, "--set", "train.steps=5").code == 0
    assert f"was exported before the weights of {run} changed. Export it again" in answer()


def test_without_onnx_runtime(brick: Brick, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for package in ("onnx", "onnxruntime"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            assert 'pip install "brickformer[onnx]"' in brick("export", tiny, "--to", "onnx").error


def test_a_target_that_is_there_is_kept(brick: Brick, tiny: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("years of work")
    for target in (full, full / "thesis.txt", "."):
        before = contents(tmp_path)
        assert "is there already. Name a new folder." in brick("export", tiny, "--to", "onnx", target).error
        assert contents(tmp_path) == before
    assert brick("export", tiny, "--to", "onnx", tmp_path / "new").code == 0


def test_a_gap_in_full_precision_is_an_error(
    brick: Brick, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from brickformer.recipes.onnx import Gap

    for gap in (0.1, float("nan")):
        monkeypatch.setattr("brickformer.recipes.onnx.compare", lambda *_, gap=gap: Gap(gap, 5.0, 32, 32))
        assert "Please report this" in brick("export", tiny, "--to", "onnx", tmp_path / "new").error
        assert not (tmp_path / "new").exists()
    assert brick("export", tiny, "--to", "onnx", tmp_path / "new", "--bits", "4").code == 0


def test_a_quantized_run_has_no_other_form(brick: Brick, tiny: Path, tmp_path: Path) -> None:
    brick("quantize", tiny, "--bits", "4", "--out", tmp_path / "small")
    (run,) = (tmp_path / "small").iterdir()
    for form in ("hf", "gguf"):
        error = brick("export", run, "--to", form, tmp_path / "new").error
        assert "is quantized. Export the run that it was made from; gguf: --dtype q8_0 or q4_0." in error
    with pytest.raises(RunError, match="the model is quantized"):
        save(Trained.open(run), tmp_path / "new")
    assert not (tmp_path / "new").exists()
