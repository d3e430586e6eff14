"""What a user may ask of generation: how a token is chosen (`Sampling`), and when an answer ends (`Stop`).

Both are specs: frozen, strictly checked, JSON in and out. The formulas behind the fields are in `sampling.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from brickformer.errors import SpecError
from brickformer.spec import Spec, spec


@spec("sampling")
class Sampling(Spec):
    """How the next token is chosen. The default is greedy: the most probable token.

    temperature: 0 is greedy; below 1 sharper, above 1 flatter. top_k: the k most probable tokens. top_p: the fewest
    most probable tokens that hold this much probability (arXiv 1904.09751). min_p: tokens of at least this fraction of
    the most probable one (arXiv 2407.01082). typical: tokens of about the expected surprise, holding this much
    probability (arXiv 2202.00666). repetition: divides (or multiplies, below 0) the logits of tokens seen, prompt
    included (arXiv 1909.05858). presence, frequency: subtracted from the logit of a token of the answer, once, and for
    every time it occurs. no_repeat_ngram: no run of so many tokens occurs twice, prompt included. banned: tokens never
    chosen. banned_runs: runs of tokens of which the last is not chosen after the others, prompt included. forced: the
    first tokens of the answer. seed: of the random draws; a prompt's answer depends on its seed alone, not on what else
    is in the batch.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical: float | None = None
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    no_repeat_ngram: int | None = None
    banned: tuple[int, ...] = ()
    banned_runs: tuple[tuple[int, ...], ...] = ()
    forced: tuple[int, ...] = ()
    seed: int = 0

    def check(self) -> None:
        """Every value in its range; nothing that only a random draw would read when nothing is drawn."""
        if self.temperature < 0.0:
            raise self.refuse("temperature", "0 (greedy) or above")
        if self.top_k is not None and self.top_k < 1:
            raise self.refuse("top_k", "at least 1", "Leave it out to keep all tokens.")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise self.refuse("top_p", "a probability above 0, up to 1", "Leave it out to keep all tokens.")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise self.refuse("min_p", "a fraction from 0 to 1", "Leave it out to keep all tokens.")
        if self.typical is not None and not 0.0 < self.typical < 1.0:
            raise self.refuse("typical", "a probability between 0 and 1", "Leave it out to keep all tokens.")
        if self.repetition <= 0.0:
            raise self.refuse("repetition", "a factor above 0; above 1 makes repetition less likely")
        if self.no_repeat_ngram is not None and self.no_repeat_ngram < 1:
            raise self.refuse("no_repeat_ngram", "a length of at least 1", "Leave it out to allow repetition.")
        for name, ids in self._ids():
            if any(i < 0 for i in ids):
                raise self.refuse(name, "token ids from 0 on")
        if any(len(run) < 2 for run in self.banned_runs):
            raise self.refuse("banned_runs", "runs of at least 2 tokens", "Put single ones into banned.")
        both = sorted(set(self.banned) & set(self.forced))
        if both:
            raise SpecError(f"sampling: token {both[0]} is both banned and forced, so no token is allowed. Choose one.")
        if not -(2**63) <= self.seed < 2**63:
            raise self.refuse("seed", "an integer of 64 bits")
        drawn = (("top_k", self.top_k), ("top_p", self.top_p), ("min_p", self.min_p), ("typical", self.typical))
        for name, value in drawn:
            if self.greedy and value:
                raise self.refuse(name, "nothing while temperature is 0 (greedy)", "Give a temperature above 0.")

    @property
    def greedy(self) -> bool:
        """Nothing is drawn."""
        return self.temperature == 0.0

    def _ids(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The fields that hold tokens."""
        yield "banned", self.banned
        yield from (("banned_runs", run) for run in self.banned_runs)
        yield "forced", self.forced

    def check_vocab(self, vocab: int) -> None:
        """Errors: SpecError when a token is not among the model's, or when every token is banned."""
        for name, ids in self._ids():
            outside = [i for i in ids if i >= vocab]
            if outside:
                raise SpecError(f"sampling.{name}: got token {outside[0]}, expected ids from 0 to {vocab - 1}.")
        if len(set(self.banned)) == vocab:
            raise SpecError(f"sampling.banned: all {vocab} tokens are, so no token is allowed. Allow at least one.")


@spec("stop")
class Stop(Spec):
    """When an answer ends.

    max_tokens: most tokens of an answer. min_tokens: stop ids are banned before so many. ids: tokens that end an
    answer; the one that did is kept in the tokens, not in the text. texts: strings that end it; the text is cut before
    them.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()

    def check(self) -> None:
        """At least one token; room for the least; no empty string, which every text ends with."""
        if self.max_tokens < 1:
            raise self.refuse("max_tokens", "at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise self.refuse("min_tokens", f"from 0 to max_tokens ({self.max_tokens})")
        if any(i < 0 for i in self.ids):
            raise self.refuse("ids", "token ids from 0 on")
        if "" in self.texts:
            raise self.refuse("texts", "strings of at least one character")

    def check_vocab(self, vocab: int) -> None:
        """Errors: SpecError when a stop id is not among the model's tokens."""
        outside = [i for i in self.ids if i >= vocab]
        if outside:
            raise SpecError(f"stop.ids: got token {outside[0]}, expected ids from 0 to {vocab - 1}.")


GREEDY = Sampling()
UNTIL = Stop()
