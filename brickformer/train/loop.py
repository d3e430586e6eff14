"""The training loop: forward, loss, backward, clip, step.

    g = ∇ (1/N) Σ_micro-batches Σ_tokens loss,   N = all counted tokens of the step
    g ← g · min(1, clip / ‖g‖)                       arXiv 1211.5063
    θ ← optimizer(θ, g, η · schedule(step))

The loop knows no task and no model: batches come from a function of their number, logits from a function of the model
and the batch, validation from a function of the model. Because batches are pure functions and the state holds weights,
optimizer and random numbers, a run that was interrupted and resumed ends with the same bits as one that was not (CPU).

On a CPU every loss and gradient norm is looked at before it is applied. On other devices that would stall the queue at
every step, so there the device itself keeps the number of the first bad step and it is read at logging steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, TypeVar, final

import torch
from torch import Tensor, nn

from brickformer.errors import RunError
from brickformer.train.checkpoint import RunFolder
from brickformer.train.ema import Average
from brickformer.train.interrupt import interruptible
from brickformer.train.log import Metrics, Progress, Silent
from brickformer.train.losses import cross_entropy
from brickformer.train.picture import draw
from brickformer.train.settings import Training
from brickformer.train.state import TrainingState
from brickformer.train.updates import measured


class Batch(Protocol):
    """What the loop reads of a batch; the rest is between the data and `forward`."""

    @property
    def targets(self) -> Tensor:
        """(B, T) what to say at each place; IGNORE where nothing is expected."""

    @property
    def tokens(self) -> int:
        """How many targets count."""


B = TypeVar("B", bound=Batch)
Batches = Callable[[int, int], B]
"""(number of the batch from 0, rows) -> the batch: a pure function."""
Forward = Callable[[nn.Module, B], Tensor]
"""(model, batch) -> logits (B, T, V)."""
Evaluate = Callable[[nn.Module], Mapping[str, float]]
"""(model in eval mode, no gradients) -> named values; `val_loss` and `exact` (0 to 1) are drawn."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended. record: the last logged numbers. seconds: of this session, validation and saving included."""

    step: int
    finished: bool
    seconds: float
    record: dict[str, float]


def fit(
    model: nn.Module,
    settings: Training,
    batches: Batches[B],
    forward: Forward[B],
    *,
    evaluate: Evaluate | None = None,
    run: RunFolder | None = None,
    progress: Progress | None = None,
    resume: bool = False,
    accepted: Callable[[], None] = lambda: None,
) -> Result:
    """Train `model` in place; afterwards it is in eval mode and holds the weights that were saved.

    run: where to keep weights, state, metrics and the picture; without it nothing is written. resume: go on from the
    state in `run`. accepted: called once that state fits, before anything is written. Ctrl-C finishes the step, saves
    and returns. Errors: RunError: a loss or gradient that is not finite (the weights before it are kept), a full disk,
    a state that does not fit or is already finished.
    """
    with closing(progress or Silent()) as shown, interruptible() as interrupt:
        job = _Job(model, settings, batches, forward, evaluate, run, shown)
        start = job.restore(accepted) if resume else 0
        return job.run_from(start, lambda: interrupt.asked)


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Iterable[B], forward: Forward[B]) -> float:
    """Loss a token over all batches, nats: every token weighs the same, however the batches are cut. NaN for none."""
    total, tokens = 0.0, 0
    for batch in batches:
        logits = forward(model, batch)
        total += float(cross_entropy(logits, batch.targets.to(logits.device))[0])
        tokens += batch.tokens
    return total / tokens if tokens else math.nan


@torch.no_grad()
def clip_gradients(params: Sequence[nn.Parameter], limit: float | None) -> Tensor:
    """Scale all gradients so that their common norm is at most `limit`; returns the norm before, a scalar tensor."""
    grads = [p.grad for p in params if p.grad is not None]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    if limit is not None and (not _is_read_freely(norm.device) or float(norm) > limit):
        torch._foreach_mul_(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))
    return norm


def _is_read_freely(device: torch.device) -> bool:
    """Whether reading a number costs no waiting."""
    return device.type == "cpu"


@final
class _Job(Generic[B]):
    """One call of `fit`."""

    def __init__(
        self,
        model: nn.Module,
        settings: Training,
        batches: Batches[B],
        forward: Forward[B],
        evaluate: Evaluate | None,
        run: RunFolder | None,
        progress: Progress,
    ) -> None:
        self.model, self.settings, self.batches, self.forward = model, settings, batches, forward
        self.evaluate, self.run, self.progress = evaluate, run, progress
        self.optim = settings.optim.build(model)
        self.average = Average(model, settings.ema) if settings.ema is not None else None
        self.device = self.optim.params[0].device
        self.state = TrainingState(model, self.optim, self.average, self.device)
        self.free = _is_read_freely(self.device)
        self.first_bad = torch.zeros((), dtype=torch.int64, device=self.device)  # step; 0: none
        self.saved_step = 0
        self.updates: dict[str, Tensor] = {}  # of the last step whose numbers are kept
        self.record: dict[str, float] = {}

    def run_from(self, start: int, asked_to_stop: Callable[[], bool]) -> Result:
        """Steps start+1, ..., to the end or until asked to stop."""
        s, watch = self.settings, _Watch()
        self.progress.begin(start, s.steps)
        if start == 0:
            self.save(0)  # a full disk or a folder without permission shows now, not after the first hours
        saved = time.monotonic()
        self.model.train()
        step = start
        watch.lap()
        while step < s.steps and not asked_to_stop():
            step += 1
            norm, loss = self.train_step(step)
            self.progress.step(step, loss)
            if self.is_logged(step):
                self.log(step, norm, watch)
            if time.monotonic() - saved >= 60.0 * s.save_minutes and step < s.steps:
                with watch.paused():
                    self.save(step)
                saved = time.monotonic()
        self.save(step)
        self.draw()
        if self.average:
            self.average.copy_to_model()
        self.model.eval()
        if step < s.steps and self.run:
            self.progress.say(f"Stopped after step {step} of {s.steps}; saved in {self.run.path}.")
        return Result(step, step == s.steps, watch.total(), self.record)

    def is_logged(self, step: int) -> bool:
        """Whether the numbers of a step are kept."""
        s = self.settings
        return step % s.log_every == 0 or step % s.validate_every == 0 or step == s.steps

    def train_step(self, step: int) -> tuple[Tensor, float | None]:
        """One optimizer step: (norm of the gradient, loss a token where reading it is free)."""
        s = self.settings
        first = (step - 1) * s.accumulate
        parts = [self.batches(first + i, s.batch) for i in range(s.accumulate)]
        tokens = sum(part.tokens for part in parts)
        if tokens == 0:
            raise RunError(f"step {step}, batch {first}: no target counts. Give longer rows, or larger batches.")
        losses = []
        for part in parts:
            logits = self.forward(self.model, part)
            loss, _ = cross_entropy(logits, part.targets.to(logits.device), s.smoothing)
            (loss / tokens).backward()
            losses.append(loss.detach())
        total = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
        norm = clip_gradients(self.optim.params, s.clip)
        if not self.free:
            bad = (self.first_bad == 0) & ~torch.isfinite(total + norm)
            self.first_bad = torch.where(bad, step, self.first_bad)
        elif not (math.isfinite(float(total)) and math.isfinite(float(norm))):
            self.fail(step, losses, norm)
        self.optim.set_factor(s.schedule.factor(step, s.steps))
        with measured(self.model, self.updates) if self.is_logged(step) else nullcontext():
            self.optim.step()
        self.optim.zero_grad()
        if self.average:
            self.average.update(step)
        self.state.total += total
        self.state.tokens += tokens
        return norm, float(total) / tokens if self.free else None

    def fail(self, step: int, losses: Sequence[Tensor], norm: Tensor) -> NoReturn:
        """Keep the weights before `step` and say which batch it was. Errors: RunError, always."""
        self.optim.zero_grad()
        self.save(step - 1)
        self.draw()
        first = (step - 1) * self.settings.accumulate
        bad = [first + i for i, loss in enumerate(losses) if not math.isfinite(float(loss))]
        if bad:
            what = f"batch {bad[0]}: the loss is {float(losses[bad[0] - first])}"
        elif len(losses) == 1:
            what = f"batch {first}: the norm of the gradient is {float(norm)}"
        else:
            what = f"batches {first} to {first + len(losses) - 1}: the norm of the gradient is {float(norm)}"
        raise RunError(f"step {step}, {what}. {self.kept(step - 1)}{_CURE}")

    def refuse_noted(self) -> None:
        """Read what the device noted. The weights in memory are spoilt then, those on the disk are not."""
        step = 0 if self.free else int(self.first_bad)
        if step:
            self.draw()
            first = (step - 1) * self.settings.accumulate
            last = step * self.settings.accumulate - 1
            batch = f"batch {first}" if first == last else f"batches {first} to {last}"
            raise RunError(f"step {step}, {batch}: loss or gradient not finite. {self.kept(self.saved_step)}{_CURE}")

    def kept(self, step: int) -> str:
        """The sentence about what was saved."""
        return f"The weights after step {step} are kept in {self.run.path}. " if self.run else ""

    def log(self, step: int, norm: Tensor, watch: _Watch) -> None:
        """Put together a record, with validation values when it is time for them, and show it."""
        self.refuse_noted()
        loss, tokens = float(self.state.total) / self.state.tokens, self.state.tokens  # on a device: waits for its work
        speed = tokens / watch.lap()
        self.record = {"step": step, "loss": loss, "lr": self.optim.lr, "grad_norm": float(norm), "tokens_per_s": speed}
        self.record |= {name: float(value) for name, value in self.updates.items()}
        self.state.total.zero_()
        self.state.tokens = 0
        with watch.paused():
            if self.evaluate and (step % self.settings.validate_every == 0 or step == self.settings.steps):
                self.record |= self.validate(self.evaluate)
            if self.run:
                Metrics(self.run.metrics).append(self.record)
            self.progress.record(self.record)

    def validate(self, evaluate: Evaluate) -> dict[str, float]:
        """What `evaluate` says about the weights that would be saved; leaves the random numbers as they were."""
        averaged = self.average.applied() if self.average else nullcontext()
        devices = [self.device] if self.device.type == "cuda" else []
        self.model.eval()
        with averaged, torch.random.fork_rng(devices=devices), torch.no_grad():
            values = {name: float(value) for name, value in evaluate(self.model).items()}
        self.model.train()
        return values

    def save(self, step: int) -> None:
        """Write the state, then the weights: what resumes is whole by itself, so a cut between them is harmless."""
        if self.run is None:
            return
        self.refuse_noted()
        self.run.save_state(self.state.tensors(), step)
        with self.average.applied() if self.average else nullcontext():
            self.run.save_weights(self.model.state_dict(), step)
        self.saved_step = step

    def restore(self, accepted: Callable[[], None]) -> int:
        """Take the state of the run back; returns its step. Errors: RunError: finished, broken, does not fit."""
        assert self.run is not None, "resume needs a run folder"
        tensors, step = self.run.state()
        steps = self.settings.steps
        if step >= steps:
            raise RunError(f"{self.run.path}: finished: {step} of {steps} steps are done. Raise the steps to go on.")
        self.state.restore(tensors, str(self.run.path / "state.safetensors"))
        accepted()
        Metrics(self.run.metrics).cut(step)
        self.saved_step = step
        return step

    def draw(self) -> None:
        """Draw the metrics."""
        if self.run:
            draw(Metrics(self.run.metrics).read(), self.run.picture, self.run.path.name)


@final
class _Watch:
    """Seconds: in all, and of training since the last lap."""

    def __init__(self) -> None:
        self.begun = self.last = time.monotonic()
        self.pauses = 0.0

    def total(self) -> float:
        """Since the beginning, pauses included."""
        return time.monotonic() - self.begun

    def lap(self) -> float:
        """Since the last lap, pauses left out; above 0."""
        now = time.monotonic()
        seconds = max(1e-9, now - self.last - self.pauses)
        self.last, self.pauses = now, 0.0
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no training."""
        begun = time.monotonic()
        yield
        self.pauses += time.monotonic() - begun


_CURE = "Lower optim.lr, lengthen the warm-up, or clip harder."
