"""What comes out of the doctor: SARIF, HTML, the plugin for pytest, lessons, the exam's page, a bounded time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from brickformer import doctor
from brickformer.cli import main
from brickformer.cli.plot import curves
from brickformer.doctor import diagnose, mutants
from brickformer.doctor.formats import page, sarif
from brickformer.doctor.guard import Budget, OutOfTime
from brickformer.doctor.lessons import ALL, LESSONS, batch
from brickformer.doctor.mutants import BUGS
from brickformer.doctor.mutants.bug import module_of, text_of

SICK = ("decoder", ('att.masked_fill(~self.tril[:T, :T], float("-inf"))', "att.masked_fill(~self.tril[:T, :T], 0.0)"))


def test_sarif_names_the_rule_the_module_and_the_file() -> None:
    report = diagnose(module_of(*SICK).make())
    data: Any = json.loads(json.dumps(sarif(report, "my_gpt.py", "1.2.3")))
    (run,) = data["runs"]
    assert data["version"] == "2.1.0" and run["tool"]["driver"]["semanticVersion"] == "1.2.3"
    first = run["results"][0]
    assert (first["ruleId"], first["level"]) == ("mask-value", "error")
    assert first["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "blocks.0.attn"
    assert first["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "my_gpt.py"
    spaced: Any = sarif(report, "my models\\gpt.py")["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert spaced["artifactLocation"]["uri"] == "my%20models/gpt.py"
    assert {r["ruleId"] for r in run["results"]} <= {r["id"] for r in run["tool"]["driver"]["rules"]}


def test_the_page_escapes_what_it_shows() -> None:
    report = diagnose(module_of(*SICK).make(), name="<script>")
    text = page(report)
    assert "&lt;script&gt;" in text and "<script>" not in text and "mask value" in text and "blocks.0.attn" in text


def test_formats_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sick.py").write_text(text_of(*SICK))
    assert main(["doctor", f"{tmp_path}/sick.py:make", "--format", "sarif"]) == 1
    assert json.loads(capsys.readouterr().out)["runs"][0]["results"]
    assert main(["doctor"]) == 2
    assert "expected FILE.py:make" in capsys.readouterr().err


def test_the_plugin_fails_a_test_and_waits_for_no_torch(tmp_path: Path, root: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_idle():\n    assert 'torch' not in sys.modules\n\n"
        "def test_sick(transformer_doctor):\n"
        "    from brickformer.doctor.mutants.bug import module_of\n"
        f"    model = module_of(*{SICK!r}).make()\n"
        "    transformer_doctor.check(model, allow=('mask value',))\n    transformer_doctor.check(model)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "brickformer.doctor.plugin", "-p", "no:cacheprovider", "."]
    env = {"PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "1 failed, 1 passed" in done.stdout and "ERROR  mask value" in done.stdout, done.stdout + done.stderr


def test_a_model_that_takes_long_is_left_in_time() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
            self.calls = 0

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            end = time.thread_time() + 0.02
            while time.thread_time() < end:
                pass
            return self.out(self.embed(ids).cumsum(1))

    report = diagnose(Slow(), kind="decoder", vocab=11, seconds=0.6)
    said = [v for v in report.verdicts if v.outcome == "untested"]
    assert said and all("one call takes about" in v.detail for v in said)


def test_the_time_of_other_threads_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(1000.0)
    monkeypatch.setattr(time, "process_time", lambda: 1e9)
    assert budget.used < 1000.0


def test_a_budget_counts() -> None:
    budget = Budget(1000.0)
    budget.share(0.5)
    budget.tick()
    assert budget.calls == 1
    budget.until = 0.0
    with pytest.raises(OutOfTime, match="one call takes about"):
        budget.tick()


def test_curves() -> None:
    drawn = curves({"right": [4.0, 3.0, 2.0], "broken": [4.0, 4.0, float("nan")]}, width=6, height=5)
    assert drawn[0].startswith("   4.00 |*") and "b" in drawn[0] and "r" in drawn[2]
    assert curves({"right": [float("nan")]}) == ["(no finite loss)"]


def test_the_article_s_traps_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trap", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ALL) >= 11 and lines[0].startswith("mask-zero")
    assert main(["trap", "mask-zer"]) == 2
    assert "mask-zero" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mask-zero", "memory-not-passed"])
def test_a_trap_shows_the_lines_the_curves_and_the_finding(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trap", name, "--seconds", "0.2", "--no-wait"]) == 0
    said = capsys.readouterr().out
    lesson = LESSONS[name]
    for part in (lesson.question, lesson.answer, lesson.fix, "r = right", "b = broken", "the doctor:\n  error"):
        assert part in said


@pytest.mark.parametrize("lesson", ALL, ids=lambda lesson: lesson.name)
def test_every_lesson_trains(lesson: Any) -> None:
    """One loss of the right and of the broken model, and the lines that differ."""
    for module in lesson.modules():
        torch.manual_seed(0)
        assert getattr(module, lesson.loss)(getattr(module, lesson.make)(), *batch(lesson, 0, 2)).item() > 0
    assert all(right != broken for right, broken in lesson.lines())


@pytest.mark.parametrize(
    "bad",
    [
        ["model.py:make", "--exam"],
        ["--exam", "--pad", "0"],
        ["--exam", "--json"],
        ["model.py:make", "--table", "doctor.md"],
        ["model.py:make", "--only", "mask"],
        ["--exam", "--only", "mask", "--table", "doctor.md"],
    ],
)
def test_no_option_is_dropped_in_silence(
    bad: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("brickformer.cli.exam.exam", lambda *a: 0)
    assert main(["doctor", *bad]) == 2
    assert "brick: doctor --" in capsys.readouterr().err


def test_the_exam_passes_on_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    real = diagnose
    monkeypatch.setattr(doctor, "diagnose", lambda s, **k: (given.append(k), real(s))[1])
    assert main(["doctor", "--exam", "--only", "a window", "--seconds", "7"]) == 0
    assert given == [{"seconds": 7.0}]


def test_no_answer_is_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-D at the question of a lesson."""

    def ends(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", ends)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main(["trap", "mask-zero", "--seconds", "0.2"]) == 0
    assert "answer:" in capsys.readouterr().out


def test_the_exam_rebuilds_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "BUGS", tuple(b for b in BUGS if "top_k keeps" in b.name))
    monkeypatch.setattr(mutants, "CLEAN", ())
    page_ = tmp_path / "doctor.md"
    page_.write_text("before\n<!-- exam: begin -->\nold\n<!-- exam: end -->\nafter\n")
    assert main(["doctor", "--exam", "--table", str(page_)]) == 0
    text = page_.read_text()
    assert "| sampling filters | 1 | 1 | 1 | - |" in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    capsys.readouterr()
    page_.write_text("nothing")
    assert main(["doctor", "--exam", "--table", str(page_)]) == 2
    assert "exam: begin" in capsys.readouterr().err


def test_every_case_of_the_public_list_is_built_or_said_to_be_elsewhere() -> None:
    """The ids that the table of docs/doctor.md counts."""
    built = {case for bug in BUGS for case in bug.cases}
    assert len(built) == 90 and "R102" not in built  # an accuracy that an evaluation script counted
