"""A checkpoint folder: where its tensors are, read one at a time.

    model.safetensors                         one file
    model.safetensors.index.json              shards, and which tensor is in which
    pytorch_model.bin (.index.json)           the older form, unpickled with weights_only and nothing else

Names, shapes and types come from the files' headers: all is compared with the model before a number is read. A header
is checked by the safetensors library; numbers are then read, not mapped: what is mapped counts as memory of this
process until the system wants it back, and a model would seem to take twice its size.
A file may be a link, wherever it leads: the hub's own cache consists of links.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Final, final

import safetensors
import torch
from torch import Tensor

from brickformer.errors import RunError
from brickformer.files import read_json

FLOATS: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")


class Tensors(ABC):
    """Named tensors in one file. path: the file. names: all of them."""

    path: Path
    names: Iterable[str]

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one, its numbers unread."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype | str:
        """The type of its numbers; as the file says it where no parameter can be of that type."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One of them. It may lie in the file's own memory: copy what is kept."""


@final
class SafeTensors(Tensors):
    """A safetensors file. Errors: RunError: missing, cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safetensors.safe_open(path, framework="pt"):
                pass  # whoever enters has read a header that agrees with itself and with the length of the file
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except FileNotFoundError:
            raise RunError(f"{path}: missing. The folder was copied in part; copy it again.") from None
        except (safetensors.SafetensorError, OSError) as e:
            reason = str(e).removeprefix("Error while deserializing header: ")
            raise RunError(f"{path}: broken ({reason}). It was cut off or copied in part; copy it again.") from None
        header.pop("__metadata__", None)
        self._header, self._begin = header, 8 + length
        self.names = list(header)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header."""
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> torch.dtype | str:
        """From the header."""
        word: str = self._header[name]["dtype"]
        return FLOATS.get(word, word)

    def read(self, name: str) -> Tensor:
        """From the file, in memory that goes back to the system once the numbers are copied; torch's own does not."""
        begin, end = self._header[name]["data_offsets"]
        numbers = bytearray(end - begin)
        try:
            with open(self.path, "rb") as file:
                file.seek(self._begin + begin)
                got = file.readinto(numbers)
        except OSError as e:
            raise RunError(f"{self.path}: cannot be read: {e.strerror or e}.") from None
        if got != len(numbers):
            raise RunError(f"{self.path}: broken: it ends within {name!r}. It was changed while it was read.")
        dtype, shape = self.dtype(name), self.shape(name)
        assert isinstance(dtype, torch.dtype), f"{name} of type {dtype} should have been refused"
        return torch.frombuffer(numbers, dtype=dtype).view(shape) if numbers else torch.empty(shape, dtype=dtype)


@final
class Pickled(Tensors):
    """A .bin file, of which nothing but tensors is unpickled. Errors: RunError: missing, broken, other things in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            try:
                data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # of before torch 1.6, which cannot be mapped
                data = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise RunError(f"{path}: missing. The folder was copied in part; copy it again.") from None
        except Exception as e:
            reason = (str(e).splitlines() or [type(e).__name__])[0][:80]
            raise RunError(
                f"{path}: cannot be read as weights alone ({reason}). It is broken, or wants to "
                "run code; take a checkpoint in safetensors."
            ) from None
        if not isinstance(data, dict) or not all(type(k) is str and isinstance(t, Tensor) for k, t in data.items()):
            raise RunError(f"{path}: holds more than named tensors. Take a checkpoint in safetensors.")
        self._tensors: dict[str, Tensor] = {name: tensor.detach() for name, tensor in data.items()}
        self.names = list(data)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype | str:
        """Of the tensor; of one that is no plain array, what it is."""
        tensor = self._tensors[name]
        plain = tensor.layout is torch.strided and tensor.dtype in FLOATS.values()
        return tensor.dtype if plain else f"{tensor.layout} of {tensor.dtype}".removeprefix("torch.strided of ")

    def read(self, name: str) -> Tensor:
        """The tensor itself."""
        return self._tensors[name]


def open_folder(folder: Path) -> dict[str, Tensors]:
    """Every tensor's name in a checkpoint folder, and the file that holds it.

    Errors: RunError: no weights, a shard missing or cut off, an index that leads out of the folder or does not agree.
    """
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _sharded(folder, index)
        if (folder / name).is_file():
            file = _opened(folder / name)
            if not file.names:
                raise RunError(f"{file.path}: holds no tensor. Copy it again.")
            return dict.fromkeys(file.names, file)
    found = sorted(p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    has = f"; it has {', '.join(found[:3])}" if found else ""
    raise RunError(f"{folder}: no weights: expected {' or '.join(WEIGHTS)}, or an index of shards{has}.")


def _opened(path: Path) -> Tensors:
    return SafeTensors(path) if path.suffix == ".safetensors" else Pickled(path)


def _sharded(folder: Path, index: Path) -> dict[str, Tensors]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(v, str) for v in places.values()):
        raise RunError(f"{index}: broken: no 'weight_map' of names in it. Copy the folder again.")
    for shard in sorted(set(places.values())):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.(safetensors|bin)", shard):
            raise RunError(f"{index}: weight_map: got {shard!r}, expected the name of a weights file in this folder.")
    files = {shard: _opened(folder / shard) for shard in sorted(set(places.values()))}
    out: dict[str, Tensors] = {}
    for file in files.values():
        for name in file.names:
            if name in out:
                raise RunError(f"{file.path}: {name!r} is in {out[name].path.name} too. Copy the folder again.")
            out[name] = file
    for name, shard in places.items():
        if out.get(name) is not files[shard]:
            raise RunError(f"{folder / shard}: no tensor {name!r} in it, where {index.name} says it is. Copy it again.")
    return out
