"""Files that are whole or not there: written under a temporary name, flushed to the disk, then renamed.

Tensors are safetensors, everything else is JSON; nothing is ever unpickled. Two names of one tensor (tied weights) are
stored once, the other name goes to the metadata under "tied". Everything that goes wrong is a RunError naming the file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from brickformer.errors import RunError

TYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
"""What a safetensors file calls a type."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError inside into a RunError that says what to do about it."""
    try:
        yield
    except safetensors.SafetensorError as e:
        told = re.search(r"\(os error (\d+)\)", str(e))
        raise _not_written(path, int(told[1]) if told else None, e) from None
    except OSError as e:
        full = e.errno is None and " requested and " in str(e)  # as numpy says it
        raise _not_written(path, errno.ENOSPC if full else e.errno, e) from None


def _not_written(path: Path, reason: int | None, error: Exception) -> RunError:
    """reason: the system's number, where it is known."""
    match reason:
        case errno.ENOSPC | errno.EDQUOT:
            why = "the disk is full. Free some space and try again; what was saved before is unharmed."
        case errno.EACCES | errno.EPERM | errno.EROFS:
            why = "no permission to write there. Change the permissions or choose another folder."
        case errno.ENOENT:
            why = "there is no such folder. Make it first, or choose another one."
        case errno.EISDIR:
            why = "it is a folder. Choose another name."
        case None:
            why = f"{error}."
        case _:
            why = f"{os.strerror(reason)}."
    return RunError(f"{path}: cannot be written: {why}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside `path`: what is written there takes its place, whole; after an error `path` is as it was."""
    temporary = path.with_name(f".{path.name}.part")
    with writing(path):
        try:
            yield temporary
            file = os.open(temporary, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        flush(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` at `path`; whatever happens, `path` holds the old content or the new one, never a part of it."""
    with replacing(path) as temporary:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
        finally:
            os.close(file)


def append_line(path: Path, line: str) -> None:
    """Add one line at the end."""
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    write_whole(path, (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode())


def read_bytes(path: Path) -> bytes:
    """The bytes of a file. Errors: RunError: missing, not readable."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise RunError(f"{path}: missing. The folder was cut off while written or copied; use another run.") from None
    except OSError as e:
        raise RunError(f"{path}: cannot be read: {e.strerror or e}.") from None


def read_text(path: Path) -> str:
    """The text of a file. Errors: RunError: missing, not readable, not text."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise RunError(f"{path}: broken: not UTF-8 text. Restore it from a copy, or use another run.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Errors: RunError: missing, or not a JSON object."""
    try:
        data = json.loads(read_text(path))
    except json.JSONDecodeError as e:
        raise RunError(
            f"{path}: broken: {e.msg} at line {e.lineno}, column {e.colno}. Restore it from a copy, or use another run."
        ) from None
    except (RecursionError, ValueError) as e:  # the second: a number of more digits than Python reads
        why = "nested too deeply" if isinstance(e, RecursionError) else str(e).split(";")[0]
        raise RunError(f"{path}: broken: {why}. Restore it from a copy, or use another run.") from None
    if not isinstance(data, dict):
        raise RunError(f"{path}: broken: expected a JSON object, found {type(data).__name__}. Use another run.")
    return data


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write named tensors as safetensors, tied ones once, with `metadata`."""
    stored, tied = _untie(tensors)
    notes = {**metadata, "tied": json.dumps(tied)} if tied else dict(metadata)
    with replacing(path) as temporary:
        temporary.touch()
        rights = temporary.stat().st_mode  # of new files here: safetensors gives none to others
        safetensors.torch.save_file(stored, temporary, metadata=notes)  # from where they lie: no second copy in memory
        temporary.chmod(rights)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(named tensors, metadata) of a safetensors file, tied names included. Errors: RunError: missing or broken.

    Each tensor has memory of its own, and nothing is read through the map of the file: views of it would keep all of it
    until the last one is gone, and what is touched of it counts as memory of this process.
    """
    with _reading(path), safetensors.safe_open(path, framework="pt") as file, open(path, "rb") as raw:
        metadata = dict(file.metadata() or {})
        start = 8 + int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(start - 8))
        tensors = {}
        for name in file.keys():  # noqa: SIM118  (not a dict)
            said = header[name]
            if said["dtype"] not in TYPES:
                raise RunError(
                    f"{path}: {name}: its numbers are of type {said['dtype']}, which is not read here. Expected one"
                    f" of {', '.join(TYPES)}; write the file again in one of them."
                )
            tensors[name] = _tensor_at(raw, start + said["data_offsets"][0], said["shape"], TYPES[said["dtype"]])
        return {**tensors, **_tied(metadata, tensors)}, metadata


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, none of its tensors. Errors: as `read_tensors`."""
    with _reading(path), safetensors.safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what goes wrong while a safetensors file is read into a RunError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise RunError(f"{path}: missing. The run was stopped before its first save, or copied in part.") from None
    except RunError:
        raise
    except (safetensors.SafetensorError, ValueError, RecursionError, KeyError, EOFError) as e:
        reason = str(e).removeprefix("Error while deserializing header: ")
        raise RunError(f"{path}: broken ({reason}). Restore it from a copy, or use another run.") from None
    except OSError as e:
        raise RunError(f"{path}: cannot be read: {e.strerror or e}.") from None


def _tied(metadata: dict[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their other names, which `metadata` then no longer says. Errors: ValueError: names of nothing."""
    tied = json.loads(metadata.pop("tied", "{}"))
    if not isinstance(tied, dict) or not all(isinstance(name, str) and name in tensors for name in tied.values()):
        raise ValueError("its list of tied names is not one of names in it")
    return {alias: tensors[name] for alias, name in tied.items()}


def _tensor_at(file: BinaryIO, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor to be kept, aligned for kernels, with numbers of a file.

    Errors: EOFError: it ends within them. ValueError: no tensor has this shape.
    """
    if max(shape, default=0) >= 2**63:
        raise ValueError(f"a shape of {shape}")
    tensor = torch.empty(tuple(shape), dtype=dtype)
    if tensor.numel():
        file.seek(place)
        got = file.readinto(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[attr-defined]
        if got != tensor.nbytes:
            raise EOFError("it ends within a tensor: it was changed while it was read")
    return tensor


def _untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors that share no memory, other name -> stored name)."""
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        place = (memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            tied[name] = first[place]
            continue
        first[place] = name
        own = tensor.detach().contiguous()
        stored[name] = own.clone() if memory in storages else own
        storages.add(memory)
    return stored, tied


def flush(path: Path) -> None:
    """Make a file, or the renames in a folder, outlast a power cut, where the system can do that."""
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
