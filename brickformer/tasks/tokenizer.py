"""Tokenizers: text to ids and back.

    encode : text -> ids in [0, V)        decode : ids -> text, special ids skipped        V = specials + known tokens

Two kinds. `CharTokenizer`: one id per character, where a character is one Unicode code point: an accent written as a
combining mark (U+0301) is a character of its own, no normalization is applied, and decode(encode(text)) == text.
`WordTokenizer`: one id per word, words being what white space separates; decode joins them with single spaces.

Special ids stand for no text and no text encodes to them: PAD 0 fills short rows, BOS 1 opens a target, EOS 2 closes
it. A language model of running text needs none and has none. There is no "unknown" token: text with something the
tokenizer has never seen is a DataError that names it, says where it is, and offers the nearest thing known.
"""

from __future__ import annotations

import json
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable
from difflib import get_close_matches
from operator import index
from typing import Any, ClassVar, Final, final

from brickformer.errors import DataError, nearest

PAD: Final = 0
BOS: Final = 1
EOS: Final = 2
SPECIALS: Final = ("<pad>", "<bos>", "<eos>")  # how PAD, BOS and EOS are shown; never found in text

_FIELDS: Final = ("kind", "specials", "tokens")
_KINDS: dict[str, type[Tokenizer]] = {}
_TYPOGRAPHY: Final = dict(zip("‘’‚“”„«»‐‑‒–—−\t", '\'\'\'"""""------ ', strict=True))  # what a keyboard has instead


class Tokenizer(ABC):
    """A list of known tokens and a way to cut text into them.

    tokens: the known tokens, in the order of their ids. specials: whether PAD, BOS and EOS come before them.
    Errors: DataError for a token that is listed twice or cannot be one, and for an empty list.
    """

    kind: ClassVar[str]
    unit: ClassVar[str]  # what a token is called in messages

    def __init_subclass__(cls, kind: str, unit: str) -> None:
        cls.kind, cls.unit = kind, unit
        _KINDS[kind] = cls

    def __init__(self, tokens: Iterable[str], *, specials: bool) -> None:
        self.tokens: Final = tuple(tokens)
        self.specials: Final = specials
        self.first: Final = len(SPECIALS) if specials else 0  # the id of tokens[0]
        self._ids: Final = {token: i for i, token in enumerate(self.tokens, self.first)}
        if not self.tokens:
            raise DataError(f"{self.kind} tokenizer: got no {self.unit}s, expected at least one.")
        if len(self._ids) < len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens, self.first) if self._ids[t] != i)
            raise DataError(f"{self.kind} tokenizer: {twice!r} is listed twice. Keep one.")
        for token in self.tokens:
            if not self._is_token(token):
                raise DataError(f"{self.kind} tokenizer: got {token!r}, expected one {self.unit}.")

    @property
    def vocab(self) -> int:
        """V, the number of ids, special ones included."""
        return self.first + len(self.tokens)

    @property
    def bos(self) -> int | None:
        """The id that opens a target; None without special ids."""
        return BOS if self.specials else None

    @property
    def eos(self) -> int | None:
        """The id that closes a target; None without special ids."""
        return EOS if self.specials else None

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids at which an answer ends."""
        return () if self.eos is None else (self.eos,)

    @abstractmethod
    def encode(self, text: str, where: str = "text") -> list[int]:
        """Ids of a text, without BOS or EOS. where: what the text is, for the message.

        Errors: DataError naming the first token never seen, its position (from 1) and the nearest one known.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids (a list or a 1-D tensor); special ids are skipped. Errors: DataError for an id outside V."""

    def token(self, id: int) -> str:
        """How one id is shown to a person: the token itself, or <pad>, <bos>, <eos>. Errors: DataError outside V."""
        if not 0 <= id < self.vocab:
            raise DataError(f"decode: got id {id}, expected 0 to {self.vocab - 1}. Was it made by another tokenizer?")
        return SPECIALS[id] if id < self.first else self.tokens[id - self.first]

    def _texts(self, ids: Iterable[int]) -> list[str]:
        """The token of every id that is not special."""
        return [self.token(i) for i in map(index, ids) if not 0 <= i < self.first]

    @staticmethod
    @abstractmethod
    def _is_token(token: str) -> bool: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and (self.kind, self.specials, self.tokens) == (
            other.kind,
            other.specials,
            other.tokens,
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.specials, self.tokens))

    def __repr__(self) -> str:
        return f"<{self.kind} tokenizer, V={self.vocab}>"

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads back to an equal tokenizer."""
        return {"kind": self.kind, "specials": self.specials, "tokens": list(self.tokens)}

    @staticmethod
    def from_json(data: object, where: str = "tokenizer") -> Tokenizer:
        """The tokenizer of `to_json`, read strictly. Errors: DataError: where, got, expected."""
        if not isinstance(data, dict):
            raise DataError(f"{where}: got {_short(data)}, expected an object with kind, specials and tokens.")
        kind = data.get("kind")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise DataError(f"{where}.kind: got {_short(kind)}, expected a tokenizer; {nearest(str(kind), _KINDS)}")
        return _KINDS[kind]._of_json(data, where)

    @classmethod
    def _of_json(cls, data: dict[str, Any], where: str) -> Tokenizer:
        """The tokenizer of this kind that a mapping describes. Errors: DataError."""
        specials, tokens = data.get("specials"), data.get("tokens")
        for name in data:
            if name not in _FIELDS:
                raise DataError(f"{where}.{name}: a tokenizer has no such field; {nearest(name, _FIELDS)}")
        if not isinstance(specials, bool):
            raise DataError(f"{where}.specials: got {_short(specials)}, expected true or false.")
        if not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
            raise DataError(f"{where}.tokens: got {_short(tokens)}, expected a list of texts.")
        try:
            return cls(tokens, specials=specials)
        except DataError as e:
            raise DataError(f"{where}: {e}") from None


@final
class CharTokenizer(Tokenizer, kind="char", unit="character"):
    """One id per character (one Unicode code point)."""

    @classmethod
    def of(cls, text: str, *, specials: bool = False) -> CharTokenizer:
        """The tokenizer that knows the characters of a text, in the order of their code points."""
        return cls(sorted(set(text)), specials=specials)

    def encode(self, text: str, where: str = "text") -> list[int]:
        """One id per character. Errors: DataError naming the first character never seen."""
        known = self._ids
        try:
            return [known[c] for c in text]
        except KeyError:
            at = next(i for i, c in enumerate(text) if c not in known)
            raise self._unseen(text, at, where) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The characters of ids, special ids skipped; the inverse of encode."""
        return "".join(self._texts(ids))

    @staticmethod
    def _is_token(token: str) -> bool:
        return len(token) == 1 and not "\ud800" <= token <= "\udfff"  # half a surrogate pair is in no UTF-8 text

    def _unseen(self, text: str, at: int, where: str) -> DataError:
        char = text[at]
        lines = text[:at].split("\n")
        spot = f"line {len(lines)}, column {len(lines[-1]) + 1}" if "\n" in text else f"character {at + 1}"
        return DataError(
            f"{where}, {spot}: got {_char(char)}, expected one of the {len(self.tokens)} known characters; "
            f"{self._help(char, text[at - 1 : at])}"
        )

    def _help(self, char: str, before: str) -> str:
        """The end of a sentence: what to write instead."""
        composed = unicodedata.normalize("NFC", before + char)
        if unicodedata.combining(char):
            note = "a combining mark is a character of its own"
            return f"{note}: write {composed!r} as one (NFC)." if composed in self._ids else f"{note}: leave it out."
        apart = unicodedata.normalize("NFD", char)
        if len(apart) > 1 and all(c in self._ids for c in apart):
            return f"known is that letter with its accent as a character of its own (NFD): {apart!a}."
        plain = _TYPOGRAPHY.get(char, char)
        for near in (plain, char.lower(), char.upper(), unicodedata.normalize("NFKC", char), apart[0]):
            if near in self._ids:
                return f"the nearest is {near!r}."
        return f"known: {_listed(self.tokens, '')}"


@final
class WordTokenizer(Tokenizer, kind="word", unit="word"):
    """One id per word; words are what white space separates."""

    @classmethod
    def of(cls, text: str, *, specials: bool = False) -> WordTokenizer:
        """The tokenizer that knows the words of a text, in the order of their code points."""
        return cls(sorted(set(text.split())), specials=specials)

    def encode(self, text: str, where: str = "text") -> list[int]:
        """One id per word. Errors: DataError naming the first word never seen."""
        known = self._ids
        try:
            return [known[word] for word in text.split()]
        except KeyError:
            at, word = next((i, w) for i, w in enumerate(text.split(), 1) if w not in known)
            raise DataError(
                f"{where}, word {at}: got {_short(word)}, expected one of the {len(self.tokens)} known "
                f"words; {self._help(word)}"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The words of ids joined with single spaces, special ids skipped."""
        return " ".join(self._texts(ids))

    @staticmethod
    def _is_token(token: str) -> bool:
        return token.split() == [token] and not any("\ud800" <= c <= "\udfff" for c in token)

    def _help(self, word: str) -> str:
        """The end of a sentence: what to write instead."""
        if all(c in self._ids for c in word):
            return f"write its parts with spaces between them: {_short(' '.join(word))}."
        for near in (word.lower(), word.upper(), word.title(), *get_close_matches(word, self.tokens, n=1)):
            if near in self._ids:
                return f"the nearest is {near!r}."
        return f"known: {_listed(self.tokens, ' ')}"


def dump_tokenizers(source: Tokenizer | None, target: Tokenizer) -> str:
    """The text of a tokenizer.json. source: None for a language model, which has only a target."""
    both = {"source": source.to_json() if source else None, "target": target.to_json()}
    return json.dumps(both, ensure_ascii=False, indent=1) + "\n"


def load_tokenizers(text: str, where: str = "tokenizer.json") -> tuple[Tokenizer | None, Tokenizer]:
    """Source and target tokenizers from the text of a tokenizer.json. Errors: DataError: cut off, unknown kind, ..."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as e:
        raise DataError(
            f"{where}: not whole JSON: {e.msg} at line {e.lineno}, column {e.colno}. "
            "The file is cut off or damaged; copy it again from where it was made."
        ) from None
    except RecursionError:
        raise DataError(f"{where}: JSON nested too deeply to be a tokenizer.") from None
    if not isinstance(data, dict) or set(data) != {"source", "target"}:
        raise DataError(f"{where}: got {_short(data)}, expected an object with source and target.")
    source, target = data["source"], data["target"]
    read = Tokenizer.from_json
    return None if source is None else read(source, f"{where}: source"), read(target, f"{where}: target")


def _char(char: str) -> str:
    """A character in a message: as itself where it can be seen, with its code point and name."""
    shown = ascii(char) if unicodedata.category(char)[0] in "MC" else repr(char)
    return f"{shown} (U+{ord(char):04X}{' ' + name if (name := unicodedata.name(char, '')) else ''})"


def _listed(tokens: tuple[str, ...], gap: str) -> str:
    """The known tokens, at most 40 of them."""
    return repr(gap.join(tokens[:40])) + (f" and {len(tokens) - 40} more." if len(tokens) > 40 else ".")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
