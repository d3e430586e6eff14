"""Sampling: what is done to the logits of the next token, as pure functions, and how a token is drawn from them.

Each filter takes logits (B, V) and returns new ones; a token that must not be chosen gets -inf. Applied in this order,
that of `transformers`, whose definitions these are:

    repetition      l > 0: l / r;  else l · r        for tokens seen so far, prompt included        arXiv 1909.05858
    presence        l - a · [the answer has it]      frequency   l - b · (times the answer has it)
    no_repeat       -inf where a run of n tokens would occur a second time
    ban, force      -inf for these tokens, and those that end a banned run;  -inf for all but one, which gets 0
    temperature     l / T
    top_k           the k largest logits; more where the smallest of them ties
    top_p           the fewest largest probabilities that sum to p or more                          arXiv 1904.09751
    min_p           probabilities of at least m · (the largest)                                     arXiv 2407.01082
    typical         the tokens whose surprise -ln p is nearest to the entropy, to a sum of p        arXiv 2202.00666

A token is drawn by inverting the cumulative probabilities at one uniform number, taken from the row's own generator: so
a row's tokens do not depend on what else is in the batch.
Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def repetition(logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"], factor: float) -> Float[Tensor, "B V"]:
    """Make tokens that were `seen` less likely (factor above 1)."""
    return torch.where(seen, torch.where(logits < 0, logits * factor, logits / factor), logits)


def presence_frequency(
    logits: Float[Tensor, "B V"], counts: Int[Tensor, "B V"], presence: float, frequency: float
) -> Float[Tensor, "B V"]:
    """Subtract `presence` from tokens the answer has, and `frequency` for every time it has them."""
    return logits - presence * (counts > 0) - frequency * counts


def ngram_bans(history: Sequence[int], n: int) -> list[int]:
    """The tokens that would make the last n tokens a run that `history` already has."""
    if len(history) < n:
        return []
    tail = list(history[len(history) - n + 1 :])
    return [history[i + n - 1] for i in range(len(history) - n + 1) if list(history[i : i + n - 1]) == tail]


def run_bans(history: Sequence[int], runs: Sequence[Sequence[int]]) -> list[int]:
    """The last tokens of runs whose other tokens `history` ends with."""
    return [run[-1] for run in runs if list(history[-len(run) + 1 :]) == list(run[:-1])]


def ban(logits: Float[Tensor, "B V"], rows: Sequence[int], tokens: Sequence[int]) -> Float[Tensor, "B V"]:
    """-inf at (rows[i], tokens[i])."""
    out = logits.clone()
    if rows:
        out[list(rows), list(tokens)] = -torch.inf
    return out


def force(logits: Float[Tensor, "B V"], rows: Sequence[int], tokens: Sequence[int]) -> Float[Tensor, "B V"]:
    """Row rows[i] may only choose tokens[i]."""
    out = logits.clone()
    if rows:
        out[list(rows)] = -torch.inf
        out[list(rows), list(tokens)] = 0.0
    return out


def top_k(logits: Float[Tensor, "B V"], k: int) -> Float[Tensor, "B V"]:
    """Keep the k largest logits."""
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def top_p(logits: Float[Tensor, "B V"], p: float) -> Float[Tensor, "B V"]:
    """Keep the fewest largest probabilities that sum to p or more: those before which less than p is summed up."""
    if p >= 1.0:
        return logits
    ordered, index = logits.sort(dim=-1, descending=True)
    probs = ordered.softmax(-1)
    drop = probs.cumsum(-1) - probs >= p
    drop[:, 0] = False
    return logits.masked_fill(torch.empty_like(drop).scatter_(1, index, drop), -torch.inf)


def min_p(logits: Float[Tensor, "B V"], fraction: float) -> Float[Tensor, "B V"]:
    """Keep probabilities of at least `fraction` of the largest."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < fraction * probs.amax(-1, keepdim=True), -torch.inf)


def typical(logits: Float[Tensor, "B V"], p: float) -> Float[Tensor, "B V"]:
    """Keep the tokens whose surprise is nearest to the expected one, until their probabilities sum to p."""
    log = logits.log_softmax(-1)
    probs = log.exp()
    entropy = -torch.where(probs > 0, log * probs, 0.0).sum(-1, keepdim=True)
    distance = (-log - entropy).abs()
    ordered, index = distance.sort(dim=-1)
    last = (probs.gather(1, index).cumsum(-1) < p).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return logits.masked_fill(distance > ordered.gather(1, last), -torch.inf)


def draw(logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """The token whose share of the cumulative probabilities holds the row's uniform number from [0, 1)."""
    total = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    at = uniform.to(total)[:, None] * total[:, -1:]
    return torch.searchsorted(total, at, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


@final
class Uniform:
    """Uniform numbers from [0, 1) of one row. The same (seed, sample) gives the same numbers on every device."""

    def __init__(self, seed: int, sample: int = 0) -> None:
        self._random = Random(f"{seed}/{sample}")  # all digits count: torch's generator takes 32 bits of a seed

    def next(self) -> float:
        """The next number."""
        return self._random.random()
