"""The tokenizers of a Marian model: pieces of text by SentencePiece, their ids by a list of the model's own.

    encode : text -> [>>language<<] pieces by source.spm (target.spm) -> ids by vocab.json, then the end
    decode : ids -> pieces -> text, special ones left out

A piece that the list does not have is unknown, whatever its number in the SentencePiece model. Special tokens that are
written in a text are read as such, each by itself, and what is between them as texts of their own.
SentencePiece: https://arxiv.org/abs/1808.06226
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, Final, Literal, final

from brickformer.errors import DataError
from brickformer.tasks.carried import Files, ends_of, packed, unpacked
from brickformer.tasks.tokenizer import Tokenizer

Side = Literal["source", "target"]
CONFIG: Final = "tokenizer_config.json"
_NAMED: Final = ("eos_token", "unk_token", "pad_token", "bos_token", "sep_token", "cls_token", "mask_token")
_USUAL: Final = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

GAPS: Final = 100
"""How many ids there may be for one that has a piece: a list of all of them is made."""


@final
class PiecesTokenizer(Tokenizer, kind="pieces", unit="piece"):
    """One side of a Marian model. files: source.spm, target.spm, vocab.json and what is beside them, word for word.

    ends: the ids at which an answer ends. Errors: DataError: a file missing or broken, the package not installed.
    """

    def __init__(self, files: Files, *, side: Side, ends: Iterable[int] = ()) -> None:
        self.files: Final = dict(files)
        setup = self._json(CONFIG) if CONFIG in self.files else {}
        named = setup if "added_tokens_decoder" in setup else setup | self._also("special_tokens_map.json")
        if setup.get("separate_vocabs"):
            raise DataError(f"{CONFIG}: separate_vocabs: the pieces of both sides have to be in one vocab.json.")
        self._side: Side = side
        self._model = self._spm(f"{side}.spm")
        self._writes = self._model if side == "source" else self._spm("source.spm")  # both sides, theirs too
        specials = {name: _text(named.get(name, _USUAL.get(name)), name) for name in _NAMED}
        more = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
        listed = [_text(token, "additional_special_tokens") for token in more]
        added = self._added(setup)
        self._all: dict[str, int] = {**self._ids_in("vocab.json"), **added}
        last, count = max(self._all, key=self._all.__getitem__), len(self._all)
        if self._all[last] > GAPS * count + GAPS:
            raise DataError(f"vocab.json: broken: {count} pieces, and {last!r} has id {self._all[last]}.")
        names = [name for name in (*specials.values(), *listed) if name is not None]
        for name in names:
            if name not in self._all:
                raise DataError(f"vocab.json: has no {name!r}, a special token of {CONFIG}. Do they belong together?")
        self._special = frozenset(self._all[name] for name in names)
        self._end, self._unknown = self._all[str(specials["eos_token"])], self._all[str(specials["unk_token"])]
        alone = sorted({*names, *added}, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, alone)) + ")")
        self._ends = tuple(ends) or (self._end,)
        words = {i: piece for piece, i in self._all.items()}
        super().__init__((words.get(i, f"<nothing {i}>") for i in range(max(words) + 1)), specials=False)

    def _json(self, name: str) -> dict[str, Any]:
        """A file that is an object. Errors: DataError."""
        try:
            data = json.loads(self.files[name])
        except KeyError:
            raise DataError(f"{name}: missing beside {self._side}.spm. The folder was copied in part.") from None
        except (ValueError, RecursionError):
            raise DataError(f"{name}: broken: it is not JSON. Copy it again.") from None
        if not isinstance(data, dict):
            raise DataError(f"{name}: broken: expected a JSON object, found {type(data).__name__}.")
        return data

    def _also(self, name: str) -> dict[str, Any]:
        return self._json(name) if name in self.files else {}

    def _ids_in(self, name: str) -> dict[str, int]:
        """A list of pieces. Errors: DataError: what is no id in it."""
        data = self._json(name)
        for piece, i in data.items():
            if type(i) is not int or not 0 <= i < 2**31:
                raise DataError(f"{name}: {piece!r}: got {str(i)[:20]!r}, expected an id.")
        if len(set(data.values())) < len(data) or not data:
            raise DataError(f"{name}: broken: " + ("two pieces have one id." if data else "no piece in it."))
        return data

    def _spm(self, name: str) -> Any:
        """A SentencePiece model. Errors: DataError: not there, broken, no package."""
        try:
            import sentencepiece
        except ImportError:
            raise DataError(
                f"{name}: the package `sentencepiece` is not installed. pip install 'brickformer[hf]'"
            ) from None
        data = self.files.get(name)
        if not isinstance(data, bytes):
            raise DataError(f"{name}: missing. The folder was copied in part; copy it again.")
        model = sentencepiece.SentencePieceProcessor()
        try:
            whole = bool(data) and model.LoadFromSerializedProto(data)
        except Exception:  # whatever the package raises
            whole = False
        if not whole:
            raise DataError(f"{name}: broken: it is no SentencePiece model. It was cut off; copy it again.")
        return model

    def _added(self, setup: Mapping[str, Any]) -> dict[str, int]:
        """Tokens that are read wherever they are written. Errors: DataError: one that eats spaces, too."""
        if "added_tokens_decoder" not in setup:
            return self._ids_in("added_tokens.json") if self.files.get("added_tokens.json") else {}
        added = setup["added_tokens_decoder"]
        if not isinstance(added, dict) or not all(i.isdecimal() and len(i) < 10 for i in added):
            raise DataError(f"{CONFIG}: added_tokens_decoder: expected an object of tokens by id.")
        for token in added.values():
            if isinstance(token, dict) and any(token.get(how) for how in ("lstrip", "rstrip", "single_word")):
                raise DataError(
                    f"{CONFIG}: {token.get('content')!r}: lstrip, rstrip and single_word are not read here."
                )
        return {str(_text(token, "added_tokens_decoder")): int(i) for i, token in added.items()}

    @property
    def bos(self) -> None:
        """No id opens a text."""
        return None

    @property
    def eos(self) -> int:
        """The first of the ids that close one."""
        return self._ends[0]

    @property
    def ends(self) -> tuple[int, ...]:
        """All ids that close one."""
        return self._ends

    def encode(self, text: str, where: str = "text") -> list[int]:
        """Ids of a text, the end included."""
        ids: list[int] = []
        for at, part in enumerate(self._cut.split(text)):
            ids += [self._all[part]] if at % 2 else [self._all.get(p, self._unknown) for p in self._pieces(part)]
        return [*ids, self._end]

    def _pieces(self, text: str) -> list[str]:
        """Pieces of a text without special tokens; a language at its beginning is one."""
        end = text.find("<<") + 2 if text.startswith(">>") else 1
        code, rest = ([text[:end]], text[end:]) if end > 1 else ([], text)
        return code + list(self._model.encode(rest, out_type=str))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special ones are left out. Errors: DataError for an id outside V."""
        listed = list(map(index, ids))
        pieces = [piece for i, piece in zip(listed, map(self.token, listed), strict=True) if i not in self._special]
        out: str = self._writes.decode_pieces(pieces)
        return out.replace("▁", " ").strip()

    def token(self, id: int) -> str:
        """How one id is shown to a person. Errors: DataError outside V."""
        if not 0 <= id < self.vocab:
            raise DataError(f"decode: got id {id}, expected 0 to {self.vocab - 1}. Was it made by another tokenizer?")
        return self.tokens[id]

    @staticmethod
    def _is_token(token: str) -> bool:
        return True

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads back to an equal tokenizer."""
        return {"kind": self.kind, "side": self._side, "ends": list(self._ends), **packed(self.files)}

    @classmethod
    def _of_json(cls, data: dict[str, Any], where: str) -> Tokenizer:
        extra = set(data) - {"kind", "side", "ends", "files", "bytes"}
        if extra:
            raise DataError(f"{where}.{min(extra)}: a tokenizer of pieces has no such field.")
        side = data.get("side")
        if side != "source" and side != "target":
            raise DataError(f"{where}.side: got {side!r}, expected 'source' or 'target'.")
        return cls(unpacked(data, where), side="source" if side == "source" else "target", ends=ends_of(data, where))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PiecesTokenizer) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.kind, self._side, self.tokens))


def _text(token: Any, name: str) -> str | None:
    """A token as a file says it: a text, or an object with one; None is none. Errors: DataError."""
    content = token.get("content") if isinstance(token, dict) else token
    if content is not None and (not isinstance(content, str) or not content):
        raise DataError(f"{CONFIG}: {name}: got {str(token)[:40]!r}, expected a text.")
    return content
