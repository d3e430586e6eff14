"""`brick train`: the main job, other data, stopping and going on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import TINY, Brick, contents

from brickformer.cli.train import compared
from brickformer.files import read_tensors
from brickformer.recipes import RECIPES, Run, Session, Trained, reverse
from brickformer.recipes.examples import Example
from brickformer.tasks import Reverse
from brickformer.train import Metrics, RunFolder, checkpoint

SONNET = "Shall I compare thee to a summer's day? Thou art more lovely and more temperate.\n" * 12
NARROW = "--set model.dim=32 --set task.context=16".split()
SMALL = "--steps 2 --set train.batch=2 --set train.validate_every=2".split()


def same_weights(one: str, other: str) -> bool:
    """Whether two runs hold the same numbers, bit for bit. (The order of a safetensors header may differ.)"""
    (a, step), (b, other_step) = (RunFolder.open(Path(path)).weights() for path in (one, other))
    return step == other_step and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_default_recipe_reverses_sequences_it_has_never_seen(trained: Path) -> None:
    """All 500 of them, answered anew by the saved run, end included; and its own metrics say the same."""
    run = Trained.open(trained)
    data = Reverse().prepare(run.run.seed)
    pairs = data.examples(whole=True)
    assert len(pairs) == 500
    results = run.generate([source for source, _ in pairs]).results
    exact = [r.text == expected and r.finish == "stop" for r, (_, expected) in zip(results, pairs, strict=True)]
    assert sum(exact) >= 0.99 * len(pairs)
    assert all(expected == " ".join(source.split()[::-1]) for source, expected in pairs)
    last = Metrics(trained / "metrics.jsonl").read()[-1]
    assert last["exact"] == sum(exact) / len(pairs)
    assert last["loss"] < 0.1


def test_the_run_folder_holds_what_is_needed_to_use_it(trained: Path) -> None:
    assert {p.name for p in trained.iterdir()} == {
        "spec.json",
        "run.json",
        "weights.safetensors",
        "state.safetensors",
        "tokenizer.json",
        "metrics.jsonl",
        "loss.png",
    }
    asked = json.loads((trained / "run.json").read_text())["run"]
    run = Run.from_json(json.dumps(asked))
    assert (run.task, run.train, run.name) == (reverse().task, reverse().train, "reverse")
    assert asked["model"] == json.loads((trained / "spec.json").read_text())
    assert asked["model"]["decoder"]["vocab"] == 13, "the vocabulary is that of the data"
    assert (trained / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_it_says_what_it_will_do_and_what_it_did(brick: Brick) -> None:
    said = brick("train", "reverse", *TINY)
    assert said.code == 0
    plan, end = said.out.split("\n\n")[0], said.out.split("\n\n")[1:]
    for part in ("reverse sequences of 3 to 6 digits", "20 training and 5", "D 16, 2 + 2 layers", "3 steps of 4 rows"):
        assert part in " ".join(plan.split()), part
    count = sum(p.numel() for p in Trained.open("runs/reverse-001").model.parameters())
    assert f"{count:,} parameters" in plan
    assert "of 5 unseen sequences; 3 steps in" in " ".join(end[0].split())
    samples = end[1].splitlines()
    assert len(samples) == 5 and all("→" in line and ("right" in line or "expected" in line) for line in samples)
    assert "saved in runs/reverse-001" in said.out
    assert said.out.rstrip().splitlines()[-1].startswith("use it:  brick generate runs/reverse-001 ")
    assert "step 3/3 · loss" in said.err
    assert max(map(len, said.out.splitlines())) <= 80


def test_a_second_run_gets_a_folder_of_its_own(brick: Brick) -> None:
    brick("train", "reverse", *TINY)
    before = contents(Path("runs"))
    said = brick("train", "reverse", *TINY, "--seed", "3")
    assert "saved in runs/reverse-002" in said.out
    after = contents(Path("runs"))
    assert {name: data for name, data in after.items() if name.startswith("reverse-001")} == before
    assert not same_weights("runs/reverse-002", "runs/reverse-001"), "another seed"
    brick("train", "reverse", *TINY, "--name", "mine", "--out", "elsewhere")
    assert Path("elsewhere/mine-001").is_dir()
    assert same_weights("elsewhere/mine-001", "runs/reverse-001"), "the same seed gives the same weights"


def test_text_learns_any_file_and_goes_on_with_it(brick: Brick) -> None:
    Path("poem.txt").write_text(SONNET)
    said = brick("train", "text", "--data", "poem.txt", *SMALL, *NARROW)
    assert said.code == 0 and "decoder, D 32, 6 layers" in said.out and "exact" not in said.out
    assert "a sample; its first 8 characters are given" in said.out
    more = brick("generate", "runs/text-001", "Shall I", "--set", "max_tokens=12")
    assert more.out.startswith("Shall I") and len(more.out) == len("Shall I") + 12 + 1


def test_pairs_learns_any_two_columns(brick: Brick) -> None:
    words = "sun moon star tree bird".split()
    rows = {" ".join(random.Random(i).choices(words, k=3)) for i in range(60)}
    Path("pairs.tsv").write_text("".join(f"{row}\t{row.upper()}\n" for row in sorted(rows)))
    said = brick("train", "pairs", "--data", "pairs.tsv", *SMALL, "--set", "task.level=word", "--set", "model.*.dim=16")
    assert said.code == 0 and "encoder_decoder, D 16" in said.out and "exact match" in said.out
    assert brick("generate", "runs/pairs-001", "sun moon").code == 0


def test_set_reaches_task_model_and_train(brick: Brick) -> None:
    brick("train", "reverse", *TINY, "--set", "task=sort", "--set", "task.valid=5", "--set", "train.optim=adamw",
          "--set", "train.optim.lr=0.5", "--set", "model.*.layers.1.mixer.heads=2")  # fmt: skip
    run = Trained.open("runs/reverse-001").run
    assert run.task.kind == "sort"
    assert run.train.optim.to_dict() == {**run.train.optim.to_dict(), "kind": "adamw", "lr": 0.5}
    layers = run.model.to_dict()["decoder"]["layers"]
    assert [layer["mixer"]["heads"] for layer in layers] == [4, 2]


def test_steps_fewer_than_the_warm_up_shorten_it(brick: Brick) -> None:
    assert reverse().train.schedule.warmup > 3
    brick("train", "reverse", *TINY)
    train = Trained.open("runs/reverse-001").run.train
    assert train.steps == train.schedule.warmup == 3


def test_a_resumed_run_is_the_run_that_was_never_stopped(brick: Brick) -> None:
    """Four steps at once, and the same four with a stop after two: the same weights, bit for bit."""
    base = [*TINY[2:], "--set", "train.schedule=constant", "--set", "model.*.layers.*.dropout=0.1"]
    brick("train", "reverse", "--steps", "4", *base)
    brick("train", "reverse", "--steps", "2", *base)
    said = brick("train", "--resume", "runs/reverse-002", "--steps", "4")
    assert said.code == 0 and "4 steps of 4 rows" in said.out
    one, two = contents(Path("runs/reverse-001")), contents(Path("runs/reverse-002"))
    assert same_weights("runs/reverse-001", "runs/reverse-002")
    assert one["run.json"] == two["run.json"]
    assert [r["step"] for r in Metrics(Path("runs/reverse-002/metrics.jsonl")).read()][-1] == 4


def test_a_finished_run_stays_as_it_is(brick: Brick, tiny: Path) -> None:
    before = contents(tiny)
    said = brick("train", "--resume", tiny)
    assert "finished" in said.error and f"brick train --resume {tiny} --steps N" in said.error and not said.out
    assert "3 steps are done" in brick("train", "--resume", tiny, "--steps", "2").error
    for option in ("--data", "--seed", "--name", "--out"):
        assert f"the run has its own {option[2:]}" in brick("train", "--resume", tiny, option, "7").error
    assert contents(tiny) == before


def test_the_saved_state_is_read_once(brick: Brick, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as large as the model, its gradients' moments and its average: a refusal reads nothing of it."""
    brick("train", "reverse", *TINY)
    seen: list[str] = []

    def read(path: Path) -> Any:
        seen.append(path.name)
        return read_tensors(path)

    monkeypatch.setattr(checkpoint, "read_tensors", read)
    assert "finished: 3 steps are done" in brick("train", "--resume", "runs/reverse-001").error
    assert seen == []
    assert brick("train", "--resume", "runs/reverse-001", "--steps", "4").code == 0
    assert seen == ["state.safetensors"]


def test_a_run_whose_data_changed_is_not_resumed(brick: Brick) -> None:
    Path("poem.txt").write_text(SONNET)
    brick("train", "text", "--data", "poem.txt", *SMALL, *NARROW)
    Path("poem.txt").write_text(SONNET.replace("Thou", "Thee"))
    assert "has changed since the run began" in brick("train", "--resume", "runs/text-001", "--steps", "4").error


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path, root: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; from brickformer.cli import main; sys.exit(main())",
        "train",
        "reverse",
    ]
    command += ["--steps", "100000", *TINY[2:], "--set", "train.validate_every=100000"]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=env,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
    ) as run:
        metrics = tmp_path / "runs/reverse-001/metrics.jsonl"
        while not metrics.exists():  # it trains
            assert run.poll() is None, run.communicate()
        run.send_signal(signal.SIGINT)
        try:
            _, err = run.communicate(timeout=120)
        finally:
            run.kill()
    assert run.returncode == 130, err
    assert "Go on with: brick train --resume runs/reverse-001" in err and "Traceback" not in err
    step = Trained.open(tmp_path / "runs/reverse-001").step
    assert f"Stopped after step {step} of 100000" in err and step > 0


def test_a_session_in_python_is_the_command(tmp_path: Path) -> None:
    run = reverse().but(**{"task.train": 20, "task.valid": 5, "train.steps": 12, "train.batch": 4})
    session = Session.new(run)
    session.create_folder(tmp_path)
    result = session.fit()
    assert result.finished and result.step == 12
    assert len(session.examples(3)) == 3
    assert Trained.open(tmp_path / "reverse-001").answer(["1 2 3"]) == session.trained.answer(["1 2 3"])


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_reads_itself_back(name: str) -> None:
    run = RECIPES[name](**({} if name == "reverse" else {"data": "f.txt"}))
    assert Run.from_json(run.to_json()) == run and run.name == name


def test_long_samples_are_blocks() -> None:
    """Neither wrapped in the middle nor wider than the terminal."""
    short = compared([Example("a", "b", "b", True), Example("aa", "c", "d", False)], 80)
    assert short == ["  a   →  b  right", "  aa  →  c  expected d"]
    long = compared([Example("s" * 90, "t" * 20, "u" * 20, False)], 80)
    assert [len(line) for line in long] == [80, 24, 33] and long[1] == "  → " + "t" * 20
