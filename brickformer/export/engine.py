"""ONNX Runtime at work on exported graphs: one row, its caches in buffers of its own, nothing copied between tokens.

reader = Reader(graphs, facts, threads)
reader.begin(source);  logits = reader.feed(ids)        prompts and single tokens alike
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from brickformer.errors import BrickError, RunError, StateError

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
        try:
            self.sessions = {
                name: self.ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
                for name, graph in graphs.items()
            }
        except Exception as e:  # ONNX Runtime's errors have no base class of their own
            raise RunError(f"the graph cannot be loaded: {str(e).splitlines()[0][:200]}. Export it again.") from None
        self.caches: dict[str, list[int | str]] = dict(facts["caches"])
        self.crosses: list[str] = list(facts["crosses"])
        self.vocab = int(facts["vocab"])
        self.max_len, self.max_source = int(facts["max_len"]), int(facts["max_source"])
        self.length = self.room = 0
        self.binding: Any = None
        self.buffers: dict[str, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(b.numpy().nbytes for b in self.buffers.values())

    def begin(self, source: Sequence[int] | None = None, room: int = STEP) -> None:
        """A new row. source: what the encoder reads. room: slots that will be needed, as far as that is known.

        Errors: StateError for a source past the encoder's positions.
        """
        self.length, self.room, self.buffers = 0, 0, {}
        self.memory: dict[str, Any] = {}
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
            self.memory = dict(zip(names, map(self.ort.OrtValue.ortvalue_from_numpy, found), strict=True))
        self._grow(max(1, room))

    def feed(self, ids: Sequence[int]) -> Float[Tensor, "1 V"]:
        """Read tokens; logits after the last. Errors: StateError past the most slots."""
        total = self.length + len(ids)
        if total > self.max_len:
            raise StateError(
                f"the exported graph has {self.max_len} positions; asked for token {total}. Shorten the text, or "
                "export a model with more."
            )
        if total > self.room:
            self._grow(max(total, 2 * self.room))
        io = self.binding
        io.bind_cpu_input("ids", np.array([ids], np.int64))
        if "positions" in self.inputs:
            io.bind_cpu_input("positions", np.arange(self.length, total, dtype=np.int64)[None])
        if "last" in self.inputs:
            io.bind_cpu_input("last", np.array([total - 1], np.int32))
            io.bind_cpu_input("total", np.array([total], np.int32))
        self.sessions["decoder"].run_with_iobinding(io)
        self.length = total
        return torch.from_numpy(self.logits.numpy()).view(1, self.vocab).clone()

    def _grow(self, slots: int) -> None:
        """Caches of at least so many slots, with what is in them; bound once, as what goes in and what comes out."""
        room = min(-(-slots // STEP) * STEP, max(self.max_len, slots))
        value = self.ort.OrtValue
        buffers: dict[str, Any] = {}
        for name, shape in self.caches.items():
            sized = [room if isinstance(n, str) else n for n in shape]
            fresh = np.zeros(sized, np.float32)
            if name in self.buffers:
                old = self.buffers[name].numpy()
                fresh[tuple(map(slice, old.shape))] = old
            buffers[name] = value.ortvalue_from_numpy(fresh)
        self.buffers, self.room = buffers, room
        session = self.sessions["decoder"]
        self.inputs = {i.name for i in session.get_inputs()}
        io = self.binding = session.io_binding()
        for name, buffer in self.buffers.items():
            io.bind_ortvalue_input(f"past.{name}", buffer)
            io.bind_ortvalue_output(name, buffer)
        for name in self.crosses:
            io.bind_ortvalue_input(name, self.memory[name])
        self.logits = value.ortvalue_from_numpy(np.zeros((1, self.vocab), np.float32))
        io.bind_ortvalue_output("logits", self.logits)
