"""GGUF: one file that llama.cpp and what is built on it read, weights, sizes and vocabulary together.

    f32, f16       numbers as they are, or in half
    q8_0, q4_0     blocks of 32 numbers of a row: one scale in float16, 8 or 4 bits each

Only matrices are made smaller; norms and biases stay float32. Rows that are no multiple of 32 stay float16. With q4_0
the table of tokens and the head are kept in q8_0: they are read once a token and cost little, errors there cost much.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np
import torch
from torch import Tensor

from brickformer.errors import RunError, SpecError
from brickformer.export.llamacpp import Architecture, added, architecture, fields, stored
from brickformer.export.vocabulary import Vocabulary
from brickformer.files import flush, writing

Kind = Literal["f32", "f16", "q8_0", "q4_0"]
KINDS: Final[tuple[Kind, ...]] = ("f32", "f16", "q8_0", "q4_0")
BLOCK: Final = 32
LARGEST: Final = 65504.0
"""The largest number in half."""
_FILE_TYPE: Final = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7}
_EXACT: Final = ("position_embd.weight", "rope_freqs.weight")
_OUTSIDE: Final = ("token_embd.weight", "output.weight")


@final
@dataclass(frozen=True, slots=True)
class Written:
    """What was written. kept: matrices that stayed float16, their rows being no multiple of a block."""

    path: Path
    kind: Kind
    nbytes: int
    kept: tuple[str, ...]


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    words: Vocabulary,
    *,
    vocab: int,
    kind: Kind = "f16",
    name: str = "model",
    check: Callable[[Path], None] = lambda part: None,
) -> Written:
    """Write a file, whole or not at all.

    config, tensors: a checkpoint as the `transformers` library says it. words: its vocabulary of `vocab` tokens.
    check: is shown the file before it gets its name, and raises where it is not right.
    Errors: SpecError for what llama.cpp does not compute; RunError: the file is there, the `gguf` package is not.
    """
    known = architecture(config)
    if os.path.lexists(path):
        raise RunError(f"{path}: is there already. Name a new file.")
    if importlib.util.find_spec("gguf") is None:
        raise RunError("gguf: the package `gguf` is not installed. pip install 'brickformer[gguf]'")
    import gguf

    depth = int(fields(config, vocab)["block_count"])
    names = names_there(known, depth)
    part = path.with_name(f".{path.name}.part")
    plan = [(theirs, place(names, theirs, known.name), tensor) for theirs, tensor in tensors]
    kept: list[str] = []
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(gguf.GGUFWriter(part, known.name)) as writer:
                writer.add_name(name)
                writer.add_file_type(_FILE_TYPE[kind])
                writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
                for field, value in fields(config, vocab).items():
                    _add(writer, f"{known.name}.{field}", value)
                _add_words(writer, words)
                plan += [(own, own, tensor) for own, tensor in added(config).items()]
                raw = {}
                for theirs, there, tensor in plan:
                    shape = stored(theirs, tensor.to("meta"), config, known).shape
                    raw[there] = gguf.GGMLQuantizationType[_kind_of(there, shape, kind, kept).upper()]
                    block, size = gguf.GGML_QUANT_SIZES[raw[there]]
                    nbytes = shape.numel() // block * size
                    writer.add_tensor_info(there, shape, np.dtype(np.float32), nbytes, raw_dtype=raw[there])
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_ti_data_to_file()
                for theirs, there, tensor in plan:  # one at a time, in that order
                    whole = stored(theirs, tensor.detach().cpu().float(), config, known).contiguous().numpy()
                    if raw[there] == gguf.GGMLQuantizationType.F16 and np.abs(whole).max(initial=0.0) > LARGEST:
                        raise SpecError(
                            f"gguf: {theirs}: too large for half, past {LARGEST:.0f}. Write it with --dtype f32."
                        )
                    writer.write_tensor_data(gguf.quantize(whole, raw[there]))
            check(part)
            flush(part)
            part.rename(path)
            flush(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # the target may lie in what is no folder
            part.unlink(missing_ok=True)
        raise
    return Written(path, kind, path.stat().st_size, tuple(kept))


def names_there(known: Architecture, depth: int) -> Any:
    """llama.cpp's names of the tensors of a family with `depth` layers."""
    import gguf

    return gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == known.name), depth)


def place(names: Any, theirs: str, family: str) -> str:
    """llama.cpp's name of a tensor. Errors: SpecError: it has none."""
    there: str | None = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
    if there is None:
        raise SpecError(f"gguf: llama.cpp's {family} has no place for {theirs!r}. Share it as --to hf.")
    return there


def _kind_of(name: str, shape: torch.Size, kind: Kind, kept: list[str]) -> Kind:
    """How one tensor is stored."""
    if len(shape) < 2 or name in _EXACT or kind == "f32":
        return "f32"
    if kind == "f16":
        return "f16"
    if shape[-1] % BLOCK:
        kept.append(name)
        return "f16"
    return "q8_0" if name in _OUTSIDE else kind


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_string(key, value)


def _add_words(writer: Any, words: Vocabulary) -> None:
    writer.add_tokenizer_model(words.model)
    if words.tokens:
        writer.add_token_list(words.tokens)
        writer.add_token_types(words.types)
    if words.scores:
        writer.add_token_scores(words.scores)
    if words.merges:
        writer.add_token_merges(words.merges)
    for field, value in words.fields.items():
        _add(writer, f"tokenizer.ggml.{field}", value)
