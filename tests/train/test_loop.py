"""The loop against one written out with torch's own parts; accumulation, validation, averages, metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train.toys import PADDING, Ears, Toy, ToyBatch, forward, ragged

from brickformer.errors import RunError, SpecError
from brickformer.spec import read
from brickformer.train import (
    AdamW,
    Constant,
    Cosine,
    Metrics,
    Muon,
    OptimSpec,
    RunFolder,
    Training,
    fit,
    mean_loss,
)
from brickformer.train.loop import clip_gradients

PLAIN = Training(steps=12, batch=4, optim=AdamW(lr=0.01), schedule=Cosine(warmup=3), clip=0.5, log_every=5)


def folder(root: Path) -> RunFolder:
    return RunFolder.create(root, "toy", spec={"kind": "toy"}, run={})


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def by_hand(model: nn.Module, settings: Training, size: int = 1) -> tuple[list[float], list[float]]:
    """The same training with torch's AdamW, mean loss and clipping, `size` micro-batches as one: (losses, norms)."""
    assert isinstance(settings.optim, AdamW)
    hidden = ("up.weight", "down.weight", "out.weight")
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if n in hidden],
            "weight_decay": settings.optim.weight_decay,
        },
        {"params": [p for n, p in model.named_parameters() if n not in hidden], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=settings.optim.lr, betas=settings.optim.betas, foreach=False, fused=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda s: settings.schedule.factor(s + 1, settings.steps))
    losses, norms = [], []
    for step in range(settings.steps):
        batch = ragged(step, settings.batch * size)
        logits = forward(model, batch)
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            batch.targets.flatten(),
            ignore_index=PADDING,
            label_smoothing=settings.smoothing,
        )
        adam.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf).item())
        adam.step()
        schedule.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("changes", [{}, {"clip": None}, {"smoothing": 0.1}, {"clip": 1e9}], ids=str)
def test_it_is_the_loop_written_out(changes: dict[str, float | None]) -> None:
    settings = PLAIN.but(**changes)
    ours, reference = Toy().double(), Toy().double()
    ears = Ears()
    result = fit(ours, settings, ragged, forward, progress=ears)
    losses, _ = by_hand(reference, settings)
    assert (result.step, result.finished) == (12, True)
    assert ears.losses == pytest.approx(losses, rel=1e-9)
    for name, p in weights(reference).items():
        torch.testing.assert_close(ours.get_parameter(name).detach(), p, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("optim", [AdamW(lr=0.01), Muon()])
def test_accumulated_micro_batches_are_one_large_batch_however_ragged(optim: OptimSpec, smoothing: float) -> None:
    large = PLAIN.but(optim=optim, smoothing=smoothing, batch=12)
    one, many = Toy().double(), Toy().double()
    fit(one, large, ragged, forward)
    fit(many, large.but(batch=4, accumulate=3), ragged, forward)
    sizes = [{ragged(3 * step + i, 4).tokens for i in range(3)} for step in range(12)]
    assert sum(len(s) > 1 for s in sizes) > 6, "micro-batches of equal size would prove nothing"
    for name, p in weights(one).items():
        torch.testing.assert_close(many.get_parameter(name).detach(), p, rtol=1e-7, atol=1e-10)


def test_every_loss_is_weighted_by_its_tokens_in_the_metrics(tmp_path: Path) -> None:
    run, settings = folder(tmp_path), PLAIN.but(steps=12, log_every=5)
    fit(Toy().double(), settings, ragged, forward, run=run)
    losses, norms = by_hand(Toy().double(), settings)
    tokens = [ragged(step, 4).tokens for step in range(12)]
    records = Metrics(run.metrics).read()
    assert [r["step"] for r in records] == [5, 10, 12]
    for record, (first, last) in zip(records, [(0, 5), (5, 10), (10, 12)], strict=True):
        mean = sum(loss * n for loss, n in zip(losses[first:last], tokens[first:last], strict=True))
        assert record["loss"] == pytest.approx(mean / sum(tokens[first:last]), rel=1e-9)
        assert record["grad_norm"] == pytest.approx(norms[last - 1], rel=1e-6)
        assert record["lr"] == pytest.approx(0.01 * settings.schedule.factor(last, 12))
        assert record["tokens_per_s"] > 0
        assert {n for n in record if "." not in n} == {"step", "loss", "lr", "grad_norm", "tokens_per_s"}


@pytest.mark.parametrize("limit", [None, 1e-3, 1e3])
def test_clipping_is_torchs(limit: float | None) -> None:
    ours, reference = Toy(), Toy()
    for model in (ours, reference):
        forward(model, ragged(0, 4)).square().sum().backward()
    ours.out.weight.grad = reference.out.weight.grad = None
    expected = nn.utils.clip_grad_norm_(reference.parameters(), limit or math.inf)
    found = clip_gradients(list(ours.parameters()), limit)
    torch.testing.assert_close(found, expected)
    for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


def test_a_mean_loss_weighs_every_token_the_same() -> None:
    model = Toy().double().eval()
    pieces = [ragged(0, 3), ragged(1, 3), ragged(2, 3)]
    whole = ragged(0, 9)
    expected = F.cross_entropy(forward(model, whole).flatten(0, 1), whole.targets.flatten(), ignore_index=PADDING)
    assert mean_loss(model, pieces, forward) == pytest.approx(expected.item(), rel=1e-9)
    assert mean_loss(model, [whole], forward) == pytest.approx(expected.item(), rel=1e-9)
    assert math.isnan(mean_loss(model, [], forward))


# ---- validation


def test_validation_comes_when_it_should_in_eval_mode_without_gradients(tmp_path: Path) -> None:
    run, model, seen = folder(tmp_path), Toy(dropout=0.5), []

    def evaluate(m: nn.Module) -> Mapping[str, float]:
        seen.append((m.training, torch.is_grad_enabled(), m is model))
        return {"val_loss": float(len(seen)), "exact": 0.25}

    def watched(m: nn.Module, batch: ToyBatch) -> Tensor:
        assert m.training
        assert torch.is_grad_enabled()
        return forward(m, batch)

    result = fit(model, PLAIN.but(validate_every=4, steps=10), ragged, watched, evaluate=evaluate, run=run)
    assert seen == [(False, False, True)] * 3
    records = {r["step"]: r.get("val_loss") for r in Metrics(run.metrics).read()}
    assert records == {4: 1.0, 5: None, 8: 2.0, 10: 3.0}
    assert (result.record["val_loss"], result.record["exact"]) == (3.0, 0.25)
    assert not model.training


def test_validation_changes_nothing_in_training() -> None:
    """Dropout draws the same numbers whether or not somebody validates, with random numbers of their own."""

    def evaluate(m: nn.Module) -> Mapping[str, float]:
        return {"val_loss": torch.rand(7).sum().item()}

    quiet, busy = Toy(dropout=0.5), Toy(dropout=0.5)
    torch.manual_seed(5)
    fit(quiet, PLAIN, ragged, forward)
    torch.manual_seed(5)
    fit(busy, PLAIN.but(validate_every=1), ragged, forward, evaluate=evaluate)
    assert all(torch.equal(p, weights(busy)[name]) for name, p in weights(quiet).items())


def test_the_average_is_what_is_evaluated_saved_and_kept_in_the_model(tmp_path: Path) -> None:
    settings, decay = PLAIN.but(ema=0.6, validate_every=5, log_every=1), 0.6
    run, model, plain = folder(tmp_path), Toy(), Toy()
    evaluated: list[dict[str, Tensor]] = []

    def evaluate(m: nn.Module) -> Mapping[str, float]:
        evaluated.append(weights(m))
        return {"val_loss": 0.0}

    fit(model, settings, ragged, forward, evaluate=evaluate, run=run)

    history: list[dict[str, Tensor]] = []

    def peek(m: nn.Module, batch: ToyBatch) -> Tensor:
        history.append(weights(m))  # before step 1, 2, ...
        return forward(m, batch)

    fit(plain, settings.but(ema=None), ragged, peek)
    history.append(weights(plain))
    average = history[0]
    averages = [average]
    for step in range(1, 13):
        d = min(decay, (1 + step) / (10 + step))
        average = {name: d * a + (1 - d) * history[step][name] for name, a in average.items()}
        averages.append(average)
    for got, step in zip(evaluated, (5, 10, 12), strict=True):
        torch.testing.assert_close(got, averages[step])
    torch.testing.assert_close(weights(model), averages[12])
    saved, step = run.weights()
    assert step == 12
    torch.testing.assert_close(saved, averages[12])
    assert (averages[12]["out.weight"] - history[12]["out.weight"]).abs().max() > 1e-3


# ---- what is left behind


def test_a_finished_run_leaves_everything(tmp_path: Path) -> None:
    run, model = folder(tmp_path), Toy(tied=True)
    fit(model, PLAIN, ragged, forward, evaluate=lambda m: {"val_loss": 1.0, "exact": 0.5}, run=run)
    expected = {"spec.json", "run.json", "weights.safetensors", "state.safetensors", "metrics.jsonl", "loss.png"}
    assert {p.name for p in run.path.iterdir()} == expected
    other = Toy(tied=True, seed=4)
    assert RunFolder.open(run.path).load_weights(other) == 12
    assert all(torch.equal(p, weights(other)[name]) for name, p in weights(model).items())
    assert run.picture.read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [5, 10, 12]


def test_progress_hears_of_every_step_and_is_closed_whatever_happens() -> None:
    ears = Ears()
    fit(Toy(), PLAIN.but(steps=4, log_every=3), ragged, forward, progress=ears)
    assert ears.heard == [("begin", 0, 4), 1, 2, 3, ("record", 3), 4, ("record", 4), "close"]
    ears = Ears()
    with pytest.raises(ZeroDivisionError):
        fit(Toy(), PLAIN, lambda i, n: ragged(i, n // (2 - i)), forward, progress=ears)
    assert ears.heard == [("begin", 0, 12), 1, 2, "close"]


def test_a_batch_without_targets_is_refused() -> None:
    def empty(index: int, rows: int) -> ToyBatch:
        batch = ragged(index, rows)
        return batch if index < 3 else ToyBatch(batch.inputs, torch.full_like(batch.targets, PADDING), 0)

    with pytest.raises(RunError, match="step 4, batch 3: no target counts"):
        fit(Toy(), PLAIN, empty, forward)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"steps": 0}, "training.steps"),
        ({"batch": 0}, "training.batch"),
        ({"accumulate": 0}, "training.accumulate"),
        ({"log_every": 0}, "training.log_every"),
        ({"validate_every": 0}, "training.validate_every"),
        ({"clip": 0.0}, "training.clip.*for none"),
        ({"smoothing": 1.0}, "training.smoothing"),
        ({"ema": 1.0}, "training.ema"),
        ({"save_minutes": -1.0}, "training.save_minutes"),
        ({"steps": 50}, r"training.steps: got 50, expected at least the warm-up \(100\).*schedule.warmup"),
        ({"optim": {"kind": "muon", "rest": {"kind": "muon"}}}, "training.optim.rest"),
        ({"step": 5}, "did you mean 'steps'"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        read(Training, {"kind": "training", **changes}, "training")


def test_settings_survive_json() -> None:
    settings = Training(optim=Muon(rest=AdamW(lr=1e-4)), schedule=Constant(), ema=0.99, clip=None)
    assert Training.from_json(settings.to_json()) == settings
