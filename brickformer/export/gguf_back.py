"""A GGUF file read back: its tensors under the checkpoint's names, as the checkpoint has them.

Blocks become numbers again (by the `gguf` package), and what llama.cpp stores otherwise is turned back. So what was
written is compared with what was meant by other code than wrote it, llama.cpp or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from brickformer.export.gguf import names_there, place
from brickformer.export.llamacpp import architecture, fields, restored


@final
class ReadBack:
    """The tensors of a file. config: of the checkpoint. names: of its tensors, those that were written."""

    def __init__(self, path: Path, config: Mapping[str, Any], names: Iterable[str], vocab: int) -> None:
        import gguf

        self._config, self._known = config, architecture(config)
        there = names_there(self._known, int(fields(config, vocab)["block_count"]))
        self._places = {name: place(there, name, self._known.name) for name in names}
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def read(self, name: str) -> Tensor:
        """One tensor in float32, as the checkpoint has it."""
        import gguf

        found = self._tensors[self._places[name]]
        numbers = gguf.dequantize(found.data, found.tensor_type)
        shape = tuple(int(n) for n in reversed(found.shape))
        whole = torch.from_numpy(numbers.astype("float32", copy=True)).view(shape)
        return restored(name, whole, self._config, self._known)
