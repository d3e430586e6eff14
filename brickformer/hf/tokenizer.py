"""The tokenizer of a checkpoint folder: its files, word for word, and the ids it begins and ends with.

It is run by the `tokenizers` package, from tokenizer.json. Where a folder has an older form only (vocab.txt,
merges.txt, a SentencePiece model) the `transformers` library, where it is installed, makes one of it: its own classes
decide what each family does with spaces, digits and special tokens. Marian's two SentencePiece models are read as they
are. SentencePiece models are kept beside what is made of them, and given back.
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
from brickformer.files import read_bytes, read_json, read_text
from brickformer.hf.asked import either, is_id

MAIN: Final = "tokenizer.json"
GENERATION: Final = "generation_config.json"
BESIDE: Final = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", GENERATION)
PIECES: Final = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
TWO_SIDES: Final = ("source.spm", "target.spm")
LIST: Final = "vocab.json"
OLDER: Final = (*PIECES, LIST, "vocab.txt")

NO_WORD: Final = "no such token"
"""With spaces in it: neither a character nor a word."""


@final
@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """files: by name, word for word. bos: the id that opens a text. ends: the ids that close one."""

    files: dict[str, str | bytes] = field(default_factory=dict)
    bos: int | None = None
    ends: tuple[int, ...] = ()

    @property
    def of_pieces(self) -> bool:
        """Whether they are Marian's two SentencePiece models, and no tokenizer.json."""
        return MAIN not in self.files and TWO_SIDES[0] in self.files


def read_tokenizer(folder: Path, config: Mapping[str, Any]) -> TokenizerFiles:
    """The tokenizer in a folder; without files where there is none. Errors: RunError, DataError: one cannot be read."""
    files: dict[str, str | bytes] = {
        name: read_text(folder / name) for name in (MAIN, *BESIDE) if (folder / name).is_file()
    }
    generation = read_json(folder / GENERATION) if GENERATION in files else None
    files |= {name: read_bytes(folder / name) for name in (*PIECES, *TWO_SIDES) if (folder / name).is_file()}
    older = [name for name in OLDER if (folder / name).is_file()]
    if TWO_SIDES[0] in files and MAIN not in files:
        files |= {name: read_text(folder / name) for name in (LIST,) if (folder / name).is_file()}
    elif MAIN not in files:
        files = files | {MAIN: _made_anew(folder, older[0])} if older else {}
    bos, ends = (either(config, generation, name) for name in ("bos_token_id", "eos_token_id"))
    listed = ends if isinstance(ends, list) else [ends]
    return TokenizerFiles(files, bos if is_id(bos) else None, tuple(filter(is_id, listed)))


def _made_anew(folder: Path, older: str) -> str:
    """tokenizer.json of an older form. Errors: DataError: transformers is not installed, or cannot either."""
    has = f"{folder}: has {older} and no {MAIN}."
    if importlib.util.find_spec("transformers") is None:
        raise DataError(f"{has} Install transformers, which can make one of it.")
    for package in ("sentencepiece", "google.protobuf") if older in PIECES else ():
        if not _installed(package):
            name = package.removeprefix("google.")
            raise DataError(f"{has} Install {name}, with which one is made of it: pip install 'brickformer[hf]'")
    if older in PIECES:
        _check_pieces(folder / older)
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        text: str = made.backend_tokenizer.to_str()
        return text
    except Exception as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0][:100]
        raise DataError(f"{folder}: no {MAIN}, and transformers cannot make one of {older} ({reason}).") from None
    finally:
        transformers.logging.set_verbosity(verbosity)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it is a part of
        return False


def _check_pieces(path: Path) -> None:
    """Errors: DataError: a file that is no SentencePiece model; transformers would take it for another kind."""
    import sentencepiece

    try:
        whole = sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(read_bytes(path))
    except Exception:  # whatever the package raises
        whole = False
    if not whole:
        raise DataError(
            f"{path}: broken: it is no SentencePiece model. It was cut off or copied in part; copy it again."
        )


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
    files: dict[str, str | bytes] = {
        name: json.dumps(value, ensure_ascii=False, indent=2) + "\n" for name, value in texts.items()
    }
    return TokenizerFiles(files, 1 if specials else None, (2,) if specials else ())
