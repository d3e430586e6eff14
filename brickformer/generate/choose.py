"""Choose: logits to tokens, for a batch of rows, with what the rows remember (counts, history, random numbers).

    logits (B, V) -> penalties and constraints -> greedy: argmax | temperature, filters, draw -> tokens (B,)

A row's log-probability is taken from the logits as the model gave them. It is also the alarm: it is finite exactly when
the row's logits hold no NaN, no +inf, and something above -inf.
Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Final, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from brickformer.generate import sampling as f
from brickformer.generate.settings import Sampling, Stop

TINY: Final = 1e-6
"""A temperature below which logits are shifted before they are divided."""


@final
class Constraints:
    """Penalties, bans and forced tokens: all that looks at what a row has written; for every way to decode.

    given: the tokens before each row's answer. Counts live on the device; they follow the rows through `select`.
    """

    def __init__(
        self, sampling: Sampling, stop: Stop, vocab: int, given: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self.sampling, self.stop, self.vocab, self.device = sampling, stop, vocab, device
        s = sampling
        self.needs_seen = s.repetition != 1.0
        self.needs_counts = s.presence != 0.0 or s.frequency != 0.0
        self.needs_history = s.no_repeat_ngram is not None or bool(s.banned_runs)
        self.idle = not (
            self.needs_seen
            or self.needs_counts
            or self.needs_history
            or s.banned
            or s.forced
            or (stop.min_tokens and stop.ids)
        )
        self.made = [0] * len(given)
        self.history = [list(g) for g in given] if self.needs_history else []
        self.seen = torch.zeros(len(given), vocab, dtype=torch.bool, device=device) if self.needs_seen else None
        self.counts = torch.zeros(len(given), vocab, device=device) if self.needs_counts else None
        if self.seen is not None:
            for i, tokens in enumerate(given):
                self.seen[i, list(tokens)] = True
        self.banned = list(dict.fromkeys(s.banned))

    def __call__(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """The logits after penalties, bans and forced tokens."""
        if self.idle:
            return logits
        s, B = self.sampling, len(logits)
        if self.seen is not None:
            logits = f.repetition(logits, self.seen, s.repetition)
        if self.counts is not None:
            logits = f.presence_frequency(logits, self.counts, s.presence, s.frequency)
        pairs = [(i, t) for i in range(B) for t in self._banned(i)]
        if pairs:
            logits = f.ban(logits, [i for i, _ in pairs], [t for _, t in pairs])
        forced = [(i, s.forced[n]) for i, n in enumerate(self.made) if n < len(s.forced)]
        if forced:
            logits = f.force(logits, [i for i, _ in forced], [t for _, t in forced])
        return logits

    def _banned(self, row: int) -> list[int]:
        out = self.banned
        if self.made[row] < self.stop.min_tokens:
            out = [*out, *self.stop.ids]
        if self.sampling.no_repeat_ngram is not None:
            out = [*out, *f.ngram_bans(self.history[row], self.sampling.no_repeat_ngram)]
        if self.sampling.banned_runs:
            out = [*out, *f.run_bans(self.history[row], self.sampling.banned_runs)]
        return out

    def add(self, tokens: Int[Tensor, " B"], listed: Sequence[int]) -> None:
        """Every row has written one token: `tokens` on the device, `listed` the same on the host."""
        if self.idle:
            return
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        if self.counts is not None:
            self.counts.scatter_add_(1, tokens[:, None], torch.ones_like(tokens[:, None], dtype=self.counts.dtype))
        self.made = [n + 1 for n in self.made]
        for history, token in zip(self.history, listed, strict=False):
            history.append(token)

    def copy(self) -> Constraints:
        """An independent copy."""
        other = copy(self)
        other.select(range(len(self.made)))
        return other

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        if self.idle:
            return
        index = torch.tensor(rows, device=self.device)
        self.made = [self.made[i] for i in rows]
        self.history = [list(self.history[i]) for i in rows] if self.needs_history else []
        self.seen = None if self.seen is None else self.seen[index]
        self.counts = None if self.counts is None else self.counts[index]


def shape(logits: Float[Tensor, "B V"], sampling: Sampling) -> Float[Tensor, "B V"]:
    """Temperature and the filters that follow it; for a temperature above 0.

    Before a tiny temperature the largest logit is taken off: divided by it, it would overflow, and all would be NaN.
    """
    limits = torch.finfo(logits.dtype)
    temperature = min(max(sampling.temperature, limits.tiny), limits.max)
    if temperature < TINY:
        top = logits.amax(-1, keepdim=True)
        logits = logits - top.masked_fill(top == -torch.inf, 0.0)
    logits = logits / temperature
    if sampling.top_k is not None:
        logits = f.top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = f.top_p(logits, sampling.top_p)
    if sampling.min_p is not None:
        logits = f.min_p(logits, sampling.min_p)
    if sampling.typical is not None:
        logits = f.typical(logits, sampling.typical)
    return logits


@final
class Chooser:
    """The tokens of a batch, one step after another."""

    def __init__(self, constraints: Constraints, uniforms: list[f.Uniform]) -> None:
        self.constraints, self.sampling, self.uniforms = constraints, constraints.sampling, uniforms

    def __call__(self, logits: Float[Tensor, "B V"]) -> tuple[Int[Tensor, " B"], list[int], list[float]]:
        """Tokens on the device, tokens, and ln p of each. ln p is not finite where the logits are not; a token is -1
        where none is allowed."""
        logits = widen(logits)
        allowed = self.constraints(logits)
        if self.sampling.greedy:
            tokens = best(allowed)
        else:
            numbers = torch.tensor([u.next() for u in self.uniforms], dtype=torch.float64)
            tokens = f.draw(shape(allowed, self.sampling), numbers.to(logits.device))
        index = tokens[:, None]
        logprobs = logits.log_softmax(-1).gather(1, index)[:, 0].tolist()
        listed = tokens.tolist()
        if not self.constraints.idle:
            open_ = (allowed.gather(1, index)[:, 0] > -torch.inf).tolist()
            self.constraints.add(tokens, listed)
            listed = [token if ok else -1 for token, ok in zip(listed, open_, strict=True)]
        return tokens, listed, logprobs

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.constraints.select(rows)
        self.uniforms = [self.uniforms[i] for i in rows]


@final
class Choice:
    """What a model would choose for one row, and the two draws of speculative decoding."""

    def __init__(self, constraints: Constraints, uniform: f.Uniform) -> None:
        self.constraints, self.sampling, self.uniform = constraints, constraints.sampling, uniform

    def next(self, logits: Float[Tensor, "1 V"]) -> Float[Tensor, "1 V"]:
        """Logits after constraints, and after temperature and filters where something is drawn."""
        logits = self.constraints(widen(logits))
        return logits if self.sampling.greedy else shape(logits, self.sampling)

    def token(self, p: Float[Tensor, "1 V"]) -> int:
        """Choose from p; -1 where nothing is allowed."""
        if self.sampling.greedy:
            token = int(best(p))
            return token if p[0, token] > -torch.inf or self.constraints.idle else -1
        if not self.constraints.idle and not (p > -torch.inf).any():
            return -1
        return int(f.draw(p, torch.tensor([self.uniform.next()], dtype=torch.float64).to(p.device)))

    def accepts(self, p: Float[Tensor, "1 V"], q: Float[Tensor, "1 V"] | None, token: int) -> bool:
        """Whether a guess drawn from q (None: it was certain) stands."""
        if self.sampling.greedy:
            return self.token(p) == token
        wanted = p.softmax(-1)[0, token].item()
        drawn = 1.0 if q is None else q.softmax(-1)[0, token].item()
        return self.uniform.next() * drawn < wanted

    def instead(self, p: Float[Tensor, "1 V"], q: Float[Tensor, "1 V"] | None, token: int) -> int:
        """The token in place of a refused guess."""
        if self.sampling.greedy:
            return self.token(p)
        if q is None:
            rest = p.softmax(-1, dtype=torch.float64)
            rest[0, token] = 0.0
        else:
            rest = (p.softmax(-1, dtype=torch.float64) - q.softmax(-1, dtype=torch.float64)).clamp_min(0.0)
        # all of it lost to rounding: then p and q are the same
        return self.token(rest.log() if rest.sum() > 0 else p)


def best(logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
    """The most probable token of each row. numpy compares several numbers at a time, torch on a CPU one."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return torch.from_numpy(logits.detach().numpy().argmax(-1))


def widen(logits: Tensor) -> Tensor:
    """Logits in at least float32: half precision has too few digits for a sum over the vocabulary."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
