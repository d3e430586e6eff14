"""Runs that stop in the middle: Ctrl-C, a crash, a number that is not finite, a full disk; and how they go on."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train.toys import Ears, Toy, ToyBatch, forward, ragged

from brickformer.errors import RunError
from brickformer.train import AdamW, Cosine, Metrics, Muon, RunFolder, Training, fit, loop
from brickformer.train.checkpoint import load_into

BASE = Training(
    steps=14, batch=4, optim=AdamW(lr=0.01), schedule=Cosine(warmup=3), log_every=4, validate_every=6, save_minutes=1e9
)
VARIANTS = {
    "adamw": BASE,
    "muon": BASE.but(optim=Muon()),
    "accumulate": BASE.but(accumulate=3),
    "ema": BASE.but(ema=0.9, optim=Muon(momentum=0.9)),
}


class CrashError(Exception):
    """What stops a run without giving it time for anything."""


def folder(root: Path) -> RunFolder:
    return RunFolder.create(root, "toy", spec={"kind": "toy"}, run={})


def toy() -> Toy:
    """A new model; making it also seeds torch's random numbers, which dropout draws from."""
    return Toy(dropout=0.3, tied=True)


def evaluate(model: nn.Module) -> Mapping[str, float]:
    """A number of the weights, and one of the random numbers, which must not matter to training."""
    torch.rand(3)
    return {"val_loss": float(sum(p.double().abs().sum() for p in model.parameters()))}


def stopping(at: int, how: Callable[[], None]) -> Callable[[int, int], ToyBatch]:
    """Batches that do something just before number `at` is given."""

    def batches(index: int, rows: int) -> ToyBatch:
        if index == at:
            how()
        return ragged(index, rows)

    return batches


def crash() -> None:
    raise CrashError


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signal handlers are what they were, after every test."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("NOT TESTED: signals need the main thread")
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def left_behind(run: RunFolder) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, float]]]:
    """(weights, state, metrics without the speed)."""
    records = [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in Metrics(run.metrics).read()]
    return run.weights()[0], run.state()[0], records


def assert_same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


@pytest.mark.parametrize("stop", [1, 4, 6, 7, 13])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_interrupted_run_ends_with_the_bits_of_one_that_was_not(tmp_path: Path, variant: str, stop: int) -> None:
    settings = VARIANTS[variant]
    whole, cut = folder(tmp_path), folder(tmp_path)
    model = toy()
    fit(model, settings, ragged, forward, evaluate=evaluate, run=whole)

    batches = stopping((stop - 1) * settings.accumulate, press_ctrl_c)
    first = fit(toy(), settings, batches, forward, evaluate=evaluate, run=cut)
    assert (first.step, first.finished) == (stop, False)
    other = Toy(dropout=0.3, tied=True, seed=99)  # which also leaves the random numbers in another state
    second = fit(other, settings, ragged, forward, evaluate=evaluate, run=cut, resume=True)
    assert (second.step, second.finished) == (14, True)

    for a, b in zip(left_behind(whole), left_behind(cut), strict=True):
        if isinstance(a, dict):
            assert_same_bits(a, b)
        else:
            assert a == b
    assert_same_bits(model.state_dict(), other.state_dict())


def test_dropout_matters_to_the_test_above(tmp_path: Path) -> None:
    """Another seed gives other weights: were the random numbers not restored, the bits would differ."""
    results = []
    for seed in (7, 8):
        model = toy()
        torch.manual_seed(seed)
        fit(model, BASE, ragged, forward)
        results.append(model.out.weight.detach())
    assert not torch.equal(*results)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_crashed_run_goes_on_from_its_last_save(tmp_path: Path, variant: str) -> None:
    """Killed without warning after metrics that are newer than the save: they are said again, once."""
    settings = VARIANTS[variant]
    whole, cut = folder(tmp_path), folder(tmp_path)
    fit(toy(), settings, ragged, forward, evaluate=evaluate, run=whole)
    saved_at = 5
    save = loop._Job.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Job, "save", lambda job, step: save(job, step) if step <= saved_at else None)
        with pytest.raises(CrashError):
            now_and_then = settings.but(save_minutes=0.0)
            fit(toy(), now_and_then, stopping(10 * settings.accumulate, crash), forward, evaluate=evaluate, run=cut)
    assert [r["step"] for r in Metrics(cut.metrics).read()] == [4, 6, 8]
    assert cut.state()[1] == cut.weights()[1] == saved_at
    fit(Toy(dropout=0.3, tied=True, seed=99), settings, ragged, forward, evaluate=evaluate, run=cut, resume=True)
    for a, b in zip(left_behind(whole), left_behind(cut), strict=True):
        if isinstance(a, dict):
            assert_same_bits(a, b)
        else:
            assert a == b


def test_a_crash_between_the_two_files_of_a_save_is_harmless(tmp_path: Path) -> None:
    whole, cut = folder(tmp_path), folder(tmp_path)
    fit(toy(), BASE, ragged, forward, run=whole)
    save = RunFolder.save_weights
    with pytest.MonkeyPatch.context() as patch:

        def crashing(run: RunFolder, tensors: Mapping[str, Tensor], step: int) -> None:
            if step == 6:
                crash()
            save(run, tensors, step)

        patch.setattr(RunFolder, "save_weights", crashing)
        with pytest.raises(CrashError):
            fit(toy(), BASE.but(save_minutes=0.0), ragged, forward, run=cut)
    assert (cut.weights()[1], cut.state()[1]) == (5, 6)
    fit(toy(), BASE, ragged, forward, run=cut, resume=True)
    assert_same_bits(left_behind(whole)[0], left_behind(cut)[0])


# ---- Ctrl-C


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    run, ears, model = folder(tmp_path), Ears(), toy()
    batches = stopping(4, lambda: signal.raise_signal(number))
    result = fit(model, BASE, batches, forward, run=run, progress=ears)
    assert (result.step, result.finished) == (5, False)
    assert ears.said == [
        f"Stopped after step 5 of 14; saved in {run.path}.",
    ]
    weights, step = run.weights()
    assert step == 5
    assert_same_bits(weights, model.state_dict())
    assert run.picture.exists()


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    run = folder(tmp_path)

    def twice() -> None:
        press_ctrl_c()
        press_ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        fit(toy(), BASE, stopping(4, twice), forward, run=run)
    assert run.weights()[1] == 0


def test_other_threads_can_train_too() -> None:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(fit(toy(), BASE, ragged, forward).step))
    thread.start()
    thread.join()
    assert results == [14]


# ---- numbers that are not finite


def bad_logits(at: int, value: float) -> Callable[[nn.Module, ToyBatch], Tensor]:
    """The `at`-th batch (from 0) gives a loss of `value`."""
    seen = iter(range(10**9))

    def poisoned(model: nn.Module, batch: ToyBatch) -> Tensor:
        logits = forward(model, batch)
        return logits * value if next(seen) == at else logits

    return poisoned


def bad_gradient(at: int) -> Callable[[nn.Module, ToyBatch], Tensor]:
    """The loss is finite, its gradient is not: the slope of a square root at 0."""
    seen = iter(range(10**9))

    def poisoned(model: nn.Module, batch: ToyBatch) -> Tensor:
        logits = forward(model, batch)
        return logits + (logits * 0).sqrt() if next(seen) == at else logits

    return poisoned


@pytest.mark.parametrize(
    ("changes", "make", "says"),
    [
        ({}, lambda: bad_logits(6, float("nan")), "step 7, batch 6: the loss is nan"),
        ({}, lambda: bad_logits(0, float("nan")), "step 1, batch 0: the loss is nan"),
        ({"accumulate": 3}, lambda: bad_logits(19, float("nan")), "step 7, batch 19: the loss is nan"),
        ({}, lambda: bad_gradient(6), "step 7, batch 6: the norm of the gradient is nan"),
        ({"accumulate": 3}, lambda: bad_gradient(19), "step 7, batches 18 to 20: the norm of the gradient is nan"),
        ({"clip": None}, lambda: bad_gradient(6), "step 7, batch 6: the norm of the gradient is nan"),
        ({"ema": 0.9}, lambda: bad_logits(6, float("nan")), "step 7, batch 6: the loss is nan"),
        ({"optim": Muon()}, lambda: bad_gradient(6), "step 7, batch 6"),
    ],
)
def test_a_bad_number_stops_the_run_before_it_is_applied(
    tmp_path: Path, changes: dict[str, Any], make: Callable[[], Callable[[nn.Module, ToyBatch], Tensor]], says: str
) -> None:
    settings = BASE.but(**changes)
    run, model = folder(tmp_path), toy()
    with pytest.raises(RunError, match=says) as info:
        fit(model, settings, ragged, make(), run=run)
    step = int(says.split()[1].strip(",")) - 1
    assert f"The weights after step {step} are kept in {run.path}. Lower" in str(info.value)
    assert len(str(info.value).splitlines()) <= 2

    clean, reference = folder(tmp_path), toy()
    if step:
        fit(reference, settings, stopping((step - 1) * settings.accumulate, press_ctrl_c), forward, run=clean)
    else:
        clean.save_weights(reference.state_dict(), 0)
    saved, at = run.weights()
    assert at == step
    assert_same_bits(saved, clean.weights()[0])
    assert all(t.isfinite().all() for t in run.state()[0].values() if t.is_floating_point())
    if step:
        again = fit(toy(), settings, ragged, forward, run=run, resume=True)
        assert again.finished


@pytest.mark.parametrize(
    ("changes", "make", "says"),
    [
        ({}, lambda: bad_logits(6, float("nan")), "step 7, batch 6: loss or gradient not finite"),
        ({"accumulate": 3}, lambda: bad_gradient(19), "step 7, batches 18 to 20: loss or gradient not finite"),
    ],
)
def test_where_reading_is_dear_the_step_is_named_later_but_rightly(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    make: Callable[[], Callable[[nn.Module, ToyBatch], Tensor]],
    says: str,
) -> None:
    """As on a GPU: noticed at the next logging step (8), the last save (5) is what is kept, and it is a good one."""
    settings = BASE.but(**changes)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_is_read_freely", lambda device: False)
        save = loop._Job.save
        patch.setattr(loop._Job, "save", lambda job, step: save(job, step) if step in (0, 5) else None)
        run, done = folder(tmp_path), []

        def count(index: int, rows: int) -> ToyBatch:
            done.append(index)
            return ragged(index, rows)

        with pytest.raises(RunError, match=says) as info:
            fit(toy(), settings.but(save_minutes=0.0), count, make(), run=run)
        assert len(done) == 8 * settings.accumulate
    assert f"The weights after step 5 are kept in {run.path}." in str(info.value)
    assert run.weights()[1] == run.state()[1] == 5
    assert all(t.isfinite().all() for t in run.weights()[0].values())


def test_spoilt_weights_are_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save between the bad step and the next logging step reads what the device noted, too."""
    monkeypatch.setattr(loop, "_is_read_freely", lambda device: False)
    run = folder(tmp_path)
    with pytest.raises(RunError, match="step 2, batch 1.*after step 1 are kept"):
        fit(toy(), BASE.but(save_minutes=0.0), ragged, bad_logits(1, float("nan")), run=run)
    assert run.weights()[1] == run.state()[1] == 1
    assert all(t.isfinite().all() for t in run.weights()[0].values())


def test_reading_later_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    a = toy()
    fit(a, BASE, ragged, forward)
    b = toy()
    monkeypatch.setattr(loop, "_is_read_freely", lambda device: False)
    result = fit(b, BASE, ragged, forward)
    assert_same_bits(a.state_dict(), b.state_dict())
    assert result.finished


def test_without_a_folder_the_error_promises_nothing() -> None:
    with pytest.raises(RunError, match=r"step 3, batch 2: the loss is nan\. Lower optim\.lr"):
        fit(toy(), BASE, ragged, bad_logits(2, float("nan")))


# ---- disks and folders


def test_a_disk_that_fills_up_leaves_the_last_save_and_earlier_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = folder(tmp_path)
    fit(toy(), BASE, ragged, forward, run=earlier)
    before = {p.name: p.read_bytes() for p in earlier.path.iterdir()}
    run = folder(tmp_path)
    sync = os.fsync

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:

        def batches(index: int, rows: int) -> ToyBatch:
            patch.setattr(os, "fsync", sync if index < 9 else full)
            return ragged(index, rows)

        with pytest.raises(RunError, match=r"state.safetensors: cannot be written: the disk is full") as info:
            fit(toy(), BASE.but(save_minutes=0.0), batches, forward, run=run)
    assert len(str(info.value).splitlines()) <= 2
    assert run.weights()[1] == run.state()[1] == 9
    assert not [p.name for p in run.path.iterdir() if p.name.startswith(".")]
    assert {p.name: p.read_bytes() for p in earlier.path.iterdir()} == before
    fit(toy(), BASE, ragged, forward, run=run, resume=True)
    assert run.weights()[1] == 14


def test_a_full_disk_shows_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder(tmp_path)

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="disk is full"):
        fit(toy(), BASE, stopping(0, crash), forward, run=run)


def test_a_finished_run_is_not_resumed_unless_there_is_more_to_do(tmp_path: Path) -> None:
    run = folder(tmp_path)
    fit(toy(), BASE, ragged, forward, run=run)
    with pytest.raises(RunError, match="finished: 14 of 14 steps are done. Raise the steps"):
        fit(toy(), BASE, ragged, forward, run=run, resume=True)
    longer = fit(toy(), BASE.but(steps=16), ragged, forward, run=run, resume=True)
    assert (longer.step, longer.finished) == (16, True)
    assert [r["step"] for r in Metrics(run.metrics).read()] == [4, 6, 8, 12, 14, 16]


def test_a_state_that_is_missing_broken_or_of_something_else_is_named(tmp_path: Path) -> None:
    run = folder(tmp_path)
    fit(toy(), BASE, stopping(4, press_ctrl_c), forward, run=run)
    path = run.path / "state.safetensors"
    whole = path.read_bytes()

    def resume(settings: Training = BASE, model: nn.Module | None = None) -> None:
        fit(model or toy(), settings, ragged, forward, run=run, resume=True)

    with pytest.raises(RunError, match="state.safetensors does not fit the model"):
        resume(model=Toy(dim=4, tied=True))
    with pytest.raises(RunError, match="saved with another optimizer"):
        resume(BASE.but(optim=Muon()))
    with pytest.raises(RunError, match="not this model's"):
        resume(BASE.but(ema=0.9))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match="state.safetensors: broken"):
        resume()
    run.save_state({"model.x": torch.zeros(1)}, 3)
    with pytest.raises(RunError, match="no tensor 'log.total'"):
        resume()
    path.unlink()
    with pytest.raises(RunError, match="state.safetensors: missing"):
        resume()


def test_a_state_is_enough_to_load_a_model_from(tmp_path: Path) -> None:
    """With an average on, the state keeps the weights themselves beside it."""
    run = folder(tmp_path)
    fit(toy(), BASE.but(ema=0.9), ragged, forward, run=run)
    plain = toy()
    tensors = run.state()[0]
    load_into(plain, {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}, "x")
    averaged = {name.removeprefix("average."): t for name, t in tensors.items() if name.startswith("average.")}
    assert_same_bits({name: run.weights()[0][name] for name in averaged}, averaged)
    assert not torch.equal(plain.out.weight, averaged["embed.weight"])
