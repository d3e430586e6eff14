"""How `brick generate` finds its answers: every --set and every option that bears on it, checked against each other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from brickformer.cli.settings import Setting
    from brickformer.generate import Beam, Generation, Prefix, PromptLookup, Sampling, Stop, Stream, Writer
    from brickformer.models import AnyModel
    from brickformer.recipes import Trained
    from brickformer.recipes.onnx import Onnx

BATCH: Final = 256  # rows at once
AHEAD: Final = 4  # guesses a round
DRAWN: Final = ("temperature", "top_k", "top_p", "min_p", "typical", "seed")  # mean nothing where nothing is drawn


@dataclass(frozen=True)
class Way:
    """What every item is answered with. prefix: what is before it. draft: guesses tokens, `ahead` of them a round."""

    writer: Writer
    sampling: Sampling
    stop: Stop
    beam: Beam | None
    draft: AnyModel | PromptLookup | None
    ahead: int
    prefix: Prefix | None
    samples: int
    use_cache: bool
    engine: Onnx | None = None

    @property
    def streams(self) -> bool:
        """One answer, token by token, from a cache: it can be shown while it is written."""
        plain = self.beam is None and self.draft is None and self.engine is None
        return plain and self.samples == 1 and self.use_cache

    def answers(self, texts: Sequence[str]) -> Generation:
        """The answers to some items. Errors: BrickError for settings that fit none of them."""
        from brickformer.generate import beam_search, generate, speculate

        if self.engine is not None:
            return self.engine.generate(self.writer, texts, self.sampling, self.stop, samples=self.samples)
        if self.beam is not None:
            return beam_search(
                self.writer, texts, self.beam, self.stop, self.sampling, batch=BATCH, use_cache=self.use_cache
            )
        if self.draft is not None:
            return speculate(self.writer, texts, self.draft, self.sampling, self.stop, ahead=self.ahead)
        return generate(
            self.writer,
            texts,
            self.sampling,
            self.stop,
            samples=self.samples,
            batch=BATCH,
            prefix=self.prefix,
            use_cache=self.use_cache,
        )

    def stream(self, text: str) -> Stream:
        """One answer, piece by piece."""
        from brickformer.generate import stream

        return stream(self.writer, text, self.sampling, self.stop, prefix=self.prefix)


def chosen(trained: Trained, args: argparse.Namespace) -> Way:
    """The way that was asked for. Errors: BrickError: an unknown setting, options that exclude each other."""
    from brickformer.errors import SpecError
    from brickformer.generate import Beam, Prefix, PromptLookup, Sampling, Stop

    drawing, ending, searching, looking, ahead = sorted_out(args.settings)
    exclude(args, searching=bool(searching))
    drawn = [name for name, _ in drawing if name in DRAWN]
    if searching and drawn:
        raise SpecError(f"--set {drawn[0]}: a beam search ({searching[0][0]}) draws nothing. Leave one of them out.")
    if looking and args.draft != "lookup":
        raise SpecError(f"--set {looking[0][0]}: belongs to the look-up of guesses. Add --draft lookup.")
    if ahead is not None and args.draft is None:
        raise SpecError("--set ahead: belongs to a draft. Add --draft lookup, or --draft RUN.")
    from brickformer.cli.settings import changed

    prefix = None if args.prompt is None else Prefix.load(Path(args.prompt).expanduser(), trained.write())
    cache = args.cache if prefix is None else prefix.cache
    writer = trained.write(compiled=args.compile, cache=cache, packed=not args.compile)
    start = Sampling() if searching else trained.sampling
    return Way(
        writer,
        trained.allowed(changed(start, drawing)),
        trained.ending(changed(Stop(), ending)),
        changed(Beam(), searching) if searching else None,
        drafted(trained, args.draft, changed(PromptLookup(), looking)),
        AHEAD if ahead is None else ahead,
        prefix,
        args.samples,
        not args.no_cache,
        onnx(args.run, trained) if args.engine == "onnx" else None,
    )


def onnx(run: str, trained: Trained) -> Onnx:
    """The run as it was exported."""
    from brickformer.recipes.onnx import Onnx

    return Onnx.open(Path(run).expanduser(), trained.model)


def sorted_out(
    settings: Sequence[str],
) -> tuple[list[Setting], list[Setting], list[Setting], list[Setting], int | None]:
    """Every --set with those that have the field: sampling, stop, beam, look-up; and `ahead`."""
    from brickformer.cli.settings import parsed
    from brickformer.errors import SpecError, nearest
    from brickformer.generate import Beam, PromptLookup, Sampling, Stop
    from brickformer.spec import fields_of

    pairs = parsed(settings)
    kinds = [fields_of(kind) for kind in (Sampling, Stop, Beam, PromptLookup)]
    known = [*(name for fields in kinds for name in fields), "ahead"]
    ahead = None
    for name, value in pairs:
        if name not in known:
            raise SpecError(f"--set {name}: no such setting; {nearest(name, known)}")
        if name == "ahead":
            if type(value) is not int or value < 1:
                raise SpecError(f"--set ahead: got {value!r}, expected a number of guesses, at least 1.")
            ahead = value
    drawing, ending, searching, looking = ([pair for pair in pairs if pair[0] in fields] for fields in kinds)
    return drawing, ending, searching, looking, ahead


def exclude(args: argparse.Namespace, *, searching: bool) -> None:
    """Errors: SpecError for options that cannot work together: none of them is dropped in silence."""
    from brickformer.errors import SpecError

    asked = {
        "a beam search": searching,
        "--draft": args.draft is not None,
        "--samples": args.samples != 1,
        "--stream": args.stream,
        "--no-cache": args.no_cache,
        "--compile": args.compile,
        "--cache": args.cache != "float",
        "--prompt": args.prompt is not None,
        "--save-prompt": args.save_prompt is not None,
        "--logprobs": args.logprobs,
        "--engine onnx": args.engine == "onnx",
    }
    apart = {
        "a beam search": ["--draft", "--samples", "--stream", "--prompt"],
        "--draft": ["--samples", "--stream", "--no-cache", "--compile", "--prompt"],
        "--stream": ["--samples", "--no-cache", "--logprobs"],
        "--no-cache": ["--compile", "--cache", "--prompt"],
        "--cache": ["--prompt"],
        "--engine onnx": [
            *("a beam search", "--draft", "--stream", "--no-cache", "--compile", "--cache", "--prompt"),
            "--save-prompt",
        ],
        "--save-prompt": ["a beam search", "--draft", "--samples", "--stream", "--no-cache", "--prompt", "--logprobs"],
    }
    for one, others in apart.items():
        for other in others:
            if asked[one] and asked[other]:
                raise SpecError(f"{one} and {other} exclude each other. Leave one of them out.")
    if args.samples < 1:
        raise SpecError(f"--samples: got {args.samples}, expected at least 1.")


def drafted(trained: Trained, name: str | None, lookup: PromptLookup) -> AnyModel | PromptLookup | None:
    """What guesses: nothing, the text itself, or the model of another run with the same tokens."""
    from brickformer.errors import RunError
    from brickformer.recipes import Trained

    if name is None:
        return None
    if name == "lookup":
        return lookup
    other = Trained.open(name)
    if other.target.to_json() != trained.target.to_json():
        raise RunError(f"--draft {name}: its tokens are not those of the run. Train both on the same data.")
    return other.model
