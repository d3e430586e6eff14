"""Streams that are closed, broken or full, and signals: a run is never lost to them, a traceback never the answer."""

from __future__ import annotations

import errno
import io
import signal
import sys
from pathlib import Path

import pytest
from cli.conftest import TINY, Brick

from brickformer.cli import main
from brickformer.train.interrupt import interruptible
from brickformer.train.log import Bar, Lines, Progress


class Broken(io.StringIO):
    """A stream nobody reads: every write fails."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_stream_that_is_closed(brick: Brick, monkeypatch: pytest.MonkeyPatch, tiny: Path, name: str) -> None:
    """`brick ... >&-`: Python has None there."""
    monkeypatch.setattr(sys, name, None)
    assert main(["train", "reverse", *TINY]) == 0
    assert main(["generate", str(tiny), *(["7 1 4"] if name != "stdin" else [])]) == 0
    getattr(sys, name).close()


def test_output_on_a_full_disk_is_an_error(brick: Brick, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Broken(OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    assert main(["list", "glu"]) == 2
    assert err.getvalue() == "brick: input or output: No space left on device.\n"


def test_nobody_reads_an_answer_to_its_end(brick: Brick, monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    """`brick generate ... | head -c 10`, streaming or not."""
    for more in ([], ["--stream"]):
        monkeypatch.setattr(sys, "stdout", Broken(BrokenPipeError()))
        monkeypatch.setattr(sys, "stderr", err := io.StringIO())
        assert main(["generate", str(tiny), "1 2 3", *more]) == 0 and not err.getvalue()


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "Input/output error")])
def test_a_run_goes_on_when_nobody_reads_its_progress(error: OSError) -> None:
    """`brick train ... 2>&1 | head -1`, a terminal that was closed."""
    shown: list[Progress] = [Lines(Broken(error)), Bar(Broken(error), width=40)]
    for progress in shown:
        progress.begin(0, 2)
        progress.step(1, 1.0)
        progress.record({"step": 1, "loss": 1.0, "val_loss": 1.0, "tokens_per_s": 1.0})
        progress.close()


def test_signals_that_are_ignored_stay_ignored() -> None:
    """`nohup brick train`, or a job in the background of a script, whose Ctrl-C is meant for another program."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupt.asked
    finally:
        signal.signal(signal.SIGHUP, before)
    with interruptible() as interrupt:
        signal.raise_signal(signal.SIGHUP)
        assert interrupt.asked
