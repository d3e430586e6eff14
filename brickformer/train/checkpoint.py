"""The run folder: all that is left of a run, and all that is needed to use it or to go on with it.

    runs/NAME-001/
        spec.json            the model, every field
        run.json             what was asked for: task, settings, seed
        tokenizer.json       how text became numbers, where there is text
        weights.safetensors  the weights (their average, when there is one), with the step in the metadata
        state.safetensors    what going on needs: weights, optimizer, random numbers, in one file: they fit together
        metrics.jsonl        one line a logging step
        loss.png             the same as a picture

A new run never takes the folder of an earlier one (see numbered.py). Nothing here knows a model: it takes named tensors
and JSON.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from brickformer.errors import RunError, nearest
from brickformer.files import read_json, read_metadata, read_tensors, write_json, write_tensors
from brickformer.train.numbered import numbered

try:
    import fcntl
except ImportError:  # Windows: two processes that resume one run are not told apart there
    fcntl = None  # type: ignore[assignment]

Json = Mapping[str, Any]


@final
@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run on the disk."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str, *, spec: Json, run: Json, tokenizer: Json | None = None) -> RunFolder:
        """A new folder root/NAME-001, or the next free number, with its JSON files in it.

        Two processes never get the same one. Errors: RunError: a bad name, a full disk, no permission; nothing is left
        then.
        """
        with cls.making(root, name, spec=spec, run=run, tokenizer=tokenizer) as (_, made):
            return made

    @classmethod
    @contextmanager
    def making(
        cls, root: Path, name: str, *, spec: Json, run: Json, tokenizer: Json | None = None
    ) -> Iterator[tuple[RunFolder, RunFolder]]:
        """(where to write the rest, the folder once the block has ended): as `create`, but there when it is whole.

        Whatever ends the block before, the death of the process too, leaves no folder of a run.
        """
        cls.check(root, name)
        with numbered(root, name) as (part, path):
            write_json(part / "spec.json", spec)
            write_json(part / "run.json", run)
            if tokenizer is not None:
                write_json(part / "tokenizer.json", tokenizer)
            yield cls(part), cls(path)

    @staticmethod
    def check(root: Path, name: str) -> None:
        """What `create` would refuse, before the work. Errors: RunError: a bad name, a file where folders are to be."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise RunError(
                f"run name: got {name!r}, expected ASCII letters (a to z), digits, '.', '_' and '-', as in text-wide."
            )
        for place in (root, *root.parents):
            if place.exists() and not place.is_dir():
                raise RunError(f"{place}: is a file, and run folders go into a folder. Name another one.")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The run at `path`. Errors: RunError: no such folder, no run, or one cut off before its first save."""
        if not path.is_dir():
            near = [str(p) for p in path.parent.glob("[!.]*") if p.is_dir()]
            raise RunError(f"{path}: no such run folder; {nearest(str(path), near)}")
        folder = cls(path)
        if not any((path / name).exists() for name in ("spec.json", "run.json", "weights.safetensors")):
            raise RunError(f"{path}: not a run folder: no spec.json in it. Name a folder that `brick train` made.")
        for name in ("spec.json", "run.json"):
            read_json(path / name)
        weights = path / "weights.safetensors"
        if not weights.exists():
            raise RunError(f"{weights}: missing. The run was stopped before its first save; train or import again.")
        return folder

    @property
    def metrics(self) -> Path:
        """Where the metrics are."""
        return self.path / "metrics.jsonl"

    @property
    def picture(self) -> Path:
        """Where the loss curve is."""
        return self.path / "loss.png"

    def spec(self) -> dict[str, Any]:
        """The model's spec as data."""
        return read_json(self.path / "spec.json")

    def run(self) -> dict[str, Any]:
        """What was asked for."""
        return read_json(self.path / "run.json")

    def tokenizer(self) -> dict[str, Any] | None:
        """The tokenizer as data; None when the run has none."""
        path = self.path / "tokenizer.json"
        return read_json(path) if path.exists() else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While it lasts no other process trains this run. The lock ends with the process, however that ends.

        Errors: RunError: another one does.
        """
        if fcntl is None:
            yield
            return
        folder = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{self.path}: another process is training this run. Wait for it, or stop it.") from None
            except OSError:  # a file system without locks
                pass
            yield
        finally:
            os.close(folder)

    def save_weights(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Write the weights after `step` steps. Errors: RunError; the weights saved before are still there then."""
        write_tensors(self.path / "weights.safetensors", weights, {"step": str(step)})

    def weights(self) -> tuple[dict[str, Tensor], int]:
        """(weights by name, after how many steps). Errors: RunError: missing or broken."""
        return _with_step(self.path / "weights.safetensors")

    def load_weights(self, model: nn.Module) -> int:
        """Put the saved weights into `model`; returns their step. Errors: RunError: missing, broken, do not fit."""
        weights, step = self.weights()
        load_into(model, weights, str(self.path / "weights.safetensors"))
        return step

    def save_state(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Write what going on after `step` steps needs. Errors: as `save_weights`."""
        write_tensors(self.path / "state.safetensors", tensors, {"step": str(step)})

    def state(self) -> tuple[dict[str, Tensor], int]:
        """What `save_state` wrote. Errors: RunError: missing or broken."""
        return _with_step(self.path / "state.safetensors")

    def state_step(self) -> int:
        """After how many steps the state was saved; none of it is read. Errors: RunError: missing or broken."""
        path = self.path / "state.safetensors"
        return _step(path, read_metadata(path))


def load_into(model: nn.Module, weights: Mapping[str, Tensor], where: str, *, assign: bool = False) -> None:
    """Copy named tensors into a model that has exactly these names and shapes. Errors: RunError naming what differs.

    assign: the tensors become the model's own, in its types; for a model that was built without numbers.
    """
    own = model.state_dict()
    problems = [f"no tensor {name!r}" for name in own if name not in weights]
    problems += [f"{name!r} belongs to no part of the model" for name in weights if name not in own]
    problems += [
        f"{name!r} is {tuple(weights[name].shape)}, the model has {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RunError(f"{where} does not fit the model: {problems[0]}{more}. Was it saved with this spec.json?")
    if assign:
        weights = {name: weights[name].to(tensor.dtype) for name, tensor in own.items()}
    model.load_state_dict(dict(weights), assign=assign)


def _with_step(path: Path) -> tuple[dict[str, Tensor], int]:
    tensors, metadata = read_tensors(path)
    return tensors, _step(path, metadata)


def _step(path: Path, metadata: Mapping[str, str]) -> int:
    step = metadata.get("step", "")
    if not step.isdecimal():
        raise RunError(f"{path}: broken: no step in its metadata. Only files of `brick train` can be used here.")
    return int(step)
