"""What generation hands back: one `Result` an answer, the `Stats` of the whole, and the `Tokenizer` it asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol

from brickformer.errors import BrickError

Finish = Literal["stop", "length", "error"]


class Tokenizer(Protocol):
    """What generation needs of a tokenizer: text to ids and back."""

    @property
    def vocab(self) -> int:
        """V, the number of ids."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special ids skipped."""


@dataclass(slots=True)
class Result:
    """One answer.

    prompt: index of its prompt. sample: which answer to it, the best first where they are ranked. tokens: ids written,
    a stop id included. logprobs: ln p of each under the model itself, before temperature and filters. text: decoded
    where there is a tokenizer, without stop ids and stop strings. finish: "stop", "length" (max_tokens, or the model's
    limit), or "error", and then `error` says what is wrong; tokens written before that are kept. score: what beams are
    ranked by.
    """

    prompt: int
    sample: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str | None = None
    finish: Finish = "length"
    error: BrickError | None = None
    score: float | None = None

    @property
    def logprob(self) -> float:
        """ln p of the whole answer."""
        return sum(self.logprobs)


@dataclass(slots=True)
class Stats:
    """Counts and times. Rates are over all rows of the batch together; the prompt's time includes the first token.

    steps: tokens after the first, all rows of a batch at once counted as one. calls: of the model after the prompt,
    fewer than steps where guesses of a draft are accepted; proposed, accepted: such guesses. cache_bytes: the most that
    states held, a draft's included. compile_s: seconds of compilation, not in the others.
    """

    prompt_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    calls: int = 0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    cache_bytes: int = 0
    proposed: int = 0
    accepted: int = 0
    compile_s: float = 0.0

    def add(self, other: Stats) -> None:
        """Count in another call; of cache_bytes the larger one."""
        most = max(self.cache_bytes, other.cache_bytes)
        for name in (f.name for f in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.cache_bytes = most

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prompt_s if self.prompt_s > 0.0 else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens a second after each row's first."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0.0 else 0.0

    @property
    def ms_token(self) -> float:
        """Milliseconds between two tokens of a row."""
        return 1e3 * self.decode_s / self.steps if self.steps else 0.0

    def __str__(self) -> str:
        """One line for people."""
        parts = [
            f"prompt {self.prompt_tokens} tokens, {self.prompt_rate:.0f} tokens/s",
            f"decode {self.decode_tokens} tokens, {self.decode_rate:.1f} tokens/s, {self.ms_token:.2f} ms a token",
            f"cache {readable_bytes(self.cache_bytes)}",
        ]
        if self.proposed:
            parts.append(f"draft {self.accepted} of {self.proposed} accepted")
        if self.compile_s:
            parts.append(f"compiled in {self.compile_s:.1f} s")
        return "; ".join(parts)


@dataclass(slots=True)
class Generation:
    """All answers, in the order of the prompts (then samples), and the counts and times."""

    results: list[Result]
    stats: Stats


def readable_bytes(n: int) -> str:
    """1536 -> '1.5 KiB'."""
    size, unit = float(n), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024.0 or unit == "GiB":
            break
        size /= 1024.0
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
