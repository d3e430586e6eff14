"""A trained run, ready to use: `Trained.open("runs/reverse-001").answer(["7 1 4"])` gives ["4 1 7"]."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from brickformer.errors import BrickError, DataError, RunError, SpecError
from brickformer.files import read_text
from brickformer.generate import (
    GREEDY,
    Beam,
    Generation,
    Sampling,
    Score,
    Stop,
    Stream,
    Writer,
    beam_search,
    generate,
    score,
    stream,
)
from brickformer.models import AnyModel, ModelSpec
from brickformer.recipes.bricks import import_bricks
from brickformer.recipes.run import Run
from brickformer.recipes.weighted import plain_spec, weighted
from brickformer.spec import read
from brickformer.state import CacheType
from brickformer.tasks import Imported, Tokenizer, load_tokenizers
from brickformer.train import RunFolder


@final
@dataclass(frozen=True, eq=False)
class Trained:
    """A model with its tokenizers. source: None for a language model, whose prompts are read by `target`. step: of what
    was trained."""

    run: Run
    model: AnyModel
    source: Tokenizer | None
    target: Tokenizer
    step: int = 0

    @classmethod
    def open(cls, path: Path | str, *, device: torch.device | None = None) -> Trained:
        """The run in a folder, on `device` (a GPU where there is one). Errors: RunError: broken, cut off, no run."""
        folder = RunFolder.open(Path(os.path.expanduser(path)))
        run = run_of(folder)
        model, step = weighted(folder, run)
        file = folder.path / "tokenizer.json"
        source, target = load_tokenizers(read_text(file), str(file))
        return cls(run, model.to(device or best_device()).eval(), source, target, step)

    @property
    def writes_text(self) -> bool:
        """Whether it goes on with its prompts (a language model); else it answers them."""
        return self.source is None

    @property
    def start(self) -> tuple[int, ...]:
        """What a target begins with, where there is one: the token it was imported with, else the one of its texts."""
        told = self.run.task.start if isinstance(self.run.task, Imported) else None
        first = self.target.bos if told is None else told
        return () if self.writes_text or first is None else (first,)

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen by default: answers are greedy, running text is drawn a little sharpened."""
        return Sampling(temperature=0.8) if self.writes_text else Sampling()

    def generate(
        self,
        texts: Sequence[str],
        sampling: Sampling | None = None,
        stop: Stop | None = None,
        *,
        batch: int = 256,
        use_cache: bool = True,
    ) -> Generation:
        """Answers (or continuations) with all that is known of them. A text that cannot be read has a result with the
        error. Errors: BrickError for settings that fit no text."""
        ending, sampling = self.ending(stop or Stop()), self.allowed(sampling or self.sampling)
        return generate(self.writer, texts, sampling, ending, batch=batch, use_cache=use_cache)

    def search(
        self, texts: Sequence[str], beam: Beam, stop: Stop | None = None, *, use_cache: bool = True
    ) -> Generation:
        """The same by beam search: the best answers to each text, best first."""
        return beam_search(
            self.writer, texts, beam, self.ending(stop or Stop()), self.allowed(GREEDY), batch=256, use_cache=use_cache
        )

    def stream(self, text: str, sampling: Sampling | None = None, stop: Stop | None = None) -> Stream:
        """One answer, piece by piece, as it is written."""
        return stream(self.writer, text, self.allowed(sampling or self.sampling), self.ending(stop or Stop()))

    def score(self, texts: Sequence[str]) -> list[Score]:
        """How probable texts are: of a language model each from its second token on, else "source TAB target" each, the
        end included. One that cannot be scored has a Score with the error."""
        if self.writes_text:
            return score(self.writer, texts)
        pairs = [text.split("\t") for text in texts]
        scores = [Score() for _ in texts]
        ready: list[tuple[Score, str, list[int]]] = []
        for made, pair in zip(scores, pairs, strict=True):
            try:
                if len(pair) != 2:
                    raise DataError(f"{len(pair)} columns; expected SOURCE TAB TARGET.")
                eos = [] if self.target.eos is None else [self.target.eos]
                ids = self.target.encode(pair[1])
                ready.append((made, pair[0], ids if eos == ids[-1:] else ids + eos))  # some tokenizers add the end
            except BrickError as e:
                made.error = e
        found = score(self.writer, [source for _, source, _ in ready], [target for _, _, target in ready])
        for (made, _, _), result in zip(ready, found, strict=True):
            made.tokens, made.logprobs, made.error = result.tokens, result.logprobs, result.error
        return scores

    @property
    def writer(self) -> Writer:
        """The model and its tokenizers, as generation takes them."""
        return self.write()

    def write(self, *, compiled: bool = False, cache: CacheType = "float", packed: bool = False) -> Writer:
        """The same with a compiled step, a smaller cache, or weights packed for one item at a time."""
        return Writer(
            self.model,
            tokenizer=self.target,
            source_tokenizer=self.source,
            start=self.start,
            compiled=compiled,
            cache=cache,
            packed=packed,
        )

    def ending(self, stop: Stop) -> Stop:
        """The same, and at the tokenizer's own ends."""
        ends = self.target.ends
        return stop.but(ids=(*stop.ids, *ends)) if ends else stop

    def allowed(self, sampling: Sampling) -> Sampling:
        """The same with what the configuration of an imported model asks for: tokens that it forbids, and the one that
        answers begin with where `sampling` says none."""
        task = self.run.task
        if not isinstance(task, Imported):
            return sampling
        banned, runs = (*sampling.banned, *task.never), (*sampling.banned_runs, *task.never_runs)
        forced = sampling.forced or (() if task.first is None else (task.first,))
        return sampling.but(banned=banned, banned_runs=runs, forced=forced)

    def answer(self, texts: Sequence[str]) -> list[str]:
        """Just the texts. Errors: BrickError of the first text that cannot be read."""
        results = self.generate(texts).results
        for result in results:
            if result.error is not None:
                raise result.error
        return [result.text or "" for result in results]


def run_of(folder: RunFolder) -> Run:
    """What a run folder was asked to do, its model as it was built. Errors: RunError, SpecError: a broken file."""
    import_bricks()
    where = str(folder.path / "run.json")
    data = folder.run()
    if not isinstance(data.get("run"), dict):
        raise RunError(f"{where}: broken: no 'run' in it. Restore it from a copy, or use another run.")
    try:
        model = read(ModelSpec, plain_spec(folder), str(folder.path / "spec.json"))
        run: Run = read(Run, {**data["run"], "model": model}, where)
    except SpecError as e:
        hint = " A brick of your own? Name its file: --use FILE.py" if ".kind: got" in str(e) else ""
        raise RunError(f"{e}{hint}") from None
    return run


def best_device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
