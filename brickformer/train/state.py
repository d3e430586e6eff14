"""The state of training between two steps, as named tensors: what an exact resumption needs.

    model.*     weights and buffers             average.*   the average of the weights, when there is one
    optim.*     see Optimizers.tensors          rng.*       torch's random numbers
    log.*       sums since the last record

Batches are functions of the step and schedules too: they need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from brickformer.errors import RunError
from brickformer.train.checkpoint import load_into
from brickformer.train.ema import Average
from brickformer.train.optim import Optimizers


@final
class TrainingState:
    """Everything that changes from step to step.

    total, tokens: loss summed over the targets since the last record, and how many they were.
    """

    def __init__(self, model: nn.Module, optim: Optimizers, average: Average | None, device: torch.device) -> None:
        self.model, self.optim, self.average, self.device = model, optim, average, device
        # some devices have no float64
        self.total = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        self.tokens = 0

    def tensors(self) -> dict[str, Tensor]:
        """Named tensors; they share memory with the training itself."""
        out = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        out |= {f"optim.{name}": t for name, t in self.optim.tensors().items()}
        if self.average:
            out |= {f"average.{name}": t for name, t in self.average.shadow.items()}
        out |= {"log.total": self.total, "log.tokens": torch.tensor(self.tokens), "rng.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            out["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        return out

    def restore(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Take back what `tensors` gave. Errors: RunError when it belongs to another model or other settings."""

        def under(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        for name in ("log.total", "log.tokens", "rng.cpu"):
            if name not in tensors:
                raise RunError(f"{where}: broken: no tensor {name!r}. Only what `brick train` saved can be resumed.")
        load_into(self.model, under("model."), where)
        self.optim.restore(under("optim."))
        if self.average:
            self.average.restore(under("average."))
        self.total.copy_(tensors["log.total"])
        self.tokens = int(tensors["log.tokens"])
        torch.set_rng_state(tensors["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.device)
