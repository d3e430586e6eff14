"""The command line, called in the process; and a run of the default recipe, which tests may use and none may change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from brickformer import spec
from brickformer.cli import main
from brickformer.recipes.bricks import import_bricks

TINY = """--steps 3 --set train.batch=4 --set task.train=20 --set task.valid=5 --set model.*.dim=16 --set
model.*.layers.*.ffn.hidden=16""".split()


@dataclass(frozen=True)
class Said:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The error: it must be one, of one or two lines."""
        assert self.code == 2, f"exit code {self.code}\n{self.out}\n{self.err}"
        lines = self.err.strip().splitlines()
        assert 1 <= len(lines) <= 2, self.err
        assert lines[-1].startswith("brick: ") and "Traceback" not in self.err
        return self.err


Brick = Callable[..., Said]


@pytest.fixture
def brick(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Brick:
    """`brick("show", "gpt2")` in an empty folder, on a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    import_bricks()
    monkeypatch.setattr(spec, "_REGISTRY", dict(spec._REGISTRY))  # bricks of --use stay with their test

    def run(*args: str | Path) -> Said:
        capsys.readouterr()
        code = main([str(a) for a in args])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `brick train reverse` as it comes, trained once."""
    out = tmp_path_factory.mktemp("trained")
    assert main(["train", "reverse", "--out", str(out)]) == 0
    return out / "reverse-001"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps: it knows nothing, but it is whole."""
    out = tmp_path_factory.mktemp("tiny")
    assert main(["train", "reverse", "--out", str(out), *TINY]) == 0
    return out / "reverse-001"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, byte by byte: what has to stay as it is."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
