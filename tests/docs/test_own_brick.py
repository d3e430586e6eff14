"""docs/your-own-brick.md: its file is written, its commands are run, and they say what stands below them.

Numbers that differ between machines (times, rounding errors, losses) are left out of the comparison, and the order of
lines that are written to two streams.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from brickformer import spec
from brickformer.cli import main
from brickformer.recipes.bricks import import_bricks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "your-own-brick.md"
FORGETFUL = "        if state is not None:\n            kept.h = h\n"


def settled(text: str) -> list[str]:
    """The words of a text in any order, without numbers that a machine may say otherwise."""
    text = re.sub(r"^step \d+/\d+ · loss [\d.]+ · [\d,]+ tokens/s\n", "", text, flags=re.M)  # shown where it is slow
    text = re.sub(r"\b[\d,]+ tokens/s|\bin (\d+ min )?[\d.]+ s\b", "#", text)
    return sorted(re.sub(r"(off by|length) [\de.+-]+|\d+\.\d+(e[+-]?\d+)?", "#", " ".join(text.split())).split())


def commands() -> list[tuple[str, str]]:
    """(command, what it says) of every console block."""
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(command, said) for command, _, said in (part.partition("\n") for part in parts)]


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    import_bricks()
    before = dict(spec._REGISTRY)
    match = re.search(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert match is not None
    code = match[1]
    assert code.count(FORGETFUL) == 1
    Path("average.py").write_text(code, "utf-8")
    Path("forgetful.py").write_text(code.replace(FORGETFUL, ""), "utf-8")
    assert [command.split()[1] for command, _ in commands()] == ["list", "check", "check", "train", "generate"]
    for command, expected in commands():
        monkeypatch.setattr(spec, "_REGISTRY", dict(before))  # as in a process of its own
        code_of_exit = main(shlex.split(command)[1:])
        said = capsys.readouterr()
        assert settled(said.out + said.err) == settled(expected), f"{command}\n{said.out}\n{said.err}"
        assert code_of_exit == ("forgetful.py" in command)
