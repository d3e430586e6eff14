"""A small model and endless ragged batches, both independent of the kit's own models and tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from brickformer.linear import FusedLinear
from brickformer.train import Progress

VOCAB = 11
PADDING = -100


@dataclass(frozen=True)
class ToyBatch:
    """What the loop needs, and what the toy's forward needs."""

    inputs: Tensor
    targets: Tensor
    tokens: int


def ragged(index: int, rows: int) -> ToyBatch:
    """Rows number index·rows, ...: each drawn from its own number alone, 1 to 7 tokens, padded; target 3·id + noise."""
    made = []
    for row in range(index * rows, (index + 1) * rows):
        draw = torch.Generator().manual_seed(row)
        length = int(torch.randint(1, 8, (), generator=draw))
        ids = torch.randint(VOCAB, (length,), generator=draw)
        targets = (3 * ids + torch.randint(2, (length,), generator=draw)) % VOCAB
        made.append((ids, targets))
    width = max(len(ids) for ids, _ in made)
    inputs = torch.zeros(rows, width, dtype=torch.long)
    targets = torch.full((rows, width), PADDING)
    for i, (ids, wanted) in enumerate(made):
        inputs[i, : len(ids)] = ids
        targets[i, : len(wanted)] = wanted
    return ToyBatch(inputs, targets, int((targets != PADDING).sum()))


class Toy(nn.Module):
    """Embedding, a residual branch of FusedLinear and Linear with dropout, norm, output: every kind of parameter."""

    def __init__(self, *, dim: int = 8, dropout: float = 0.0, tied: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, dim)
        self.up = FusedLinear(dim, (12, 12))
        self.down = nn.Linear(12, dim)
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        gate, value = self.up(x).split((12, 12), dim=-1)
        x = x + self.drop(self.down(torch.tanh(gate) * value))
        return self.out(self.norm(x))


class Ears(Progress):
    """Progress that writes everything down."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.losses: list[float | None] = []
        self.said: list[str] = []

    def begin(self, step: int, steps: int) -> None:
        self.heard.append(("begin", step, steps))

    def step(self, step: int, loss: float | None) -> None:
        self.heard.append(step)
        self.losses.append(loss)

    def record(self, record: Mapping[str, float]) -> None:
        self.heard.append(("record", record["step"]))

    def say(self, text: str) -> None:
        self.heard.append(text)
        self.said.append(text)

    def close(self) -> None:
        self.heard.append("close")


def forward(model: nn.Module, batch: ToyBatch) -> Tensor:
    """What `fit` is given."""
    return model(batch.inputs)
