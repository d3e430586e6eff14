"""Reading a person's text file: a piece at a time, and with a clear word when it is not one.

The text is UTF-8. A byte order mark at the start is dropped and line ends (CRLF, CR) become "\\n"; nothing else
changes: no normalization, no stripping. Everything that goes wrong is a DataError that names the file and the place.
"""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Final

from brickformer.errors import DataError

PIECE: Final = 1 << 20  # bytes read at a time
_OTHER_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def read_pieces(path: str) -> Iterator[str]:
    """The text of a file in pieces of about a megabyte. Errors: DataError: missing, a directory, unreadable, empty,
    binary (a NUL byte), or not UTF-8; with the offset in bytes from the start of the file, counted from 0."""
    empty = True
    with _open(path) as file:
        for text in _pieces(file, path):
            empty = False
            yield text
    if empty:
        raise DataError(f"{path}: the file is empty, expected UTF-8 text.")


def read_lines(path: str) -> Iterator[tuple[int, str]]:
    """The lines of a file, numbered from 1, without their ends. Errors: as `read_pieces`, after the lines before it."""
    return _lines(read_pieces(path))


def read_stream(file: io.BufferedIOBase, name: str) -> Iterator[tuple[int, str]]:
    """The lines of an open file, each as soon as it is there; none is fine. Errors: as `read_lines`."""
    return _lines(_pieces(file, name))


def _pieces(file: io.BufferedIOBase, path: str) -> Iterator[str]:
    """The text of a file as it comes; where it is not text, what is before that, then the error."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line_ends = io.IncrementalNewlineDecoder(None, translate=True)
    offset, line = 0, 1
    while True:
        piece = _read(file, path)
        last = not piece
        if offset == 0:
            _refuse_other_encodings(piece, path)
            if piece.startswith(codecs.BOM_UTF8):
                piece, offset = piece[3:], 3
        wrong = None
        nul = piece.find(b"\0")
        if nul >= 0:
            wrong = DataError(f"{path}: binary file (a NUL byte at offset {offset + nul}), expected UTF-8 text.")
            piece = piece[:nul]
        begun = len(decoder.getstate()[0])  # bytes of a character cut by the end of the last piece
        try:
            text = decoder.decode(piece, last)
        except UnicodeDecodeError as e:
            at, bad = offset - begun + e.start, e.object[e.start]
            row = line + e.object[: e.start].count(b"\n")
            wrong = wrong or DataError(
                f"{path}: byte 0x{bad:02x} at offset {at} (line {row}) is not UTF-8 ({e.reason}). "
                "Save the file as UTF-8 text."
            )
            text = e.object[: e.start].decode()
        offset, line = offset + len(piece), line + piece.count(b"\n")
        text = line_ends.decode(text, last)
        if text:
            yield text
        if wrong is not None:
            raise wrong
        if last:
            break


def _lines(pieces: Iterator[str]) -> Iterator[tuple[int, str]]:
    number, begun = 1, list[str]()  # pieces of a line whose end is not read yet: joined once, however long it is
    for piece in pieces:
        *whole, rest = piece.split("\n")
        for end in whole:
            yield number, "".join((*begun, end))
            number, begun = number + 1, []
        begun.append(rest)
    last = "".join(begun)
    if last:
        yield number, last


def _open(path: str) -> io.BufferedReader:
    try:
        return open(os.path.expanduser(path), "rb")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.{_near(path)}") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a directory, expected a text file. Name a file in it.") from None
    except PermissionError:
        raise DataError(f"{path}: no permission to read it. Change its permissions or use a copy.") from None
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        shown = repr(path) if len(path) < 200 else repr(path[:200]) + "..."
        raise DataError(f"{shown}: cannot be opened: {_reason(e)}.") from None


def _read(file: io.BufferedIOBase, path: str) -> bytes:
    try:
        return file.read1(PIECE)
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {_reason(e)}.") from None


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _refuse_other_encodings(piece: bytes, path: str) -> None:
    for mark, name in _OTHER_MARKS:
        if piece.startswith(mark):
            raise DataError(f"{path}: {name} text, expected UTF-8. Save the file as UTF-8.")


def _near(path: str) -> str:
    """What the person may have meant: a file of nearly the same name, or that even the folder is missing."""
    folder, name = os.path.split(os.path.expanduser(path))
    try:
        there = os.listdir(folder or ".")
    except OSError:
        return f" There is no directory {folder} either." if not os.path.exists(folder) else ""
    close = get_close_matches(name, there, n=1, cutoff=0.75)
    return f" Did you mean {os.path.join(os.path.dirname(path), close[0])}?" if close else " Check the path."
