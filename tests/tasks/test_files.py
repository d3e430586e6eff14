"""Reading files: the same text as Python's own reader, whatever the pieces; and a clear word for every bad file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brickformer.errors import DataError
from brickformer.tasks import Pairs, Text, files, read_lines, read_pieces

PIECES = st.text(st.sampled_from(["\r", "\n", "a", "\t", "é", "\u2028", "\x0b", "\x85", "中", "\U0001f600", "\ufeff"]))


@given(text=PIECES.filter(bool), mark=st.booleans(), piece=st.integers(3, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_in_any_pieces_reads_as_python_reads_it(tmp_path: Path, text: str, mark: bool, piece: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + text.encode())
    with open(path, encoding="utf-8-sig") as f:
        expected = f.read()
    with open(path, encoding="utf-8-sig") as f:
        lines = [(i, line.removesuffix("\n")) for i, line in enumerate(f, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE", piece)
        if not expected:  # a file of nothing but a mark
            with pytest.raises(DataError, match="empty"):
                list(read_pieces(str(path)))
            return
        assert "".join(read_pieces(str(path))) == expected
        assert list(read_lines(str(path))) == lines


def test_a_long_line_is_read_in_pieces_and_joined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.txt"
    path.write_text("x" * 1000 + "\n" + "y" * 1000)
    monkeypatch.setattr(files, "PIECE", 10)
    assert [len(piece) for piece in read_pieces(str(path))][:3] == [10, 10, 10]
    assert list(read_lines(str(path))) == [(1, "x" * 1000), (2, "y" * 1000)]


def test_reading_stops_where_the_reader_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream: the bad byte at the end is not reached by someone who reads the first line only."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"first\n" + b"x" * 100 + b"\xff")
    monkeypatch.setattr(files, "PIECE", 16)
    lines = read_lines(str(path))
    assert next(lines) == (1, "first")
    with pytest.raises(DataError, match="0xff at offset 106"):
        next(lines)


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("abc")
    assert "".join(read_pieces("~/a.txt")) == "abc"


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "only a byte order mark": (b"\xef\xbb\xbf", "the file is empty"),
    "binary": (b"ab\0cd", "binary file (a NUL byte at offset 2), expected UTF-8 text."),
    "binary after a mark": (b"\xef\xbb\xbfab\0", "NUL byte at offset 5"),
    "a picture": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "binary file (a NUL byte at offset 8)"),
    "Latin-1": (
        "a\nbc\ncafé".encode("latin-1"),
        "byte 0xe9 at offset 8 (line 3) is not UTF-8 (unexpected end of data)",
    ),
    "Latin-1 after a mark": (b"\xef\xbb\xbfab\xff", "byte 0xff at offset 5 (line 1) is not UTF-8 (invalid start byte)"),
    "a character cut off": ("ab\n中".encode()[:-1], "byte 0xe4 at offset 3 (line 2) is not UTF-8"),
    "a surrogate": (b"ab\xed\xa0\x80", "byte 0xed at offset 2"),
    "UTF-16": ("hello".encode("utf-16"), "UTF-16 text, expected UTF-8. Save the file as UTF-8."),
    "UTF-32": ("hello".encode("utf-32"), "UTF-32 text, expected UTF-8."),
    "UTF-16 without a mark": ("hello".encode("utf-16-le"), "binary file (a NUL byte at offset 1)"),
}


@pytest.mark.parametrize("piece", [4, 1 << 20])
@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, piece: int) -> None:
    content, says = BAD[case]
    if case == "a picture":
        content = content if piece > 4 else content[8:]  # in small pieces, the first bad byte is met before the NUL
        says = says if piece > 4 else "NUL byte at offset 0"
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    monkeypatch.setattr(files, "PIECE", piece)
    with pytest.raises(DataError, match="bad.txt"):  # a line before the bad place may be no pair
        Pairs(str(path)).prepare(0)
    for read in (_read_all, lambda p: Text(p).prepare(0)):
        with pytest.raises(DataError) as e:
            read(str(path))
        assert str(e.value).startswith(f"{path}: ") and says in str(e.value)
        assert str(e.value).count("\n") < 2


def test_a_bad_byte_far_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offset and the line are those of the file, not of a piece, with characters cut by piece ends on the way."""
    good = "zwölf Boxkämpfer\r\njagen 中\n" * 50
    path = tmp_path / "bad.txt"
    for piece in range(3, 12):
        monkeypatch.setattr(files, "PIECE", piece)
        path.write_bytes(good.encode() + b"ab\xfe")
        with pytest.raises(DataError, match=rf"0xfe at offset {len(good.encode()) + 2} \(line 101\)"):
            _read_all(str(path))


@pytest.mark.parametrize("task", [Text, Pairs])
def test_a_file_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Any) -> None:
    (tmp_path / "book.txt").write_text("abc")
    cases = {
        str(tmp_path / "bok.txt"): f"no such file. Did you mean {tmp_path / 'book.txt'}?",
        str(tmp_path / "zzz"): "no such file. Check the path.",
        str(tmp_path / "no" / "zzz"): f"no such file. There is no directory {tmp_path / 'no'} either.",
        str(tmp_path): "is a directory, expected a text file.",
        str(tmp_path / "book.txt" / "x"): "cannot be opened: Not a directory.",
        "a\0b": "cannot be opened: embedded null byte.",
        "x" * 5000: "cannot be opened: File name too long.",
    }
    for path, says in cases.items():
        with pytest.raises(DataError) as e:
            task(path).prepare(0)
        assert says in str(e.value) and len(str(e.value)) < 400
        assert str(e.value).startswith((f"{path}: ", ascii(path[:200])))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"boook.txt: no such file. Did you mean book.txt\?"):
        task("boook.txt").prepare(0)


def test_a_file_one_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("abc")
    path.chmod(0)
    if os.access(path, os.R_OK):  # for root every file is readable: let the call fail as it does for others
        monkeypatch.setattr("builtins.open", _raiser(PermissionError(13, "Permission denied")))
    with pytest.raises(DataError, match="secret.txt: no permission to read it. Change its permissions"):
        _read_all(str(path))


def test_a_disk_that_fails_while_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc")

    class Broken:
        read1 = staticmethod(_raiser(OSError(5, "Input/output error")))

        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("builtins.open", lambda *_: Broken())
    with pytest.raises(DataError, match="a.txt: cannot be read: Input/output error."):
        _read_all(str(path))


def _read_all(path: str) -> None:
    for _ in read_pieces(path):
        pass


def _raiser(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail
