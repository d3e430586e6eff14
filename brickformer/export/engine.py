"""ONNX Runtime at work on exported graphs: one row, its caches in buffers of its own, nothing copied between tokens.

reader = Reader(graphs, facts, threads)
reader.begin(source);  logits = reader.feed(ids)        prompts and single tokens alike
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from brickformer.errors import BrickError, RunError, StateError
from brickformer.pages import large_pages

STEP: Final = 64
"""Slots by which caches grow."""


def runtime() -> Any:
    """The package. Errors: BrickError saying how to install it."""
    try:
        import onnxruntime  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise BrickError('onnxruntime is not installed. Install it: pip install "brickformer[onnx]"') from None
    return onnxruntime


@final
class Reader:
    """graphs: "decoder", and "encoder" where there is one, as files. facts: of `Exported`. threads: of a product."""

    def __init__(self, graphs: Mapping[str, bytes], facts: Mapping[str, Any], threads: int) -> None:
        self.ort = runtime()
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        cpu = ["CPUExecutionProvider"]
        try:
            with large_pages():
                self.sessions = {n: self.ort.InferenceSession(g, options, providers=cpu) for n, g in graphs.items()}
        except Exception as e:  # ONNX Runtime's errors have no base class of their own
            said = next(iter(str(e).splitlines()), type(e).__name__)
            raise RunError(f"the graph cannot be loaded: {said[:200]}. Export it again.") from None
        self.caches: dict[str, list[int | str]] = dict(facts["caches"])
        self.crosses: list[str] = list(facts["crosses"])
        self.vocab = int(facts["vocab"])
        self.max_len, self.max_source = int(facts["max_len"]), int(facts["max_source"])
        self.decoder = self.sessions["decoder"]
        self.length = self.room = 0
        self.width = -1  # tokens at a time that arrays are bound for
        self.memory: dict[str, Any] = {}
        self.buffers: dict[str, npt.NDArray[np.float32]] = {}
        self.given: dict[str, npt.NDArray[Any]] = {}
        self.answer = torch.zeros(1, self.vocab)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def begin(self, source: Sequence[int] | None = None, room: int = STEP) -> None:
        """A new row. source: what the encoder reads. room: slots that will be needed, as far as that is known.

        Errors: StateError for a source past the encoder's positions; the row before can go on then.
        """
        memory: dict[str, Any] = {}
        if "encoder" in self.sessions:
            assert source is not None
            if len(source) > self.max_source:
                raise StateError(
                    f"the exported graph reads {self.max_source} positions of a source; got {len(source)} tokens. "
                    "Shorten the text, or export a model with more."
                )
            given = {"ids": np.array([source], np.int64), "positions": np.arange(len(source), dtype=np.int64)[None]}
            names = [o.name for o in self.sessions["encoder"].get_outputs()]
            found = self.sessions["encoder"].run(names, given)
            memory = dict(zip(names, map(self.ort.OrtValue.ortvalue_from_numpy, found), strict=True))
        self.length, self.room, self.buffers, self.memory = 0, 0, {}, memory
        self._grow(max(1, room))

    def feed(self, ids: Sequence[int]) -> Float[Tensor, "1 V"]:
        """Read tokens; logits after the last, in memory that the next call writes anew.

        Errors: StateError past the most slots, and for no token.
        """
        total = self.length + len(ids)
        if total > self.max_len:
            raise StateError(
                f"the exported graph has {self.max_len} positions; asked for token {total}. Shorten the text, or "
                "export a model with more."
            )
        if total > self.room:
            self._grow(max(total, 2 * self.room))
        if len(ids) != self.width:
            self._take(len(ids))
        given = self.given
        given["ids"][0] = ids
        given["positions"][0] = np.arange(self.length, total)
        given["last"][0], given["total"][0] = total - 1, total
        self.decoder.run_with_iobinding(self.binding)
        self.length = total
        return self.answer

    def _take(self, width: int) -> None:
        """Arrays for so many tokens at a time, bound as what goes in. Errors: StateError for none."""
        if not width:
            raise StateError("the exported graph was given no token to read; expected at least one.")
        whole, one = np.zeros((1, width), np.int64), np.zeros(1, np.int32)
        self.given = {"ids": whole, "positions": whole.copy(), "last": one, "total": one.copy()}
        known = {i.name for i in self.decoder.get_inputs()}
        for name in known & set(self.given):
            self.binding.bind_cpu_input(name, self.given[name])
        self.width = width

    def _grow(self, slots: int) -> None:
        """Caches of at least so many slots, with what is in them; bound once, as what goes in and what comes out."""
        room = min(-(-slots // STEP) * STEP, self.max_len)
        value = self.ort.OrtValue.ortvalue_from_numpy  # shares the array's memory
        shapes = {name: [room if isinstance(n, str) else n for n in shape] for name, shape in self.caches.items()}
        ends = list(accumulate(map(prod, shapes.values())))
        whole = np.zeros(ends[-1] if ends else 0, np.float32)  # in one piece, for which numpy asks for large pages
        buffers = {}
        for (name, shape), end in zip(shapes.items(), ends, strict=True):
            fresh = buffers[name] = whole[end - prod(shape) : end].reshape(shape)
            old = self.buffers.get(name)
            if old is not None:
                fresh[tuple(map(slice, old.shape))] = old
        self.buffers, self.room, self.width = buffers, room, -1
        io = self.binding = self.decoder.io_binding()
        for name, buffer in buffers.items():
            shared = value(buffer)
            io.bind_ortvalue_input(f"past.{name}", shared)
            io.bind_ortvalue_output(name, shared)
        for name in self.crosses:
            io.bind_ortvalue_input(name, self.memory[name])
        io.bind_ortvalue_output("logits", value(self.answer.numpy()))
