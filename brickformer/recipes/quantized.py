"""Quantize a trained run: a new run folder with small weights, and a receipt of what that cost.

    runs/NAME-int4-001/    what a run folder holds, weights coded;  receipt.json, receipt.txt, receipt.png

The folder is there when all of it is, or not at all. Loss and exact match are those of the run's own held-out data.
"""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import nn

from brickformer.errors import RunError
from brickformer.files import replacing, write_json, write_tensors, write_whole
from brickformer.generate import Stop, generate
from brickformer.quant import Calibration, Heads, Matrix, Method, Receipt, Scheme, entry, quantize
from brickformer.quant.quantize import linears
from brickformer.recipes.examples import answered, share_exact
from brickformer.recipes.run import forward
from brickformer.recipes.trained import Trained
from brickformer.recipes.weighted import ENTRY, is_quantized, plain_spec
from brickformer.tasks import Data
from brickformer.train import RunFolder, mean_loss

TIMED = 32
"""Tokens of an answer whose time is taken."""
TURNS = 5
"""Answers of each model, one after the other's."""


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How a run is quantized.

    calibrate: batches of training data to round by, 0 for none. tune: steps on them in which rounding and scales are
    learned afterwards (quant/tune.py). worst: how many matrices with the largest errors stay as they are, beside those
    named in `keep`. head, table: see `quantize`.
    """

    scheme: Scheme
    calibrate: int = 0
    method: Method = "gptq"
    keep: Sequence[str] = ()
    worst: int = 0
    head: Heads = "same"
    table: bool = False
    tune: int = 0

    def check(self) -> None:
        """Errors: RunError: less than no batches, steps without data to learn from."""
        if self.calibrate < 0:
            raise RunError(f"quantize: calibrate: got {self.calibrate}, expected 0 batches or more.")
        if self.tune and not self.calibrate:
            raise RunError(f"quantize: tune: got {self.tune} steps and no data to learn from. Set calibrate=N too.")

    def __str__(self) -> str:
        """In words."""
        return self.told(tuned=True)

    def told(self, *, tuned: bool) -> str:
        """In words. tuned: whether tuning, where it was asked for, changed anything."""
        said = [f"{self.method} on {self.calibrate} batches" if self.calibrate else "rounded to nearest"]
        if self.tune:
            said += [f"tuned for {self.tune} steps" if tuned else f"{self.tune} steps of tuning undone: no better"]
        said += [f"the {self.worst} worst kept"] if self.worst else []
        said += [f"kept: {', '.join(self.keep)}"] if self.keep else []
        said += [] if self.head == "same" else [f"head: {self.head}"]
        said += ["token tables too"] if self.table else []
        return ", ".join([repr(self.scheme), *said])


def quantize_run(
    path: Path, plan: Plan, *, root: Path | None = None, progress: Callable[[int, int], None] = lambda done, whole: None
) -> tuple[RunFolder, Receipt]:
    """The new folder, in `root` (default: beside the run), and the receipt. Errors: BrickError; nothing is left."""
    plan.check()
    folder = RunFolder.open(path)
    if is_quantized(folder):
        raise RunError(f"{path}: is quantized already. Quantize the run that it was made from.")
    trained = Trained.open(path)
    place, name = root or path.parent, f"{trained.run.name}-{plan.scheme.kind}"
    RunFolder.check(place, name)
    linears(trained.model, plan.keep, head=plan.head != "keep")  # what cannot be kept is told before the work
    data = trained.run.task.prepare(trained.run.seed)
    weights = folder.path / "weights.safetensors"
    before = {**measure(trained, data), "file bytes": float(weights.stat().st_size)}
    keep = list(plan.keep)
    if plan.worst:
        first = replace(plan, tune=0)
        keep += Receipt("", _coded(trained.model, first, keep, data, trained, progress)).worst(plan.worst)
        trained = Trained.open(path)
    matrices = _coded(trained.model, plan, keep, data, trained, progress)
    after = measure(trained, data)
    spec = {**plain_spec(folder), ENTRY: entry(trained.model)}
    made = RunFolder.create(place, name, spec=spec, run=folder.run(), tokenizer=folder.tokenizer())
    try:
        with replacing(made.path / weights.name) as ready:  # the last to get its name: without weights it is no run
            write_tensors(ready, trained.model.state_dict(), {"step": str(trained.step)})
            after["file bytes"] = float(ready.stat().st_size)
            before["ms a token"], after["ms a token"] = ms_token(Trained.open(path), trained, data)
            receipt = Receipt(plan.told(tuned=any(m.tuned for m in matrices)), matrices, before, after)
            write_json(made.path / "receipt.json", receipt.to_dict())
            write_whole(made.path / "receipt.txt", (receipt.table() + "\n").encode())
            picture = io.BytesIO()
            receipt.picture().savefig(picture, format="png")
            write_whole(made.path / "receipt.png", picture.getvalue())
    except BaseException:
        shutil.rmtree(made.path, ignore_errors=True)
        raise
    return made, receipt


def _coded(
    model: nn.Module,
    plan: Plan,
    keep: Sequence[str],
    data: Data,
    trained: Trained,
    progress: Callable[[int, int], None],
) -> list[Matrix]:
    size = trained.run.train.batch
    readings = [lambda m, i=i: forward(m, data.batch(i, size)) for i in range(plan.calibrate)]
    calibration = Calibration(readings, plan.method, plan.tune) if readings else None
    return quantize(model, plan.scheme, calibration, keep=keep, head=plan.head, table=plan.table, progress=progress)


@torch.inference_mode()
def measure(trained: Trained, data: Data) -> dict[str, float]:
    """Loss on the held-out batches, bits a byte of running text or exact match of answers."""
    size = trained.run.train.batch
    found = {"loss": mean_loss(trained.model, data.validation(size), forward)}
    if trained.writes_text:
        characters = [ids for batch in data.validation(size) for ids in batch.targets.tolist()]
        tokens = sum(map(len, characters))
        octets = sum(len(data.target.decode(ids).encode()) for ids in characters)
        found["bits a byte"] = found["loss"] / math.log(2.0) * tokens / max(1, octets)
    else:
        found["exact"] = share_exact(answered(trained, data, trained.run.answers))
    return found


@torch.inference_mode()
def ms_token(full: Trained, coded: Trained, data: Data) -> tuple[float, float]:
    """Milliseconds a token of two models, as `brick generate` writes one answer; the best of some, taken in turns.

    What else the machine does then meets both. Errors: BrickError.
    """
    prompt: list[int]
    if full.writes_text:
        prompt = next(iter(data.validation(1))).inputs[0, :8].tolist()
    else:
        prompt = full.writer.given(data.examples()[0][0])[1] or []
    stop, writers = Stop(max_tokens=TIMED), (full.write(packed=True), coded.write(packed=True))
    turns = [[generate(writer, [prompt], stop=stop).stats.ms_token for writer in writers] for _ in range(TURNS)]
    return min(one for one, _ in turns), min(other for _, other in turns)
