"""docs/claims.md is what the kept measurements say, row by row, and every link in it leads somewhere."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """bench/claims.py, whose neighbours have common names: they leave with the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(ROOT / "bench")
    import claims

    yield claims
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("claims", "common", "rows"):
            del sys.modules[name]


def test_the_page_is_what_was_measured(claims: ModuleType) -> None:
    assert (ROOT / "docs" / "claims.md").read_text("utf-8") == claims.page()


def test_every_row_is_whole(claims: ModuleType) -> None:
    kept = sorted((ROOT / "bench" / "results" / "claims").glob("*.json"))
    assert {f.stem for f in kept} <= set(claims.ROWS)
    for file in kept:
        row = json.loads(file.read_text("utf-8"))
        assert row["verdict"] in ("agrees", "in part", "differs"), file.name
        assert row["verdict"] == "agrees" or row["why"], f"{file.name}: differs, and does not say why"


def test_links_lead_somewhere() -> None:
    text = (ROOT / "docs" / "claims.md").read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / target).is_file(), target
    anchors = set(re.findall(r'<a id="(\w+)">', text))
    assert set(re.findall(r"\]\(#(\w+)\)", text)) == anchors
