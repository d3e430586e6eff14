"""A session: one run being trained. It joins what the leaves cannot know of each other: task, model, loop, generation.

    session = Session.new(reverse(), Path("runs"));  session.fit();  session.examples(5)

`fit` writes the run folder. `Session.resume` goes on with one that was stopped; the numbers are as if it never was.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Final, final

import torch
from torch import nn

from brickformer.errors import RunError
from brickformer.files import write_json
from brickformer.generate import Stop
from brickformer.look.watch import entropies
from brickformer.recipes.examples import Example, answered, share_exact
from brickformer.recipes.run import Run, check_lengths, completed, forward
from brickformer.recipes.trained import Trained, best_device, run_of
from brickformer.recipes.weighted import is_quantized
from brickformer.tasks import Data, dump_tokenizers
from brickformer.train import Progress, Result, RunFolder, fit, mean_loss

ROWS: Final = 4
NEWEST: Final = 64
"""Held-out rows, and tokens of each, whose attention is measured while training: little beside a validation."""


@final
class Session:
    """Data, model and folder of one run. run: completed, its vocabularies those of the data."""

    def __init__(self, run: Run, folder: RunFolder | None, data: Data, *, resumed: bool) -> None:
        self.run, self.folder, self.data, self.resumed = run, folder, data, resumed
        self.asked_anew = False  # whether a resumed run has other settings than its folder says
        torch.manual_seed(run.seed)  # initial values; then dropout
        self.model = run.model.build().to(best_device())
        check_lengths(self.model, data)
        self.trained = Trained(run, self.model, data.source, data.target)

    @classmethod
    def new(cls, run: Run) -> Session:
        """Read or draw the data, build the model; nothing is written before `fit`. Errors: BrickError."""
        data = run.task.prepare(run.seed)
        return cls(completed(run, data), None, data, resumed=False)

    @classmethod
    def resume(cls, path: Path, change: Callable[[Run], Run] = lambda run: run) -> Session:
        """Go on with a run that was stopped. change: of its settings. Errors: RunError when the data has changed."""
        folder = RunFolder.open(path)
        if is_quantized(folder):
            raise RunError(f"{path}: is quantized, which is for use. Go on with the run that it was made from.")
        before = run_of(folder)
        run = change(before)
        for name, own, asked in (("seed", before.seed, run.seed), ("name", before.name, run.name)):
            if asked != own:
                raise RunError(f"{path}: {name}: got {asked!r}; the run goes on with its own, {own!r}. Leave it out.")
        data = run.task.prepare(run.seed)
        if data.fingerprint != folder.run().get("data"):
            raise RunError(
                f"{path}: the data of {run.task.kind!r} has changed since the run began. Restore it, or train anew."
            )
        step = folder.state_step()
        if step >= run.train.steps:
            raise RunError(
                f"{path}: finished: {step} steps are done; got {run.train.steps}, expected more: "
                f"brick train --resume {path} --steps N"
            )
        session = cls(completed(run, data), folder, data, resumed=True)
        session.asked_anew = run != before
        return session

    def record(self) -> dict[str, object]:
        """What run.json holds: all that decides how the run goes, and what it ran on."""
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        return {"run": self.run.to_dict(), "data": self.data.fingerprint, "versions": versions}

    def create_folder(self, root: Path) -> RunFolder:
        """The folder of a new run. Errors: RunError: a full disk, no permission."""
        tokenizer = json.loads(dump_tokenizers(self.data.source, self.data.target))
        spec = self.run.model.to_dict()
        self.folder = RunFolder.create(root, self.run.name, spec=spec, run=self.record(), tokenizer=tokenizer)
        return self.folder

    def accepted(self) -> None:
        """The saved state fits what is asked for: only now may the folder say so. A refusal leaves it as it was."""
        assert self.folder is not None
        if self.asked_anew:
            write_json(self.folder.path / "spec.json", self.run.model.to_dict())
            write_json(self.folder.path / "run.json", self.record())

    def fit(self, progress: Progress | None = None) -> Result:
        """Train to the end, or to Ctrl-C. Errors: RunError: a loss that is not finite, a full disk, a run in use."""
        with self.folder.alone() if self.folder else nullcontext():
            return fit(
                self.model,
                self.run.train,
                self.data.batch,
                forward,
                evaluate=self.evaluate,
                run=self.folder,
                progress=progress,
                resume=self.resumed,
                accepted=self.accepted,
            )

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Loss on the held-out batches; the share of held-out sequences that are answered exactly, end included."""
        values = {"val_loss": mean_loss(model, self.data.validation(self.run.train.batch), forward)}
        examples = self.examples(self.run.answers)
        if examples:
            values["exact"] = share_exact(examples)
        return values | self.entropies(model)

    def entropies(self, model: nn.Module) -> dict[str, float]:
        """Mean entropy of each attention at the last tokens of a few held-out rows."""
        batch = next(iter(self.data.validation(ROWS)))
        rows = (max(0, batch.inputs.shape[1] - NEWEST), batch.inputs.shape[1])
        return entropies(model, lambda: forward(model, batch), len(batch.inputs), rows)

    def examples(self, most: int) -> list[Example]:
        """Answers to the first held-out sources, greedy; none for a language model."""
        return answered(self.trained, self.data, most)

    def passage(self, tokens: int) -> tuple[str, str]:
        """The beginning of the held-out text and how the model goes on; for a language model."""
        first = next(iter(self.data.validation(1))).inputs[0]
        prompt = self.data.target.decode(first[: max(1, len(first) // 2)].tolist())
        result = self.trained.generate([prompt], stop=Stop(max_tokens=tokens)).results[0]
        return prompt, result.text or ""
