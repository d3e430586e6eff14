"""What a run says while it goes: numbers to metrics.jsonl, a bar on a terminal, plain lines elsewhere.

A record is what is known at a logging step:

    step            optimizer steps done                loss       training loss a token since the last record, nats
    lr              learning rate of the last step      grad_norm  norm of its gradient before clipping
    tokens_per_s    targets trained on a second         val_loss, exact, ...   what `evaluate` gave, at validation steps
    update.GROUP    size of the step, see updates.py    entropy.LAYER ...      names with a dot are kept and not shown
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO, final

from brickformer.errors import RunError
from brickformer.files import append_line, read_text, write_whole

Record = Mapping[str, float]

_NAMES = {"loss": "loss", "val_loss": "val loss", "exact": "exact"}
_OWN = ("step", "loss", "lr", "grad_norm", "tokens_per_s")


@final
class Metrics:
    """The records of a run, in a file of one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        """Add a record; what is not finite becomes null, as JSON knows no NaN."""
        append_line(self.path, json.dumps({k: v if math.isfinite(v) else None for k, v in record.items()}))

    def read(self) -> list[dict[str, float]]:
        """All records, null as NaN; a last line cut off in the middle is left out. Errors: RunError: broken."""
        records = []
        lines = read_text(self.path).splitlines() if self.path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                record = {k: math.nan if v is None else float(v) for k, v in json.loads(line).items()}
                record["step"]  # a record without a step is none
                records.append(record)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                if number < len(lines):
                    raise RunError(f"{self.path}: line {number} is broken, expected a record. Delete it.") from None
        return records

    def cut(self, step: int) -> None:
        """Forget what came after `step`: a resumed run says it again."""
        lines = [
            json.dumps({k: v if math.isfinite(v) else None for k, v in record.items()}) + "\n"
            for record in self.read()
            if record["step"] <= step
        ]
        write_whole(self.path, "".join(lines).encode())


def shown(record: Record) -> str:
    """The part of a record that people read: ``loss 0.1234 · exact 97.2 % · 41,200 tokens/s``."""
    parts = [f"loss {record['loss']:.4f}"]
    for name, value in record.items():
        if name not in _OWN and "." not in name:
            label = _NAMES.get(name, name.replace("_", " "))
            parts.append(f"{label} {value:.1%}".replace("%", " %") if name == "exact" else f"{label} {value:.4f}")
    return " · ".join([*parts, f"{record['tokens_per_s']:,.0f} tokens/s"])


def is_validation(record: Record) -> bool:
    """Whether the record has values of `evaluate`."""
    return any(name not in _OWN and "." not in name for name in record)


class Progress(ABC):
    """Slot: how a person follows a run."""

    @abstractmethod
    def begin(self, step: int, steps: int) -> None:
        """The run starts after `step` of `steps`."""

    @abstractmethod
    def step(self, step: int, loss: float | None) -> None:
        """A step is done; loss is None where reading it would hold up the device."""

    @abstractmethod
    def record(self, record: Record) -> None:
        """A logging step is done."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Show a line that stays."""

    @abstractmethod
    def close(self) -> None:
        """The run is over, for whatever reason; the terminal is left tidy."""


@final
class Silent(Progress):
    """Says nothing: benchmarks, sweeps, library use."""

    def begin(self, step: int, steps: int) -> None:
        """Nothing."""

    def step(self, step: int, loss: float | None) -> None:
        """Nothing."""

    def record(self, record: Record) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


@final
class Lines(Progress):
    """Plain lines: every validation, and besides at most one line every `every` seconds."""

    def __init__(self, out: TextIO, *, every: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.out, self.every, self.clock = out, every, clock
        self.steps, self.last = 0, -math.inf

    def begin(self, step: int, steps: int) -> None:
        """Remember where the end is."""
        self.steps, self.last = steps, self.clock()

    def step(self, step: int, loss: float | None) -> None:
        """Nothing: a line a step is too much."""

    def record(self, record: Record) -> None:
        """One line, if it is time."""
        now = self.clock()
        if is_validation(record) or now - self.last >= self.every:
            self.last = now
            self.say(f"step {record['step']:>{len(str(self.steps))}.0f}/{self.steps} · {shown(record)}")

    def say(self, text: str) -> None:
        """One line."""
        _write(self.out, f"{text}\n")

    def close(self) -> None:
        """Nothing: every line is complete."""


@final
class Bar(Progress):
    """A bar in the last line of a terminal, redrawn at most ten times a second; validations scroll by above it."""

    def __init__(self, out: TextIO, *, width: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.out, self.width, self.clock = out, width, clock
        self.first, self.done, self.steps = 0, 0, 1
        self.started, self.drawn = 0.0, -math.inf
        self.loss: float | None = None
        self.speed: float | None = None
        self.full, self.empty = _blocks(out)

    def begin(self, step: int, steps: int) -> None:
        """Draw it empty."""
        self.first, self.done, self.steps, self.started = step, step, steps, self.clock()
        self._draw()

    def step(self, step: int, loss: float | None) -> None:
        """Move it, if it is time."""
        self.done = step
        self.loss = self.loss if loss is None else loss
        if self.clock() - self.drawn >= 0.1 or step == self.steps:
            self._draw()

    def record(self, record: Record) -> None:
        """Take the numbers in; a validation gets a line of its own."""
        self.loss, self.speed = record["loss"], record["tokens_per_s"]
        if is_validation(record):
            self.say(f"step {record['step']:>{len(str(self.steps))}.0f}/{self.steps} · {shown(record)}")

    def say(self, text: str) -> None:
        """A line above the bar."""
        _write(self.out, f"\r\x1b[K{text}\n")
        self._draw()

    def close(self) -> None:
        """Wipe the bar."""
        _write(self.out, "\r\x1b[K")

    def _draw(self) -> None:
        self.drawn = self.clock()
        columns = (self.width or shutil.get_terminal_size().columns) - 1  # the last column would wrap the line
        text = f"{self.done:>{len(str(self.steps))}}/{self.steps}"
        if self.loss is not None:
            text += f"  loss {self.loss:.4f}"
        if self.speed is not None:
            text += f"  {self.speed:,.0f} tokens/s"
        if self.done > self.first:
            left = (self.drawn - self.started) / (self.done - self.first) * (self.steps - self.done)
            text += f"  {_duration(left)} left"
        room = min(40, columns - len(text) - 2)
        bar = ""
        if room >= 5:
            filled = room * self.done // self.steps
            bar = f"{self.full * filled}{self.empty * (room - filled)}  "
        _write(self.out, f"\r{(bar + text)[:columns]}\x1b[K")


def progress(out: TextIO | None = None) -> Progress:
    """A bar where `out` (standard error by default) is a terminal, plain lines elsewhere."""
    out = sys.stderr if out is None else out
    return Bar(out) if out.isatty() and os.environ.get("TERM") != "dumb" else Lines(out)


def _write(out: TextIO, text: str) -> None:
    """Show it at once. Where nobody can read it (`| head`, a terminal that is gone) the run goes on all the same."""
    with contextlib.suppress(OSError):
        out.write(text)
        out.flush()


def _blocks(out: TextIO) -> tuple[str, str]:
    """A full and an empty cell, in what the terminal can show."""
    try:
        "█░".encode(out.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#", "-"
    return "█", "░"


def _duration(seconds: float) -> str:
    """75 -> 1:15, 3675 -> 1:01:15."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
