"""Prefix: a prompt that has been read once, kept in memory or in a file, and continued many times.

The file is safetensors: the tensors of the state, and in its header the tokens, the plain numbers of the state, a
digest of the model and a sum of all the rest. Nothing is unpickled; a file made by another model, cut off, or with one
bit altered is refused. It is written whole or not at all, so that a process killed meanwhile leaves the older one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from jaxtyping import Float
from torch import Tensor

from brickformer.errors import BrickError, RunError, StateError
from brickformer.files import read_tensors, write_tensors
from brickformer.generate.writer import Prompt, Writer, WritingModel, evaluating, smallest
from brickformer.mask import Span
from brickformer.models import AnyModel
from brickformer.state import KV, CacheType, StackState, State

FORMAT: Final = "brickformer prompt 2"
_AGAIN: Final = "Make it again with read_prompt(...).save(path)."
_SAMPLES: Final = 1024  # numbers of each parameter that go into the digest


@final
@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A prompt that has been read.

    tokens: what the decoder was fed; source: what the encoder was. state: of one row, with room for `max_len` tokens.
    logits: after the last token. digest: of the model. cache: how the state keeps keys and values.
    """

    tokens: list[int]
    source: list[int] | None
    state: StackState
    logits: Float[Tensor, "1 V"]
    max_len: int
    digest: str
    cache: CacheType = "float"

    def given(self, writer: Writer, prompt: Prompt) -> tuple[list[int], list[int] | None]:
        """What a prompt that goes on from here gives the decoder, and the encoder. Errors: StateError, DataError."""
        return [*self.tokens, *writer.more_ids(prompt, len(self.tokens))], self.source

    def check(self, writer: Writer) -> None:
        """Errors: StateError when another model read the prompt, or keeps its keys and values otherwise."""
        _same_model(self.digest, writer.model, "prefix")
        if self.cache != writer.cache:
            raise StateError(
                f"prefix: keeps keys and values as {self.cache}, the writer as {writer.cache}. Use Writer(model, "
                f"cache={self.cache!r})."
            )

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all. Errors: RunError when it cannot be written."""
        tensors: dict[str, Tensor] = {"logits": self.logits.contiguous()}
        numbers: dict[str, Any] = {}
        for name, part in _parts(self.state):
            _put_state(name, part, tensors, numbers.setdefault(name, {}))
        header = {
            "format": FORMAT,
            "digest": self.digest,
            "prompt": json.dumps(
                {"tokens": self.tokens, "source": self.source, "max_len": self.max_len, "cache": self.cache}
            ),
            "numbers": json.dumps(numbers),
        }
        try:
            write_tensors(Path(path), tensors, {**header, "sum": checksum(header, tensors)})
        except RunError as e:
            raise RunError(f"{e} The prompt is still in memory.") from None

    @staticmethod
    def load(path: str | Path, model: Writer | AnyModel) -> Prefix:
        """Read a file. Errors: StateError when it is not a whole prompt file, or was made by another model."""
        writer = Writer.of(model)
        where = str(path)
        if not Path(path).exists():
            raise StateError(f"{where}: no such file. Make it with read_prompt(...).save(path).")
        try:
            with open(path, "rb"):
                tensors, header = read_tensors(Path(path))
        except OSError as e:
            raise StateError(f"{where}: cannot be read: {e.strerror}. Name a file that was made by save().") from None
        except RunError:
            raise StateError(f"{where}: not a whole safetensors file. {_AGAIN}") from None
        if header.get("format") != FORMAT:
            raise StateError(f"{where}: got format {header.get('format')!r}, expected {FORMAT!r}. {_AGAIN}")
        if header.pop("sum", "") != checksum(header, tensors):
            raise StateError(f"{where}: damaged: it is not what was written. {_AGAIN}")
        _same_model(header.get("digest", ""), writer.model, where)
        try:
            prompt, numbers = json.loads(header["prompt"]), json.loads(header["numbers"])
            tokens, source, max_len, cache = (prompt[name] for name in ("tokens", "source", "max_len", "cache"))
            tensors = {name: x.to(writer.device) for name, x in tensors.items()}
            state = writer.decoder.init_state(1, max_len, cache=cache)
            for name, part in _parts(state):
                _fill(part, name, numbers[name], tensors)
            state.length = len(tokens)
            return Prefix(tokens, source, state, tensors["logits"], max_len, header["digest"], cache)
        except (KeyError, TypeError, ValueError, RuntimeError) as e:
            what = f"{e}" if isinstance(e, BrickError) else f"damaged ({e!r:.200})."
            raise StateError(f"{where}: {what} {_AGAIN}") from None


@torch.inference_mode()
def read_prompt(model: Writer | AnyModel, prompt: Prompt, room: int = 256) -> Prefix:
    """Read a prompt once. room: tokens that may follow before it has to be read again. Errors: DataError."""
    writer = Writer.of(model)
    given, source = writer.given(prompt)
    decoder = writer.decoder
    max_len = smallest(len(given) + max(room, 0), writer.limit) or 0
    with evaluating(writer.model):
        memory = None if source is None else writer.read([source])
        state = writer.init_state(1, max_len)
        h = decoder.hidden(torch.tensor([given], device=writer.device), None, state, memory)
        logits = decoder.logits(h[:, -1:])[:, 0]
    return Prefix(given, source, state, logits, max_len, digest(writer.model), writer.cache)


def digest(model: AnyModel) -> str:
    """A digest of a model: its spec, and names, shapes, types and evenly spread numbers of its parameters."""
    h = hashlib.sha256()
    h.update(model.spec.to_json().encode())
    for name, x in sorted(model.state_dict().items()):
        flat = x.detach().flatten()
        some = flat[:: max(1, len(flat) // _SAMPLES)]
        h.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        h.update(some.to("cpu").contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def checksum(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """A sum of everything in a prompt file: a bit that is not as it was written gives another one."""
    h = hashlib.sha256(json.dumps(sorted(header.items())).encode())
    for name, x in sorted(tensors.items()):
        h.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        h.update(x.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()


def _same_model(made_by: str, model: WritingModel, where: str) -> None:
    if made_by != digest(model):
        raise StateError(
            f"{where}: read by another model (or by this one before its weights changed), so its state means nothing "
            f"here. Read the prompt again with read_prompt()."
        )


def _parts(state: StackState) -> Iterator[tuple[str, State]]:
    for i, layer in enumerate(state.layers):
        yield f"{i}.mixer", layer.mixer
        if layer.cross is not None:
            yield f"{i}.cross", layer.cross


def _trimmed(part: State, value: Any) -> Any:
    """Of a cache, only the slots that were written."""
    if isinstance(part, KV) and isinstance(value, Tensor):
        return value[:, :, : part.written] if value.ndim == 4 else value[:, : part.written]
    return value


def _put_state(key: str, part: State, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Write down every field of a state, and of the states inside it."""
    numbers[""] = type(part).__name__
    for field, value in vars(part).items():
        if isinstance(value, State):
            _put_state(f"{key}.{field}", value, tensors, numbers.setdefault(field, {}))
        else:
            _put(f"{key}.{field}", _trimmed(part, value), tensors, numbers, field)


def _put(key: str, value: Any, tensors: dict[str, Tensor], numbers: dict[str, Any], field: str) -> None:
    """Write down one field of a state."""
    match value:
        case Tensor():
            tensors[key] = value.contiguous()
            numbers[field] = {"tensor": key}
        case Span():
            inner: dict[str, Any] = {}
            for name, x in (("start", value.start), ("length", value.length), ("pos", value.pos), ("doc", value.doc)):
                _put(f"{key}.{name}", x, tensors, inner, name)
            numbers[field] = {"span": inner}
        case list() | tuple():
            items: dict[str, Any] = {}
            for i, item in enumerate(value):
                _put(f"{key}.{i}", item, tensors, items, str(i))
            numbers[field] = {"tuple" if isinstance(value, tuple) else "list": items}
        case None | bool() | int() | float() | str():
            numbers[field] = {"is": value}
        case _:
            raise StateError(f"save: {key} is a {type(value).__name__}, which a prompt file cannot hold.")


def _get(saved: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    match saved:
        case {"tensor": key}:
            return tensors[key]
        case {"span": inner}:
            return Span(**{name: _get(x, tensors) for name, x in inner.items()})
        case {"list": items}:
            return [_get(items[str(i)], tensors) for i in range(len(items))]
        case {"tuple": items}:
            return tuple(_get(items[str(i)], tensors) for i in range(len(items)))
        case {"is": value}:
            return value
        case _:
            raise StateError(f"{saved!r:.100} is no field of a state.")


def _fill(part: State, name: str, saved: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Set the fields of an empty state to what was saved; a trimmed cache goes to the front of its buffer."""
    fields = vars(part)
    if saved[""] != type(part).__name__ or set(saved) - {""} != set(fields):
        raise StateError(
            f"{name} is a {saved['']} of {', '.join(saved)}; expected a {type(part).__name__} of {', '.join(fields)}."
        )
    for field, empty in list(fields.items()):
        if isinstance(empty, State):
            _fill(empty, f"{name}.{field}", saved[field], tensors)
            continue
        value = _get(saved[field], tensors)
        if isinstance(empty, Tensor):
            if value.ndim != empty.ndim or value.dtype != empty.dtype:
                raise StateError(f"{name}.{field} does not fit this model's state.")
            if value.shape != empty.shape:
                empty[tuple(slice(n) for n in value.shape)] = value
                value = empty
        fields[field] = value
