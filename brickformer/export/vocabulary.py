"""A tokenizer.json as llama.cpp's vocabulary: which of its tokenizers says the same, and the list of tokens for it.

    BPE that falls back to bytes      "llama"   joins neighbours by the score of what they make
    BPE over bytes (GPT-2's)          "gpt2"    merges, and a name for how text is cut before them
    characters                        "gpt2"    merges that join the bytes of one character, and no more
    nothing                           "none"    ids only

In "llama" the score of a token is minus the rank of the merge that makes it; single characters are never made. In
"gpt2" every byte is written as a visible character.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from brickformer.errors import DataError

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""llama.cpp's kinds of tokens."""
NO_MERGES: Final = ["<none> <none>"]
"""Where nothing is joined: llama.cpp reads no file without merges, and these two are never made."""
_BYTES = {f"<0x{i:02X}>" for i in range(256)}
_CUTS: Final = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+": "qwen2",
}
"""Patterns by which text is cut into words before merges -> llama.cpp's name for them."""


@final
@dataclass(frozen=True, slots=True)
class Vocabulary:
    """model: llama.cpp's tokenizer. tokens, scores, types: one a token. fields: more of llama.cpp's, by their name.

    note: what a user should know of it.
    """

    model: str
    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def vocabulary(text: str | None, count: int, *, bos: int | None, eos: int | None) -> Vocabulary:
    """The vocabulary of a tokenizer.json, filled up to `count` tokens; None is no tokenizer.

    bos, eos: the ids that open and close a text. Errors: DataError: a kind that llama.cpp does not have.
    """
    if text is None:
        return Vocabulary("none")
    data = json.loads(text)
    model, added = data["model"], {int(t["id"]): t for t in data.get("added_tokens") or []}
    ids: dict[int, str] = {int(i): token for token, i in model["vocab"].items()} if _has_ids(model) else {}
    if not ids:
        raise _unknown(f"a model of type {model.get('type')!r}")
    ids |= {i: t["content"] for i, t in added.items()}
    if max(ids) >= count:
        raise DataError(f"tokenizer.json: has a token {max(ids)}, the model {count} tokens. Do they belong together?")
    kinds = [_kind(i, ids, added, model) for i in range(count)]
    tokens = [ids.get(i, f"<unused {i}>") for i in range(count)]
    fields = {f"{name}_token_id": i for name, i in (("bos", bos), ("eos", eos)) if i is not None}
    fields |= _around(data, None if bos is None else tokens[bos], None if eos is None else tokens[eos])
    _check(data)
    if model["type"] == "BPE" and _over_bytes(data):
        merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
        note = "letters and accents that are apart are not joined by llama.cpp" if data.get("normalizer") else ""
        return Vocabulary("gpt2", tokens, [], kinds, merges or NO_MERGES, fields | {"pre": _cut(data)}, note)
    if model["type"] == "BPE" and model.get("byte_fallback"):
        made = {
            "".join(m if isinstance(m, list) else m.split(" ")): i
            for i, m in reversed(list(enumerate(model["merges"])))
        }
        scores = [-float(made.get(token, 0)) for token in tokens]
        unknown = [i for i, kind in enumerate(kinds) if kind == UNKNOWN]
        fields |= {"unknown_token_id": unknown[0]} if unknown else {}
        note = "" if BYTE in kinds else "no tokens of bytes: at a character that it does not know llama.cpp breaks off"
        return Vocabulary("llama", tokens, scores, kinds, [], fields | {"add_space_prefix": _prepends(data)}, note)
    if model["type"] == "WordLevel" and all(len(ids[i]) == 1 for i in ids if i not in added):
        note = "a character that it does not know is left out by llama.cpp, without a word"
        tokens = [token if i in added else _bytes(token) for i, token in enumerate(tokens)]
        merges = list(dict.fromkeys(merge for i, t in enumerate(tokens) if i not in added for merge in _joining(t)))
        return Vocabulary("gpt2", tokens, [], kinds, merges or NO_MERGES, fields | {"pre": "gpt-2"}, note)
    raise _unknown("whole words" if model["type"] == "WordLevel" else f"a {model['type']} without bytes")


def _bytes(text: str) -> str:
    """The bytes of a text as GPT-2 writes them: printable ones of Latin-1 as they are, others from U+0100 on."""
    return "".join(_VISIBLE[b] for b in text.encode())


def _visible() -> dict[int, str]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(0x100 + i) for i, b in enumerate(rest)}


_VISIBLE: Final = _visible()


def _joining(token: str) -> list[str]:
    """The merges that make one character of its bytes, first to last."""
    return [f"{token[:i]} {token[i]}" for i in range(1, len(token))]


def _has_ids(model: Mapping[str, Any]) -> bool:
    return isinstance(model.get("vocab"), dict)


def _unknown(what: str) -> DataError:
    return DataError(
        f"gguf: the tokenizer has {what}; llama.cpp has no such tokenizer. Say --no-tokenizer for ids only."
    )


def _kind(i: int, ids: Mapping[int, str], added: Mapping[int, Any], model: Mapping[str, Any]) -> int:
    if i not in ids:
        return UNUSED
    if ids[i] == model.get("unk_token"):
        return UNKNOWN
    if i in added:
        return CONTROL if added[i].get("special") else USER
    return BYTE if ids[i] in _BYTES else NORMAL


def _steps(part: Mapping[str, Any] | None, inside: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, one or a sequence of them."""
    if part is None:
        return []
    return list(part.get(inside) or [part])


def _over_bytes(data: Mapping[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _cuts(data))


def _cut(data: Mapping[str, Any]) -> str:
    steps = _cuts(data)
    if len(steps) == 1 and steps[0].get("use_regex", True):
        return "gpt-2"
    patterns = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    if len(steps) == 2 and len(patterns) == 1 and patterns[0] in _CUTS:
        return _CUTS[patterns[0]]
    raise _unknown("a way of cutting text into words that has no name")


def _prepends(data: Mapping[str, Any]) -> bool:
    """Whether a text gets a space before it."""
    for step in _steps(data.get("normalizer"), "normalizers"):
        if step["type"] == "Prepend":
            return True
    for step in _cuts(data):
        if step["type"] == "Metaspace":
            return bool(step.get("prepend_scheme", "always") != "never")
    return False


def _around(data: Mapping[str, Any], bos: str | None, eos: str | None) -> dict[str, bool]:
    """Whether the tokenizer puts a token before every text, and one after it. Errors: DataError: other ones."""
    before: list[str] = []
    after: list[str] = []
    for step in _steps(data.get("post_processor"), "processors"):
        if step["type"] not in ("TemplateProcessing", "ByteLevel"):
            raise _unknown(f"{step['type']} after its tokens")
        template = [part.get("SpecialToken", {}).get("id") for part in step.get("single") or [{}]]
        text = template.index(None)
        before, after = before + template[:text], after + template[text + 1 :]
    if before not in ([], [bos]) or after not in ([], [eos]):
        raise _unknown(f"{' '.join(map(str, before + after))} around every text, not its bos and eos")
    return {"add_bos_token": bool(before), "add_eos_token": bool(after)}


def _check(data: Mapping[str, Any]) -> None:
    """What changes ids and has no field there. Errors: DataError."""
    model = data["model"]
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _unknown(f"{name} {model[name]!r}")
    spaces = model.get("byte_fallback") and not _over_bytes(data)
    for step in _steps(data.get("normalizer"), "normalizers"):
        kind = step["type"]
        marked = spaces and (kind == "Prepend" or (kind == "Replace" and step.get("content") == "\u2581"))
        if not marked and kind != "NFC":  # which a note says
            raise _unknown(f"a normalizer {kind}")
    if not _over_bytes(data):
        return
    cut = _cut(data)
    if any(step["type"] == "ByteLevel" and step.get("add_prefix_space") for step in _cuts(data)):
        raise _unknown("add_prefix_space over bytes")
    if bool(model.get("ignore_merges")) != (cut == "llama-bpe"):
        raise _unknown(f"ignore_merges {bool(model.get('ignore_merges'))} with cuts of {cut}")


def _cuts(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return _steps(data.get("pre_tokenizer"), "pretokenizers")
