"""What a row says, and what several rows need: a small language model that learns, the digit task, curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from common import DATA, ROOT, figure, keep_picture, median, smooth, take_turns

from brickformer import MLP, Attention, Decoder, DecoderModel, Layer, LayerNorm, Rope, pattern
from brickformer.recipes.run import forward
from brickformer.tasks import Data
from brickformer.tasks.text import Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOUND = ROOT / "bench" / "results" / "claims"
PICTURES = ROOT / "docs" / "pictures"
BLUE, RED, GREY, GOLD = "#1f5fa8", "#b5533c", "#9aa7b5", "#d9a441"


@dataclass(frozen=True)
class Row:
    """claim: in a few words. article, here: the two figures. verdict: agrees, in part, differs. how: what was done.

    why: where the two differ. table: more figures, in Markdown.
    """

    claim: str
    article: str
    here: str
    verdict: str
    how: str
    why: str = ""
    table: str = ""


@cache
def text(context: int = 64) -> Data:
    """tinyshakespeare, character by character."""
    return Text(data=str(DATA / "tinyshakespeare" / "input.txt"), context=context).prepare(0)


def small_lm(depth: int = 2, **change: object) -> Decoder:
    """D = 64, 4 heads, rotary positions, Pre-LN."""
    layer = Layer(Attention(heads=4, position=Rope()), MLP(256), norm=LayerNorm())
    return Decoder(text().target.vocab, 64, pattern([layer.but(**change) if change else layer], depth))


def learn(
    model: DecoderModel,
    steps: int,
    *,
    rate: float = 3e-3,
    batch: int = 16,
    warmup: int = 20,
    source: Data | None = None,
    clip: bool = True,
) -> list[float]:
    """The training loss of each step, AdamW; shorter where it stopped being finite. source: default: `text`."""
    source, losses = source or text(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for step in range(steps):
        b = source.batch(step, batch)
        loss = F.cross_entropy(forward(model, b).flatten(0, 1), b.targets.flatten())
        if not math.isfinite(loss.item()):
            break
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / warmup) if warmup else rate
        optimizer.step()
    return losses


def end(losses: Sequence[float], last: int = 20) -> float:
    """The mean of the last losses."""
    return sum(losses[-last:]) / len(losses[-last:])


def curves(
    name: str,
    lines: dict[str, list[float]],
    ylabel: str = "training loss (nats)",
    *,
    every: int = 1,
    axis: str = "step",
    log: bool = False,
) -> None:
    """A picture of losses over steps; smoothed, unless they are of `every` so many or over something else."""
    made, (ax,) = figure(7.2, 3.6)
    for (label, values), colour in zip(lines.items(), (BLUE, RED, GOLD, GREY), strict=False):
        shown = smooth(values) if axis == "step" and every == 1 else values
        ax.plot([every * (i + 1) for i in range(len(values))], shown, color=colour, linewidth=1.7, label=label)
    ax.set_xlabel(axis)
    ax.set_ylabel(ylabel)
    if log:
        ax.set_yscale("log")
    ax.legend(frameon=False)
    keep(name, made)


def keep(name: str, made: Figure) -> None:
    """docs/pictures/claim-NAME.png."""
    keep_picture(f"claim-{name}", made, PICTURES, dpi=110)


def ms(job: Callable[[], object], rounds: int = 7, warm: int = 2) -> float:
    """Milliseconds of a call, the middle of `rounds`."""
    return 1e3 * median(take_turns({"": job}, rounds, warm=warm)[""])
