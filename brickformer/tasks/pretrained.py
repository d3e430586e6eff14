"""The tokenizer of a published model, as its tokenizer.json says, run by the `tokenizers` package.

    encode : text -> ids, with the special tokens that its template puts around a text
    decode : ids -> text, special tokens left out; after a special one a text begins, else it goes on

There is one question, about a space. Many vocabularies write a word with the space before it, and a decoder then drops
the one at the beginning of a text. A continuation must keep it, or it would stick to its prompt. So ids that open with
a special token are decoded as a text, others as its continuation; the answers of an encoder-decoder go on with nothing.
The files are kept word for word, so that they can be given back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from operator import index
from typing import Any, Final, final

from brickformer.errors import DataError
from brickformer.tasks.carried import Files, ends_of, packed, unpacked
from brickformer.tasks.tokenizer import Tokenizer

MAIN: Final = "tokenizer.json"


@final
class PretrainedTokenizer(Tokenizer, kind="pretrained", unit="token"):
    """A tokenizer of the `tokenizers` package. files: its files by name, word for word; one is tokenizer.json.

    bos: the id that opens a text. ends: the ids at which an answer ends. whole: what it decodes is always a text.
    Errors: DataError: the package is not installed, the file cannot be read.
    """

    def __init__(self, files: Files, *, bos: int | None = None, ends: Iterable[int] = (), whole: bool = False) -> None:
        try:
            import tokenizers
        except ImportError:
            raise DataError(
                "pretrained tokenizer: the package `tokenizers` is not installed. pip install 'brickformer[hf]'"
            ) from None
        self.files: Final = dict(files)
        try:
            main = str(self.files[MAIN])
            self._inner: Any = tokenizers.Tokenizer.from_str(main)
        except KeyError:
            raise DataError(f"pretrained tokenizer: got no {MAIN}, expected one among its files.") from None
        except Exception as e:  # whatever the package raises
            reason = (str(e).splitlines() or [type(e).__name__])[0][:100]
            raise DataError(f"{MAIN}: not a tokenizer: {reason}.") from None
        self._inner.no_padding()
        self._inner.no_truncation()
        count = int(self._inner.get_vocab_size(with_added_tokens=True))
        words = {int(i): word for word, i in self._inner.get_vocab(with_added_tokens=True).items()}
        super().__init__((words.get(i, f"<nothing {i}>") for i in range(max(words, default=-1) + 1)), specials=False)
        added = json.loads(main).get("added_tokens") or []
        self._special = frozenset(int(token["id"]) for token in added if token.get("special"))
        self._bos, self._ends, self._whole = bos, tuple(ends), whole
        self._anchor: list[int] = next((i for i in ([j] for j in range(count)) if self._text(i).strip()), [])

    @property
    def bos(self) -> int | None:
        """The id that opens a text."""
        return self._bos

    @property
    def eos(self) -> int | None:
        """The first of the ids that close one."""
        return self._ends[0] if self._ends else None

    @property
    def ends(self) -> tuple[int, ...]:
        """All ids that close one."""
        return self._ends

    def encode(self, text: str, where: str = "text") -> list[int]:
        """Ids of a text, special tokens included where the tokenizer's template has any. Errors: DataError."""
        try:
            ids: list[int] = self._inner.encode(text).ids
        except Exception as e:  # a vocabulary without an unknown token meets one
            raise DataError(f"{where}: the tokenizer knows no tokens for it ({str(e)[:80]}).") from None
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special ones are left out. Errors: DataError for an id outside V."""
        listed = list(map(index, ids))
        for i in listed:
            self.token(i)
        plain = [i for i in listed if i not in self._special]
        if not plain or self._whole or listed[0] in self._special:
            return self._text(plain)
        before = self._text(self._anchor)
        return self._text([*self._anchor, *plain])[len(before) :]

    def token(self, id: int) -> str:
        """How one id is shown to a person. Errors: DataError outside V."""
        if not 0 <= id < self.vocab:
            raise DataError(f"decode: got id {id}, expected 0 to {self.vocab - 1}. Was it made by another tokenizer?")
        return self.tokens[id]

    def _text(self, ids: list[int]) -> str:
        out: str = self._inner.decode(ids, skip_special_tokens=True)
        return out

    @staticmethod
    def _is_token(token: str) -> bool:
        return True

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads back to an equal tokenizer."""
        whole = {"whole": True} if self._whole else {}
        return {"kind": self.kind, "bos": self._bos, "ends": list(self._ends), **whole, **packed(self.files)}

    @classmethod
    def _of_json(cls, data: dict[str, Any], where: str) -> Tokenizer:
        bos, whole = data.get("bos"), data.get("whole", False)
        extra = set(data) - {"kind", "bos", "ends", "whole", "files", "bytes"}
        if extra:
            raise DataError(f"{where}.{min(extra)}: a pretrained tokenizer has no such field.")
        if bos is not None and type(bos) is not int:
            raise DataError(f"{where}.bos: got {bos!r}, expected an id or null.")
        if type(whole) is not bool:
            raise DataError(f"{where}.whole: got {whole!r}, expected true or false.")
        return cls(unpacked(data, where), bos=bos, ends=ends_of(data, where), whole=whole)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PretrainedTokenizer) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.kind, self.files[MAIN]))
