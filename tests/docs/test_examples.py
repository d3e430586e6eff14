"""What the documents show is true: every Python block runs, every `$ brick` line says what is written below it.

A block is python to be run, in one namespace a document, unless the line before it is `<!-- not run: reason -->`;
a console block holds `$ brick ...` lines and what they print, on either stream. Blocks without a language are not run.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from brickformer import spec
from brickformer.cli import main
from brickformer.recipes.bricks import import_bricks

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [p for p in (ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted(ROOT.glob("docs/*.md"))) if p.is_file()]
BLOCK = re.compile(r"^(?P<before>[^\n]*)\n```(?P<kind>python|console)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: Path, kind: str) -> list[tuple[int, str]]:
    """(line number, code) of the blocks to run."""
    text = document.read_text("utf-8")
    found = []
    for match in BLOCK.finditer(text):
        if match["kind"] == kind and not match["before"].startswith("<!-- not run:"):
            found.append((text.count("\n", 0, match.start("code")) + 1, match["code"]))
    return found


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "python")], ids=lambda d: d.name)
def test_python_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    import_bricks()
    monkeypatch.setattr(spec, "_REGISTRY", dict(spec._REGISTRY))  # bricks of the examples stay with them
    module = ModuleType(f"example_{document.stem}".replace(".", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for line, code in blocks(document, "python"):
        exec(compile("\n" * (line - 1) + code, str(document), "exec"), module.__dict__)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "console")], ids=lambda d: d.name)
def test_console_blocks_say_what_is_written(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for _, code in blocks(document, "console"):
        for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            program, *args = shlex.split(command)
            assert program == "brick"
            main(args)
            said = capsys.readouterr()
            assert said.out + said.err == expected, command


def test_there_are_examples_to_run() -> None:
    """So that a change of the pattern above cannot make every document pass."""
    assert len(blocks(ROOT / "README.md", "python")) >= 2 and len(blocks(ROOT / "README.md", "console")) >= 1
