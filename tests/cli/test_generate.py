"""`brick generate`: items from the command line, a file, standard input; with and without the cache."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from cli.conftest import Brick

from brickformer.errors import RunError
from brickformer.generate.engine import Decoding


def test_it_answers(brick: Brick, trained: Path) -> None:
    said = brick("generate", trained, "7 1 4")
    assert (said.code, said.out, said.err) == (0, "4 1 7\n", "")


def test_items_come_from_a_file_or_from_standard_input(
    brick: Brick, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items, answers = "7 1 4\n1 2 3 4\n\n9 8 7\n", "4 1 7\n4 3 2 1\n\n7 8 9\n"
    Path("items.txt").write_text(items)
    assert brick("generate", trained, "items.txt").out == answers
    monkeypatch.setattr("sys.stdin", io.StringIO(items))
    assert brick("generate", trained).out == answers


def test_without_the_cache_the_answers_are_the_same(brick: Brick, trained: Path, tiny: Path) -> None:
    for run in (trained, tiny):  # the one that knows nothing writes to the end of its patience
        items = ["7 1 4", "0 0 1 2", "9 8 7 6 5 4"]
        with_cache = brick("generate", run, *items, "--set", "max_tokens=30")
        without = brick("generate", run, *items, "--set", "max_tokens=30", "--no-cache", "--stats")
        assert with_cache.out == without.out
        assert "cache 0 bytes" in without.err and "ms a token" in without.err


def test_an_item_that_fails_is_named_and_the_others_go_on(brick: Brick, trained: Path) -> None:
    said = brick("generate", trained, "7 1 4", "7 x 4", "1 2 3")
    assert said.code == 2 and said.out == "4 1 7\n3 2 1\n"
    assert said.err.count("\n") == 1 and "'7 x 4', word 2: got 'x'" in said.err
    Path("items.txt").write_text("1 2 3\n7 1 ½\n4 5 6\n")
    said = brick("generate", trained, "items.txt")
    assert said.code == 2 and said.out == "3 2 1\n\n6 5 4\n", "line i answers line i"
    assert "items.txt, line 2, word 3: got '½'" in said.err
    assert "expected at least one token" in brick("generate", trained, "").error


def test_settings_of_sampling_and_of_the_end(brick: Brick, trained: Path) -> None:
    assert brick("generate", trained, "7 1 4", "--set", "max_tokens=2").out == "4 1\n"
    assert brick("generate", trained, "7 1 4", "--set", 'texts=["1"]').out.strip() == "4"
    draws = {
        brick("generate", trained, "7 1 4", "--set", "temperature=50", "--set", f"seed={seed}").out for seed in range(4)
    }
    assert len(draws) > 1
    same = ["generate", trained, "7 1 4", "--set", "temperature=50", "--set", "seed=1"]
    assert brick(*same).out == brick(*same).out


def test_beam_search(brick: Brick, trained: Path) -> None:
    assert brick("generate", trained, "7 1 4", "1 2 3", "--set", "width=3").out == "4 1 7\n3 2 1\n"
    two = brick("generate", trained, "7 1 4", "--set", "width=3", "--set", "best=2").out.splitlines()
    assert two[0] == "4 1 7" and len(two) == 2
    assert "draws nothing" in brick("generate", trained, "7 1 4", "--set", "width=3", "--set", "seed=1").error


def test_what_is_not_text_on_standard_input(brick: Brick, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"1 2 3\n\xff\xfe\n"), encoding="utf-8"))
    said = brick("generate", tiny)
    assert "standard input: byte 0xff at offset 6 (line 2) is not UTF-8" in said.error
    assert said.out == brick("generate", tiny, "1 2 3").out, "the line before it is answered"


@pytest.mark.parametrize("source", ["file", "standard input", "pipe"])
@pytest.mark.parametrize(
    ("data", "items", "error"),
    [
        (b"\xef\xbb\xbf7 1 4\r\n1 2 3\r\n", ["7 1 4", "1 2 3"], None),
        (b"7 1 4\r1 2 3", ["7 1 4", "1 2 3"], None),
        (b"7 1 4\n\n1 2 3\n", ["7 1 4", "1 2 3"], None),
        (b"7 1 4\n1 2 3\n4 \x00 5\n", ["7 1 4", "1 2 3"], "binary file (a NUL byte at offset 14)"),
        (b"7 1 4\n1 2 3\n4 \xe4\xbd\n", ["7 1 4", "1 2 3"], "byte 0xe4 at offset 14 (line 3) is not UTF-8"),
        ("7 1 4\n".encode("utf-16"), [], "UTF-16 text"),
    ],
    ids=["mark", "CR", "blank", "NUL", "cut", "UTF-16"],
)
def test_text_as_systems_write_it(
    brick: Brick, tiny: Path, monkeypatch: pytest.MonkeyPatch, source: str, data: bytes, items: list[str], error: str
) -> None:
    asked = []
    match source:
        case "file":
            Path("items").write_bytes(data)
            asked = ["items"]
        case "pipe":  # <(command)
            out, into = os.pipe()
            os.write(into, data)
            os.close(into)
            asked = [f"/dev/fd/{out}"]
        case _:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    said = brick("generate", tiny, *asked)
    answers = brick("generate", tiny, *items).out.splitlines() if items else []
    assert [line for line in said.out.splitlines() if line] == answers
    assert error in said.error if error else said.code == 0


@pytest.mark.parametrize("stops", [KeyboardInterrupt, RunError])
def test_what_ends_a_stream_has_a_line_of_its_own(
    brick: Brick, tiny: Path, monkeypatch: pytest.MonkeyPatch, stops: type[BaseException]
) -> None:
    step = Decoding.step

    def ends(run: Decoding) -> None:
        if len(run.lanes[0].result.tokens) < 3:
            step(run)
        elif stops is KeyboardInterrupt:
            raise KeyboardInterrupt
        else:
            run._fail(RunError("enough."))

    monkeypatch.setattr(Decoding, "step", ends)
    Path("items").write_text("1 2 3\n")
    said = brick("generate", tiny, "items", "--stream", "--set", "min_tokens=5")
    assert said.out.count("\n") == 1 and said.out.endswith("\n") and len(said.out.split()) == 3
    assert said.err == ("brick: stopped.\n" if stops is KeyboardInterrupt else "brick: items, line 1, enough.\n")


def test_wrong_settings(brick: Brick, tiny: Path) -> None:
    assert "did you mean 'temperature'?" in brick("generate", tiny, "1 2 3", "--set", "temprature=1").error
    assert "temperature: got -1" in brick("generate", tiny, "1 2 3", "--set", "temperature=-1").error
    assert "expected int" in brick("generate", tiny, "1 2 3", "--set", "top_k=many", "--set", "temperature=1").error
