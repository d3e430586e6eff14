"""The patient is a copy; the caller's model, random numbers and standard output stay as they were. Time is bounded."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


class OutOfTime(BaseException):
    """The time of a probe is used up; the message says how long one call takes."""


@dataclass
class Budget:
    """How long the whole examination may take; a probe gets a share of what is left.

    A call that has begun is not interrupted: the bound is `seconds` and one call more. What counts is the time of the
    processor in this thread, so that a busy machine and many threads change no verdict; of waiting (a device, a disk,
    other threads) a quarter.
    """

    seconds: float = 60.0
    began: tuple[float, float] = field(default_factory=lambda: (time.thread_time(), time.monotonic()))
    until: float = float("inf")
    calls: int = 0

    @property
    def used(self) -> float:
        """Seconds."""
        return max(time.thread_time() - self.began[0], (time.monotonic() - self.began[1]) / 4)

    def share(self, part: float) -> None:
        """From now on a part of what is left."""
        used = self.used
        self.until = used + part * max(0.0, self.seconds - used)

    def tick(self) -> None:
        """Before every call of the model. Errors: OutOfTime."""
        used = self.used
        if used >= self.until:
            each = used / max(self.calls, 1)
            raise OutOfTime(f"its share of {self.seconds:g} s is used up; one call takes about {each:.2g} s")
        self.calls += 1


@contextlib.contextmanager
def interrupted(seconds: float, message: str, threads: int = 1) -> Iterator[None]:
    """What runs inside raises OutOfTime when it has used so many seconds of each thread, or waited four times as long.

    After that every fifth second again, since what was interrupted may go on with the next call. Only in the main
    thread of a system that has timers for processes; elsewhere nothing is interrupted.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise OutOfTime(message)

    watched = (
        (signal.SIGPROF, signal.ITIMER_PROF, seconds * threads),
        (signal.SIGALRM, signal.ITIMER_REAL, 4 * seconds),
    )
    before = [(number, signal.signal(number, stop)) for number, _, _ in watched]
    try:
        for _, timer, limit in watched:
            signal.setitimer(timer, limit, 5.0)
        yield
    finally:
        for _, timer, _ in watched:
            signal.setitimer(timer, 0.0)
        for number, handler in before:
            signal.signal(number, handler)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Random numbers of Python, NumPy and torch, the default type and grad mode are afterwards what they were."""
    import numpy

    state, arrays, dtype = random.getstate(), numpy.random.get_state(), torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                yield
        finally:
            torch.set_default_dtype(dtype)
            random.setstate(state)
            numpy.random.set_state(arrays)


def duplicate(model: nn.Module) -> nn.Module:
    """A deep copy; what a module keeps of its last run (attention maps, a loss) is cut off from that run's graph.

    copy.deepcopy refuses tensors that are no leaves. Errors: whatever copying raises.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            for x in held(value):
                if isinstance(x, Tensor) and not x.is_leaf:
                    memo[id(x)] = x.detach().clone()
    return copy.deepcopy(model, memo)


def held(value: Any, depth: int = 0) -> Iterator[Any]:
    """What lists, tuples and dicts hold."""
    if depth < 3 and isinstance(value, list | tuple):
        for x in value:
            yield from held(x, depth + 1)
    elif depth < 3 and isinstance(value, dict):
        for x in value.values():
            yield from held(x, depth + 1)
    else:
        yield value


def copied(model: nn.Module) -> nn.Module:
    """A deep copy on the CPU, every parameter asking for its gradient as before. Errors: whatever copying raises."""
    return duplicate(model).cpu()


def undropped(model: nn.Module) -> nn.Module:
    """A copy in train() that drops nothing."""
    other = duplicate(model)
    for module in other.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name.lower() or name == "p"):
                setattr(module, name, 0.0)
    return other.train()


def shake(model: nn.Module) -> None:
    """Noise on every parameter, the same each time: initial values are too regular to show what a model does.

    Rows of zeros in a table (padding) stay zero, so that a mask made from them still works.
    """
    noise = torch.Generator().manual_seed(1)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel():
                size = min(parameter.shape[-1] ** -0.5, 0.3) if parameter.ndim > 1 else 0.2
                drawn = torch.randn(parameter.shape, generator=noise, dtype=torch.float64) * size
                if id(parameter) in tables:
                    drawn = drawn * (parameter.abs().sum(-1, keepdim=True) > 0)
                parameter.add_(drawn.to(parameter))
