"""Published checkpoints as trained models, and back: what joins the tables of names with tokenizers and run folders.

load(DIR or hub name) -> Trained          ready to write, score, be looked at
save(model, DIR)                          a folder of the `transformers` library
imported(trained, root) -> RunFolder      a run folder, for the command line
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any, Final

import torch

from brickformer import hf
from brickformer.errors import DataError, RunError
from brickformer.files import read_json, read_text
from brickformer.hf.asked import Asked, read_asked
from brickformer.hf.load import Checkpoint
from brickformer.hf.tokenizer import GENERATION, TokenizerFiles, plain_tokenizer, read_tokenizer
from brickformer.mask import Mask
from brickformer.models import AnyModel, EncoderDecoderModel
from brickformer.recipes.run import Run
from brickformer.recipes.standard import advising
from brickformer.recipes.trained import Trained
from brickformer.tasks import (
    CharTokenizer,
    Imported,
    PiecesTokenizer,
    PretrainedTokenizer,
    Text,
    Tokenizer,
    WordTokenizer,
)
from brickformer.tasks.pieces import Side
from brickformer.tasks.tokenizer import PAD
from brickformer.train import RunFolder

CONFIG: Final = "config.json"
TARGET: Final = "target"
"""Where the tokenizer of what is written stands, if it is not the one of what is read."""
WANTED: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.spm")


def load(path: Path | str, *, dtype: torch.dtype | None = None) -> Trained:
    """A published checkpoint with its tokenizer: a folder, or a name on the hub where `huggingface_hub` is installed.

    dtype: of the parameters, default as they are stored. Without a tokenizer, texts are ids: "1 80 147".
    Errors: BrickError: no folder, a family without a table, files that are broken or do not agree.
    """
    folder = _found(path)
    checkpoint = hf.load(folder, dtype=dtype)
    model, files = checkpoint.model, read_tokenizer(folder, checkpoint.config)
    source = None
    if isinstance(model, EncoderDecoderModel):
        aside = read_tokenizer(folder / TARGET, checkpoint.config) if (folder / TARGET).is_dir() else files
        source, target = _tokenizer(checkpoint, files, "source"), _tokenizer(checkpoint, aside, "target")
    else:
        target = _tokenizer(checkpoint, files)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).expanduser().resolve().name).strip(".-") or "imported"
    asked = _asked(checkpoint, answers=source is not None)
    task = Imported(str(path), asked.start, asked.first, asked.never, asked.never_runs, asked.said, asked.undone)
    run = Run(task=task, model=model.spec, name=name)
    return Trained(run, model, source, target)


def _found(path: Path | str) -> Path:
    """A folder as it is; a name on the hub downloaded. Errors: RunError: neither."""
    folder = Path(path).expanduser()
    if folder.exists() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path)):
        return folder
    if importlib.util.find_spec("huggingface_hub") is None:
        raise RunError(
            f"{path}: no such folder. For a name on the hub install huggingface_hub: pip install 'brickformer[hf]'"
        )
    import huggingface_hub

    try:
        found = Path(huggingface_hub.snapshot_download(str(path), allow_patterns=list(WANTED)))
        if not any(found.glob("*.safetensors")):  # older ones have the older form alone
            found = Path(huggingface_hub.snapshot_download(str(path), allow_patterns=[*WANTED, "pytorch_model*.bin"]))
        return found
    except Exception as e:  # whatever the network does
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:120]
        raise RunError(f"{path}: no such folder, and the hub does not give it: {reason}") from None


def _asked(checkpoint: Checkpoint, *, answers: bool) -> Asked:
    """What its folder says of writing. answers: of an encoder-decoder."""
    file = checkpoint.path / GENERATION
    generation = read_json(file) if file.is_file() else None
    where = str(checkpoint.path / CONFIG if generation is None else file)
    return read_asked(checkpoint.config, generation, where, answers=answers)


def _tokenizer(checkpoint: Checkpoint, files: TokenizerFiles, side: Side | None = None) -> Tokenizer:
    """side: of an encoder-decoder. Without files, ids that are written out."""
    if not files.files:
        spec: Any = checkpoint.model.spec
        vocab = spec.vocab if side is None else (spec.encoder if side == "source" else spec.decoder).vocab
        return WordTokenizer(map(str, range(vocab)), specials=False)
    kept = {**files.files, CONFIG: read_text(checkpoint.path / CONFIG)}
    if files.of_pieces:
        if side is None:
            raise DataError(
                f"{checkpoint.path}: source.spm is of two languages, and the model has one side. Remove it."
            )
        return PiecesTokenizer(kept, side=side, ends=files.ends)
    return PretrainedTokenizer(kept, bos=files.bos, ends=files.ends, whole=side == "target")


def save(
    model: AnyModel | Trained, path: Path | str, *, max_len: int | None = None, family: str | None = None
) -> hf.Saved:
    """Write a model, or a trained one with its tokenizers, to a new folder that the `transformers` library reads.

    max_len: the longest input, for the configuration; default what is known. family: this one or none.
    Errors: SpecError where no family computes the same, naming the brick; RunError: the folder is taken, the disk full.
    """
    if not isinstance(model, Trained):
        return hf.save(model, path, extra=_lengths(max_len), family=family)
    texts, like = exported(model)
    extra = ids(model) | lengths(model) | _lengths(max_len)
    with advising(model.run):
        return hf.save(model.model, path, like=like, extra=extra, files=texts, family=family)


def exported(trained: Trained) -> tuple[dict[str, str | bytes], dict[str, Any] | None]:
    """(the files of its tokenizers, by name; the configuration it came with, if any).

    The one that reads a source is the folder's own; what writes another vocabulary has a folder `target` in it.
    """
    own = dict(files_of(trained.source or trained.target).files)
    kept = own.pop(CONFIG, None)
    other = {name: text for name, text in files_of(trained.target).files.items() if name != CONFIG}
    aside = {} if trained.source is None or own == other else {f"{TARGET}/{name}": other[name] for name in other}
    return own | aside, None if kept is None else json.loads(kept)


def ids(trained: Trained) -> dict[str, int | None]:
    """The ids at which a text begins, ends, and is filled up."""
    target, files, pairs = trained.target, files_of(trained.target), trained.source is not None
    found = {"bos_token_id": files.bos, "eos_token_id": files.ends[0] if files.ends else None}
    if not isinstance(target, PretrainedTokenizer | PiecesTokenizer):
        found["pad_token_id"] = PAD if target.specials else None
    return found | ({"decoder_start_token_id": trained.start[0]} if pairs and trained.start else {})


def lengths(trained: Trained) -> dict[str, int]:
    """The longest text it learnt from, where nothing but that limits what it reads."""
    task = trained.run.task
    masks = [part for part in trained.run.model.parts() if isinstance(part, Mask)]
    windowed = bool(masks) and all(mask.window is not None for mask in masks)
    return _lengths(task.context if isinstance(task, Text) and not windowed else None)


def _lengths(max_len: int | None) -> dict[str, int]:
    return {} if max_len is None else {"max_position_embeddings": max_len}


def files_of(tokenizer: Tokenizer) -> TokenizerFiles:
    """A tokenizer as files that others read."""
    match tokenizer:
        case PretrainedTokenizer() | PiecesTokenizer():
            return TokenizerFiles(tokenizer.files, tokenizer.bos, tokenizer.ends)
        case CharTokenizer() | WordTokenizer():
            words = isinstance(tokenizer, WordTokenizer)
            return plain_tokenizer(tokenizer.tokens, words=words, first=tokenizer.first)
        case _:
            return TokenizerFiles()


def imported(trained: Trained, root: Path, name: str | None = None) -> RunFolder:
    """A run folder that holds a published model, whole or not there. Errors: RunError: a full disk, no permission."""
    tokenizers = {"source": trained.source and trained.source.to_json(), "target": trained.target.to_json()}
    run = trained.run if name is None else trained.run.but(name=name)
    spec, told = run.model.to_dict(), {"run": run.to_dict()}
    with RunFolder.making(root, run.name, spec=spec, run=told, tokenizer=tokenizers) as (part, made):
        part.save_weights(trained.model.state_dict(), 0)
        return made
