"""Tokens to text, piece by piece: no character is ever split, and nothing of a stop string gets out.

    piece = decode(ids[a:]) - decode(ids[a:b])        a: where the last piece began; b: where it ended

A byte-level tokenizer may cut one character into several tokens, and a word tokenizer puts spaces between tokens, so a
token alone has no text. What is decoded always begins one piece early, which gives the spaces; and while the end
decodes to U+FFFD, the mark of an unfinished character, nothing is released. Text that may be the beginning of a
stop string is held back until it is known whether it is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from brickformer.generate.result import Tokenizer

UNFINISHED: Final = "\ufffd"


@final
class Detokenizer:
    """The text of one answer. text: released so far; stopped: a stop string was found, and the text ends before it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.text = ""
        self.stopped = False
        self._ids: list[int] = []
        self._from = 0  # where the last piece began
        self._read = 0  # where it ended
        self._known = ""  # decode(ids[from:read])
        self._held = ""  # may be the beginning of a stop string

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        if self.stopped:
            return ""
        self._ids.append(token)
        piece = self._new()
        if not piece or piece.endswith(UNFINISHED):
            return ""
        self._from, self._read = self._read, len(self._ids)
        self._known = self.tokenizer.decode(self._ids[self._from : self._read])
        return self._release(piece, last=False)

    def finish(self) -> str:
        """No more tokens: return what was held back."""
        if self.stopped:
            return ""
        piece = self._new()
        self._from = self._read = len(self._ids)
        self._known = ""
        return self._release(piece, last=True)

    def _new(self) -> str:
        """The text of the tokens after the last piece."""
        now = self.tokenizer.decode(self._ids[self._from :])
        if now.startswith(self._known):
            return now[len(self._known) :]
        return self.tokenizer.decode(self._ids[self._read :])  # bytes that are none of a character spoil those before

    def _release(self, piece: str, *, last: bool) -> str:
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if found:
            self.stopped = True
            safe = min(found)
        else:
            safe = len(text) - (0 if last else self._beginning(text))
        out, self._held = text[:safe], "" if self.stopped else text[safe:]
        self.text += out
        return out

    def _beginning(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        longest = min(max(map(len, self.stops), default=1) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self.stops)), 0)
