"""What a person sees: a bar on a terminal, plain lines elsewhere; and the metrics file."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
from pathlib import Path

import pytest

from brickformer.errors import RunError
from brickformer.train.log import Bar, Lines, Metrics, Silent, progress, shown

RECORD = {"step": 20.0, "loss": 0.5, "lr": 1e-3, "grad_norm": 1.25, "tokens_per_s": 41234.5}
VALIDATION = {**RECORD, "val_loss": 0.4, "exact": 0.9725, "exact_long": 0.5}


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream with an encoding, and the screen that its text leaves behind."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self.name_of_encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.name_of_encoding

    def screen(self) -> list[str]:
        """Lines as shown: a return goes to the start of the line, ESC [K wipes the rest of it."""
        lines, column = [""], 0
        for piece in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]+", self.getvalue()):
            if piece == "\n":
                lines.append("")
                column = 0
            elif piece == "\r":
                column = 0
            elif piece == "\x1b[K":
                lines[-1] = lines[-1][:column]
            else:
                lines[-1] = lines[-1][:column] + piece + lines[-1][column + len(piece) :]
                column += len(piece)
        return lines


def test_a_record_reads_well() -> None:
    assert shown(RECORD) == "loss 0.5000 · 41,234 tokens/s"
    assert shown(VALIDATION) == ("loss 0.5000 · val loss 0.4000 · exact 97.2 % · exact long 0.5000 · 41,234 tokens/s")


def test_lines_are_plain_and_come_at_validation_or_every_few_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    lines = Lines(out, every=5.0, clock=clock)
    lines.begin(0, 100)
    lines.step(1, 2.0)
    lines.record(RECORD)  # at once: nothing
    clock.now += 4.9
    lines.record(RECORD)  # too early
    lines.record(VALIDATION)
    clock.now += 4.9
    lines.record(RECORD)  # too early after the validation
    clock.now += 0.2
    lines.record(RECORD)
    lines.say("Stopped.")
    lines.close()
    assert out.getvalue() == f"step  20/100 · {shown(VALIDATION)}\nstep  20/100 · {shown(RECORD)}\nStopped.\n"
    assert not re.search(r"[\r\x1b]", out.getvalue())


def test_the_bar_fills_shows_the_numbers_and_is_wiped() -> None:
    out, clock = Terminal(), Clock()
    bar = Bar(out, width=80, clock=clock)
    bar.begin(0, 100)
    assert out.screen() == ["░" * 40 + "    0/100"]
    clock.now += 10
    bar.step(25, 1.25)
    assert out.screen() == ["█" * 10 + "░" * 30 + "   25/100  loss 1.2500  0:30 left"]
    bar.record(VALIDATION)
    clock.now += 3600
    bar.step(50, 0.75)
    line, now = out.screen()
    assert line == f"step  20/100 · {shown(VALIDATION)}"
    room = 80 - 1 - len(" 50/100  loss 0.7500  41,234 tokens/s  1:00:10 left") - 2
    assert now == "█" * (room // 2) + "░" * (room - room // 2) + "   50/100  loss 0.7500  41,234 tokens/s  1:00:10 left"
    bar.say("a line that stays")
    assert out.screen()[1] == "a line that stays"
    bar.close()
    assert out.screen() == [line, "a line that stays", ""]


def test_the_bar_is_drawn_ten_times_a_second_at_most_and_at_the_end() -> None:
    out, clock = Terminal(), Clock()
    bar = Bar(out, width=80, clock=clock)
    bar.begin(0, 1000)
    for step in range(1, 1001):
        clock.now += 0.01
        bar.step(step, 1.0)
    assert out.screen()[-1].startswith("█" * 40)
    assert 95 <= out.getvalue().count("\r") <= 103


def test_a_resumed_bar_starts_where_it_is_and_guesses_from_its_own_steps() -> None:
    out, clock = Terminal(), Clock()
    bar = Bar(out, width=80, clock=clock)
    bar.begin(50, 100)
    clock.now += 10
    bar.step(60, None)
    assert out.screen() == ["█" * 24 + "░" * 16 + "   60/100  0:40 left"]


@pytest.mark.parametrize("width", [1, 8, 20, 30, 45, 80, 300])
def test_the_bar_never_wraps(width: int) -> None:
    out, clock = Terminal(), Clock()
    bar = Bar(out, width=width, clock=clock)
    bar.begin(0, 100_000)
    bar.record(RECORD)
    clock.now += 1
    bar.step(70_000, 12.3456)
    assert len(out.screen()[-1]) < max(width, 2)


def test_a_terminal_without_blocks_gets_ascii() -> None:
    out = Terminal("latin-1")
    bar = Bar(out, width=80, clock=Clock())
    bar.begin(50, 100)
    assert out.screen() == ["#" * 20 + "-" * 20 + "   50/100"]


def test_a_terminal_gets_the_bar_and_a_file_gets_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    with open(slave, "w") as terminal, open(tmp_path / "log", "w") as file:
        assert isinstance(progress(terminal), Bar)
        assert isinstance(progress(file), Lines)
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(progress(terminal), Lines)
    os.close(master)


def test_it_goes_to_standard_error_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    progress().say("hello")
    assert capsys.readouterr() == ("", "hello\n")


def test_silent_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    silent = Silent()
    silent.begin(0, 3)
    silent.step(1, 0.5)
    silent.record(VALIDATION)
    silent.say("x")
    silent.close()
    assert capsys.readouterr() == ("", "")


# ---- metrics.jsonl


def test_metrics_are_one_json_object_a_line(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    assert metrics.read() == []
    metrics.append(RECORD)
    metrics.append({**VALIDATION, "val_loss": math.nan, "lr": math.inf})
    lines = [json.loads(line) for line in metrics.path.read_text().splitlines()]
    assert lines == [RECORD, {**VALIDATION, "val_loss": None, "lr": None}]
    assert "NaN" not in metrics.path.read_text()
    back = metrics.read()
    assert back[0] == RECORD
    assert math.isnan(back[1]["val_loss"])
    assert math.isnan(back[1]["lr"])


def test_cutting_forgets_what_came_later_and_a_half_written_line(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    records = [{**RECORD, "step": float(step)} for step in (10, 20, 30)]
    for record in records:
        metrics.append(record)
    with open(metrics.path, "a") as file:
        file.write('{"step": 40.0, "lo')
    assert metrics.read() == records
    metrics.cut(20)
    assert metrics.read() == records[:2]
    metrics.append(records[2])
    assert metrics.read() == records


@pytest.mark.parametrize("line", ["{", "[1]", "3", '{"loss": 1.0}', '{"step": 1, "loss": "low"}'])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.append(RECORD)
    with open(metrics.path, "a") as file:
        file.write(line + "\n")
    metrics.append(RECORD)
    with pytest.raises(RunError, match=r"metrics.jsonl: line 2 is broken"):
        metrics.read()
