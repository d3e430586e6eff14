"""The tokenizer of a checkpoint folder: its files, word for word, and the ids it begins and ends with.

It is run by the `tokenizers` package, from tokenizer.json. Where a folder has an older form only (vocab.txt,
merges.txt, a SentencePiece model) the `transformers` library, where it is installed, makes one of it.
On the way out a list of characters or words becomes a tokenizer.json.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from brickformer.errors import DataError
from brickformer.files import read_json, read_text

MAIN: Final = "tokenizer.json"
BESIDE: Final = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json")
OLDER: Final = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "source.spm")

NO_WORD: Final = "no such token"
"""With spaces in it: neither a character nor a word."""


@final
@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """files: by name, word for word. bos: the id that opens a text. ends: the ids that close one."""

    files: dict[str, str] = field(default_factory=dict)
    bos: int | None = None
    ends: tuple[int, ...] = ()


def read_tokenizer(folder: Path, config: Mapping[str, Any]) -> TokenizerFiles | None:
    """The tokenizer in a folder; None where there is none. Errors: RunError, DataError: a file that cannot be read."""
    files = {name: read_text(folder / name) for name in (MAIN, *BESIDE) if (folder / name).is_file()}
    if MAIN not in files:
        older = [name for name in OLDER if (folder / name).is_file()]
        if not older:
            return None
        files[MAIN] = _made_anew(folder, older[0])
    said = dict(config)
    if "generation_config.json" in files:
        said |= {k: v for k, v in read_json(folder / "generation_config.json").items() if v is not None}
    ends = said.get("eos_token_id")
    bos = said.get("bos_token_id")
    listed = [] if ends is None else (ends if isinstance(ends, list) else [ends])
    return TokenizerFiles(files, bos if _is_id(bos) else None, tuple(filter(_is_id, listed)))


def _is_id(value: Any) -> bool:
    """Some files say -1 where there is none."""
    return type(value) is int and value >= 0


def _made_anew(folder: Path, older: str) -> str:
    """tokenizer.json of an older form. Errors: DataError: transformers is not installed, or cannot either."""
    if importlib.util.find_spec("transformers") is None:
        raise DataError(f"{folder}: has {older} and no {MAIN}. Install transformers, which can make one of it.")
    if older.endswith((".model", ".spm")) and importlib.util.find_spec("sentencepiece") is None:
        raise DataError(f"{folder}: has {older} and no {MAIN}. Install sentencepiece, with which one is made of it.")
    import transformers

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        text: str = made.backend_tokenizer.to_str()
        return text
    except Exception as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0][:100]
        raise DataError(f"{folder}: no {MAIN}, and transformers cannot make one of {older} ({reason}).") from None


def _unread(name: str, tokens: Sequence[str], *, words: bool) -> str:
    """A name for a special token: there, one that stands in a text would be taken for the token."""
    known = set(tokens)
    for made in (f"<{name}>", f"<|{name}|>", f"<\u2060{name}\u2060>"):
        if made not in known if words else not set(made) <= known:
            return made
    raise DataError(
        f"tokenizer: every name for its special token {name!r} can be written with its {len(tokens)} tokens."
    )


def plain_tokenizer(tokens: Sequence[str], *, words: bool, first: int = 0) -> TokenizerFiles:
    """A tokenizer whose tokens are characters, or words between spaces.

    first: the id of the first of them; those before it are <pad>, <bos>, <eos>, or names that no text is read as.
    """
    specials = [_unread(name, tokens, words=words) for name in ("pad", "bos", "eos")][:first]
    by_character = {
        "type": "Split",
        "pattern": {"Regex": r"[\s\S]"},
        "behavior": "Isolated",
        "invert": False,
    }
    data = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, token in enumerate(specials)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"} if words else by_character,
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": NO_WORD, "cleanup": False} if words else {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {token: i for i, token in enumerate((*specials, *tokens))},
            "unk_token": NO_WORD,
        },
    }
    beside: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],  # decoders refuse segments, which are all 0 here
    }
    if specials:
        beside |= dict(zip(("pad_token", "bos_token", "eos_token"), specials, strict=True))
    texts = {MAIN: data, "tokenizer_config.json": beside}
    files = {name: json.dumps(value, ensure_ascii=False, indent=2) + "\n" for name, value in texts.items()}
    return TokenizerFiles(files, 1 if specials else None, (2,) if specials else ())
