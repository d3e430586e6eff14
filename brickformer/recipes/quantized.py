"""Quantize a trained run: a new run folder with small weights, and a receipt of what that cost.

    runs/NAME-int4-001/    what a run folder holds, weights coded;  receipt.json, receipt.txt, receipt.png

The folder is there when all of it is, or not at all. Loss and exact match are those of the run's own held-out data,
or of a text that the plan names. A model that was imported brings no data: it is rounded to nearest, and the receipt
says nothing of losses.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import nn

from brickformer.errors import RunError
from brickformer.files import write_json, write_whole
from brickformer.generate import Stop, generate
from brickformer.generate.writer import smallest
from brickformer.models import DecoderModel, EncoderModel
from brickformer.quant import Calibration, Heads, Matrix, Method, Receipt, Scheme, entry, quantize
from brickformer.quant.quantize import linears
from brickformer.recipes.examples import answered, share_exact
from brickformer.recipes.run import forward
from brickformer.recipes.trained import Trained
from brickformer.recipes.weighted import ENTRY, is_quantized, plain_spec
from brickformer.tasks import Data, Imported, other_text
from brickformer.train import RunFolder, mean_loss

TIMED = 32
"""Tokens of an answer whose time is taken."""
TURNS = 5
"""Answers of each model, one after the other's."""
WINDOW, ROWS, HELD_OUT = 256, 8, 64
"""Of a text that is named: tokens of a window at most, windows of a batch, windows to measure on."""


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How a run is quantized.

    calibrate: batches of training data to round by, 0 for none. tune: steps on them in which rounding and scales are
    learned afterwards (quant/tune.py). worst: how many matrices with the largest errors stay as they are, beside those
    named in `keep`. head, table: see `quantize`. data: a text file in place of the run's own data, of a decoder.
    """

    scheme: Scheme
    calibrate: int = 0
    method: Method = "gptq"
    keep: Sequence[str] = ()
    worst: int = 0
    head: Heads = "same"
    table: bool = False
    tune: int = 0
    data: str | None = None

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
        of = "" if self.data is None else f" of {self.data}"
        batches = "batch" if self.calibrate == 1 else "batches"
        said = [f"{self.method} on {self.calibrate} {batches}{of}" if self.calibrate else "rounded to nearest"]
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
    data, size = prepared(path, trained, plan)
    weights = folder.path / "weights.safetensors"
    before = {**measure(trained, data, size), "file bytes": float(weights.stat().st_size)}
    keep = list(plan.keep)
    if plan.worst:
        first = replace(plan, tune=0)
        keep += Receipt("", _coded(trained.model, first, keep, data, size, progress)).worst(plan.worst)
        trained = Trained.open(path)
    matrices = _coded(trained.model, plan, keep, data, size, progress)
    after = measure(trained, data, size)
    spec = {**plain_spec(folder), ENTRY: entry(trained.model)}
    run, tokenizer = folder.run(), folder.tokenizer()
    with RunFolder.making(place, name, spec=spec, run=run, tokenizer=tokenizer) as (part, made):
        part.save_weights(trained.model.state_dict(), trained.step)
        after["file bytes"] = float((part.path / weights.name).stat().st_size)
        if not isinstance(trained.model, EncoderModel):  # which writes nothing
            before["ms a token"], after["ms a token"] = ms_token(Trained.open(path), trained, data)
        receipt = Receipt(plan.told(tuned=any(m.tuned for m in matrices)), matrices, before, after)
        write_json(part.path / "receipt.json", receipt.to_dict())
        write_whole(part.path / "receipt.txt", (receipt.table() + "\n").encode())
        picture = io.BytesIO()
        receipt.picture().savefig(picture, format="png")
        write_whole(part.path / "receipt.png", picture.getvalue())
    return made, receipt


def _coded(
    model: nn.Module,
    plan: Plan,
    keep: Sequence[str],
    data: Data | None,
    size: int,
    progress: Callable[[int, int], None],
) -> list[Matrix]:
    calibration = None
    if data is not None and plan.calibrate:
        readings = [lambda m, i=i: forward(m, data.batch(i, size)) for i in range(plan.calibrate)]
        calibration = Calibration(readings, plan.method, plan.tune)
    return quantize(model, plan.scheme, calibration, keep=keep, head=plan.head, table=plan.table, progress=progress)


def prepared(path: Path, trained: Trained, plan: Plan) -> tuple[Data | None, int]:
    """(what to round by and to measure on, rows of a batch): a text that is named, else the run's own, else nothing.

    Errors: RunError: a text for a model that does not go on with texts, batches of a model that came without data.
    """
    run = trained.run
    if plan.data is not None:
        if not isinstance(trained.model, DecoderModel):
            raise RunError(f"--data: goes with decoders, got {run.model.kind}. Leave it out.")
        window = smallest(WINDOW, trained.writer.limit) or WINDOW
        return other_text(plan.data, trained.target, context=window, sample=HELD_OUT), ROWS
    if not isinstance(run.task, Imported):
        return run.task.prepare(run.seed), run.train.batch
    if plan.calibrate:
        do = "name a text: --data FILE, or " if isinstance(trained.model, DecoderModel) else ""
        raise RunError(f"{path}: was imported without data, so there is none to round by; {do}leave --calibrate out.")
    return None, ROWS


@torch.inference_mode()
def measure(trained: Trained, data: Data | None, size: int) -> dict[str, float]:
    """Loss on the held-out batches of `size` rows, bits a byte of running text or exact match of answers."""
    if data is None:
        return {}
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
def ms_token(full: Trained, coded: Trained, data: Data | None) -> tuple[float, float]:
    """Milliseconds a token of two models, as `brick generate` writes one answer; the best of some, taken in turns.

    What else the machine does then meets both. Errors: BrickError.
    """
    prompt: list[int]
    if data is None:
        vocab = (full.source or full.target).vocab
        prompt = torch.randint(vocab, (8,), generator=torch.Generator().manual_seed(0)).tolist()
    elif full.writes_text:
        prompt = next(iter(data.validation(1))).inputs[0, :8].tolist()
    else:
        prompt = full.writer.given(data.examples()[0][0])[1] or []
    stop, writers = Stop(max_tokens=TIMED), (full.write(packed=True), coded.write(packed=True))
    turns = [[generate(writer, [prompt], stop=stop).stats.ms_token for writer in writers] for _ in range(TURNS)]
    return min(one for one, _ in turns), min(other for _, other in turns)
