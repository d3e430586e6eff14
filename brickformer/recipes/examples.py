"""What a model answers to held-out sources, beside what it should answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brickformer.generate import Sampling, Stop
from brickformer.recipes.trained import Trained
from brickformer.tasks import Data


@dataclass(frozen=True, slots=True)
class Example:
    """A held-out source, what the model says, what it should say."""

    source: str
    output: str
    expected: str
    exact: bool


def answered(trained: Trained, data: Data, most: int) -> list[Example]:
    """Greedy answers to the first held-out sources; none for a language model."""
    pairs = data.examples()[:most]
    if not pairs:
        return []
    stop = Stop(max_tokens=data.max_target)  # the longest answer and its end
    results = trained.generate([source for source, _ in pairs], Sampling(), stop).results
    out = []
    for (source, expected), result in zip(pairs, results, strict=True):
        text = result.text or ""
        out.append(Example(source, text, expected, result.finish == "stop" and text == expected))
    return out


def share_exact(examples: Sequence[Example]) -> float:
    """The share that is right, end included."""
    return sum(e.exact for e in examples) / max(1, len(examples))
