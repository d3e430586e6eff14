"""Bad input, as a user gives it: one or two lines that say what, where and what to do; exit code 2; nothing is lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.conftest import TINY, Brick, contents

import brickformer.files
from brickformer.cli import main
from brickformer.errors import BrickError

GOOD = "one\tein\ntwo\tzwei\nthree\tdrei\n"
FILES = {
    "missing": (None, "no such file"),
    "empty": (b"", "empty"),
    "binary": (b"one\x00two\tthree\n" * 50, "NUL"),
    "not text": (b"\xff\xfe\xfd" * 300, "UTF-"),
    "one column": (GOOD.encode() + b"four\n", "line 4"),
    "three columns": (b"one\tein\tuno\n" + GOOD.encode(), "line 1"),
    "an empty side": (GOOD.encode() + b"four\t \n", "line 4"),
    "a folder": ("folder", "is a directory"),
}


@pytest.fixture(autouse=True)
def earlier(brick: Brick, tiny: Path) -> Callable[[], None]:
    """An earlier run beside the one that fails; afterwards it has to be there as it was, and nothing else."""
    shutil.copytree(tiny, "runs/reverse-001")
    before = contents(Path("runs"))
    yield lambda: None  # type: ignore[misc]
    assert contents(Path("runs")) == before


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("recipe", ["text", "pairs"])
def test_files_that_cannot_be_learnt(brick: Brick, recipe: str, name: str) -> None:
    content, says = FILES[name]
    if recipe == "text" and ("column" in name or "side" in name):
        says = "expected at least"  # a text all right, but too short
    if content == "folder":
        Path("data.tsv").mkdir()
    elif isinstance(content, bytes):
        Path("data.tsv").write_bytes(content)
    error = brick("train", recipe, "--data", "data.tsv").error
    assert "data.tsv" in error and says in error


def test_data_that_is_not_named_or_not_wanted(brick: Brick) -> None:
    assert "--data FILE" in brick("train", "text").error
    assert "source TAB target" in brick("train", "pairs").error
    assert "makes its own data" in brick("train", "reverse", "--data", "x").error
    assert "did you mean 'reverse'?" in brick("train", "revers").error
    assert "no recipe" in brick("train").error


def test_an_unseen_character(brick: Brick) -> None:
    """A word for the digits, a character for a text: named, with its place and what is known."""
    assert "word 3: got 'x'" in brick("generate", "runs/reverse-001", "7 1 x").error
    assert "'0 1 2 3 4 5 6 7 8 9'" in brick("generate", "runs/reverse-001", "7 1 x").error
    assert "did you mean" in brick("generate", "runs/reverse-002", "7 1 4").error


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["model.*.layers.*.mixer.heads=3"], "heads: got 3, expected a divisor of dim=128"),
        (["model.*.layers.*.mixer.kv_heads=3"], "kv_heads: got 3, expected a divisor of heads=4"),
        (["model.*.layers.*.mixer.head_dim=5", "model.*.layers.*.mixer.position=rope"], "expected an even one"),
        (["model.*.dim=9", "model.*.layers.*.mixer.heads=3", "model.decoder.layers.*.cross.heads=3"], "even"),
        (["model.decoder.layers.0.mixer.mask.causal=false"], "sees the future"),
        (["model.encoder.dim=64"], "expected one width for both"),
        (["model.decoder.vocab=5"], "the vocabularies differ"),
        (["model.shared=false", "model.decoder.vocab=5"], "expected at least 13"),
        (["model.encoder.embed.position.max_len=3"], "Sinusoid"),
        (["task.valid=9999999"], "expected at most"),
        (["train.steps=0"], "--set train.steps: got 0"),
        (["train.optim.lr=fast"], "lr: got 'fast' (str), expected float"),
        (["train.stpes=4"], "did you mean 'steps'?"),
        (["trian.steps=4"], "did you mean 'train'?"),
        (["model.decoder.layers.0.mixer.postion=rope"], "did you mean 'position'?"),
        (["model.decoder.layers.0.mixer.position=rop"], "did you mean 'rope'?"),
        (["model.decoder.layers.5.place=post"], "a number from 0 to 1"),
        (["train.steps"], "expected path=value"),
        (["seed=-1"], "0 or more"),
        (["seed=18446744073709551616"], "below 2 to the power of 63"),
    ],
)
def test_settings_that_cannot_be(brick: Brick, settings: list[str], says: str) -> None:
    args = [part for setting in settings for part in ("--set", setting)]
    assert says in brick("train", "reverse", *args).error


def test_a_bad_name_for_a_run(brick: Brick) -> None:
    for name in ("../up", "诗"):
        said = brick("train", "reverse", *TINY, "--name", name)
        assert "run name" in said.error and "ASCII letters" in said.error and not said.out


@pytest.mark.parametrize("name", ["spec.json", "run.json", "tokenizer.json", "weights.safetensors"])
@pytest.mark.parametrize("harm", ["gone", "cut", "empty"])
def test_a_run_folder_cut_off_in_the_middle(brick: Brick, name: str, harm: str) -> None:
    """Every file it needs, missing, cut in half or empty: the file is named, by every verb that reads it."""
    shutil.copytree("runs/reverse-001", "copy")
    file = Path("copy") / name
    data = file.read_bytes()
    file.unlink() if harm == "gone" else file.write_bytes(data[: len(data) // 2] if harm == "cut" else b"")
    assert name in brick("generate", "copy", "7 1 4").error
    if name in ("spec.json", "run.json"):
        assert name in brick("show", "copy").error if name == "spec.json" or harm == "gone" else True


@pytest.mark.parametrize("text", [b"[" * 50_000, b'{"run": 5, "data": 5}', b"\xff"], ids=["deep", "other", "not text"])
@pytest.mark.parametrize("name", ["spec.json", "run.json", "tokenizer.json"])
def test_a_run_folder_with_other_things_in_it(brick: Brick, name: str, text: bytes) -> None:
    shutil.copytree("runs/reverse-001", "copy")
    (Path("copy") / name).write_bytes(text)
    assert name in brick("generate", "copy", "7 1 4").error
    Path("deep.json").write_text("[" * 50_000)
    Path("deep.yaml").write_text("[" * 50_000)
    assert "nested too deeply" in brick("show", "deep.json").error
    assert "nested too deeply" in brick("show", "deep.yaml").error


def test_the_home_of_nobody(brick: Brick) -> None:
    """`~name` with no such name: a path like any other, and there is nothing."""
    assert "~no-such-name" in brick("generate", "~no-such-name/run", "7 1 4").error
    assert "~no-such-name" in brick("show", "~no-such-name/run").error
    assert "~no-such-name" in brick("list", "--use", "~no-such-name/bricks.py").error


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("train.optim=adamw", "saved with another optimizer"),
        ("model.*.dim=24", "does not fit"),
        ("name=other", "goes on with its own"),
        ("seed=7", "goes on with its own"),
    ],
)
def test_going_on_with_what_does_not_fit_changes_nothing(brick: Brick, setting: str, says: str) -> None:
    """Refused after run.json was written, the run could never go on again."""
    before = contents(Path("runs"))
    assert says in brick("train", "--resume", "runs/reverse-001", "--steps", "9", "--set", setting).error
    assert contents(Path("runs")) == before


def test_a_model_changed_on_the_way_is_kept(brick: Brick) -> None:
    """What fits the weights may be changed, and then the folder says so."""
    shutil.copytree("runs/reverse-001", "copy")
    assert brick("train", "--resume", "copy", "--steps", "4", "--set", "model.*.layers.*.dropout=0.25").code == 0
    assert Path("copy/spec.json").read_text().count('"dropout": 0.25') == 4


def test_a_run_that_cannot_go_on(brick: Brick) -> None:
    shutil.copytree("runs/reverse-001", "copy")
    Path("copy/state.safetensors").unlink()
    assert "state.safetensors" in brick("train", "--resume", "copy", "--steps", "9").error
    assert "no such run folder" in brick("train", "--resume", "nowhere").error
    Path("bare").mkdir()
    assert "not a run folder" in brick("generate", "bare", "1 2 3").error


def test_a_run_with_a_brick_that_is_not_there(brick: Brick) -> None:
    shutil.copytree("runs/reverse-001", "copy")
    spec = Path("copy/spec.json")
    spec.write_text(spec.read_text().replace('"kind": "mlp"', '"kind": "mine"'))
    for verb in (["generate", "copy", "1 2 3"], ["show", "copy"]):
        error = brick(*verb).error
        assert "got 'mine'" in error and ". A brick of your own? Name its file: --use FILE.py" in error


@pytest.mark.parametrize("after", [0, 1, 4, 6])
def test_a_disk_that_fills_up(brick: Brick, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """After some files have been written, the next does not fit."""
    sync, files = os.fsync, [0]

    def full(file: int) -> None:
        files[0] += 1
        if files[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(brickformer.files.os, "fsync", full)
        error = brick("train", "reverse", *TINY, "--name", "full").err
    assert "the disk is full. Free some space" in error and "Traceback" not in error
    assert error.strip().splitlines()[-1].startswith("brick: ")
    made = list(Path("runs").glob("full-*"))
    for folder in made:  # what was written before is whole or not there
        assert not list(folder.glob(".*.part"))
        shutil.rmtree(folder)


def test_a_folder_without_permission(brick: Brick, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "no permission to write" in brick("train", "reverse", *TINY, "--out", "locked").error


def test_a_file_where_folders_are_to_be(brick: Brick) -> None:
    """Told before anything is built, read or said."""
    Path("README.md").touch()
    for place in ("README.md", "README.md/runs"):
        said = brick("train", "reverse", *TINY, "--out", place)
        assert "README.md: is a file" in said.error and not said.out
        assert "README.md: is a file" in brick("import", "nowhere", "--out", place).error


def test_options_are_named_as_they_were_written(brick: Brick) -> None:
    assert brick("train", "reverse", "--steps", "0").error == "brick: --steps: got 0, expected at least 1.\n"
    assert brick("train", "reverse", "--seed", "-1").error == "brick: --seed: got -1, expected at least 0.\n"
    assert brick("list", "mixr").error.startswith("brick: list mixr: no such")


def test_a_file_of_items_that_is_not_there(brick: Brick) -> None:
    """A text, since it may be one; but that no file has this name is said, and a word is just a word."""
    for verb in ("generate", "score"):
        assert "items.txt: no such file, so it is taken as a text" in brick(verb, "runs/reverse-001", "items.txt").error
    assert "no such file" not in brick("generate", "runs/reverse-001", "x").error
    error = brick("generate", "runs/reverse-001", "x", "--stats").err
    assert "0 tokens/s" not in error and "nothing was read" in error


def test_debug_shows_the_traceback(brick: Brick) -> None:
    with pytest.raises(BrickError, match="did you mean"):
        main(["train", "revers", "--debug"])


def test_a_mistyped_option_is_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "reverse", "--stesp", "3"])
    assert stop.value.code == 2 and "--stesp" in capsys.readouterr().err


def test_weights_of_another_model(brick: Brick, tiny: Path) -> None:
    """A spec that was edited after the run: the first tensor that differs is named."""
    shutil.copytree(tiny, "copy")
    spec = Path("copy/spec.json")
    spec.write_text(spec.read_text().replace('"hidden": 16', '"hidden": 24'))
    error = brick("generate", "copy", "1 2 3").error
    assert "weights.safetensors" in error and "does not fit" in error and "(16, 16)" in error
