"""Away: while a model is coded by data, its full weights lie in a temporary file and are read at every use.

    with put_away(model, names): ...      in memory is the matrix in use, and what is coded already

Rounding by data needs the full model until the last matrix is coded (see drift.py), and a quarter of it beside. On the
file system both are there and neither is in memory. What was not coded comes back at the end, whatever happens.

Shapes: W (O, I), x (..., I).
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.errors import BrickError
from brickformer.linear import CodedMap, FusedLinear
from brickformer.quant.codes import give_back
from brickformer.surgery import carry_hooks, get, replace

_ONE_READER: Final = threading.Lock()
"""A file has one place at which it is read; a model may be run by several threads."""


@final
class AwayLinear(CodedMap):
    """A linear map whose weights lie in a file; whoever asks for them gets them in memory of their own."""

    def __init__(self, like: nn.Linear, file: BinaryIO) -> None:
        super().__init__()
        self.in_features, self.out_features = like.in_features, like.out_features
        self.parts = like.parts if isinstance(like, FusedLinear) else (like.out_features,)
        self.bias = like.bias
        self.nbytes = like.weight.nbytes
        self._place = _Place(like.weight.detach(), file)
        carry_hooks(like, self)

    @property
    def weight(self) -> Float[Tensor, "O I"]:
        """Read anew."""
        return self._place.read()

    def forward(self, input: Float[Tensor, "*N I"]) -> Float[Tensor, "*N O"]:
        """(..., I) -> (..., O)."""
        return F.linear(input, self.weight, self.bias)

    def product(self) -> Callable[[Tensor], Tensor]:
        """No other than `forward`: it reads many rows."""
        return self.forward


@final
class _Place:
    """Where the numbers of a tensor lie; copies of a module read them in the same place."""

    def __init__(self, tensor: Tensor, file: BinaryIO) -> None:
        self.shape, self.dtype, self.device, self.file = tensor.shape, tensor.dtype, tensor.device, file
        self.at = file.seek(0, 2)
        if tensor.numel():
            file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def read(self) -> Tensor:
        with torch.inference_mode(False):  # what comes back can be trained, wherever it was asked for
            tensor = torch.empty(self.shape, dtype=self.dtype)
            if tensor.numel():
                with _ONE_READER:
                    self.file.seek(self.at)
                    got = self.file.readinto(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[attr-defined]
                assert got == tensor.nbytes, "the temporary file has lost its end"
            return tensor.to(self.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Place:
        return self


@contextmanager
def put_away(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Put the weights of these linear maps away, but for those that others share. Errors: BrickError: a full disk."""
    uses = Counter(id(p) for m in dict.fromkeys(model.modules()) for p in m._parameters.values())
    away: dict[str, tuple[AwayLinear, nn.Linear]] = {}
    with _temporary() as file:
        try:
            for name in names:
                old = get(model, name)
                assert isinstance(old, nn.Linear)
                if uses[id(old.weight)] == 1:
                    new = _written(old, file)
                    away[name] = new, old
                    replace(model, name, new)
                    old.weight.data = old.weight.data.new_empty(0)
                    give_back()
            yield
        finally:
            for name, (new, old) in away.items():
                if get(model, name) is new:
                    old.weight.data = new.weight
                    replace(model, name, old)


def _temporary() -> BinaryIO:
    try:
        return tempfile.TemporaryFile()
    except OSError as e:
        raise _no_place(e) from None


def _written(linear: nn.Linear, file: BinaryIO) -> AwayLinear:
    try:
        return AwayLinear(linear, file).train(linear.training)
    except OSError as e:
        raise _no_place(e) from None


def _no_place(e: OSError) -> BrickError:
    where = tempfile.tempdir or "the system"  # None where no folder was found at all
    return BrickError(
        f"quantize: {where} cannot hold the full weights while they are coded: {e.strerror or e}. "
        "Make room, or set TMPDIR to a folder that has it."
    )
