"""docs/generation.md names every option and setting there is."""

from __future__ import annotations

import inspect
import re
from argparse import ArgumentParser, _SubParsersAction
from pathlib import Path

import pytest

from brickformer.cli import parser
from brickformer.generate import (
    Beam,
    PromptLookup,
    Sampling,
    Stats,
    Stop,
    Writer,
    beam_search,
    generate,
    read_prompt,
    speculate,
    stream,
)
from brickformer.spec import fields_of

PAGE = (Path(__file__).resolve().parents[2] / "docs/generation.md").read_text("utf-8")
WORDS = set(re.findall(r"--[a-z][a-z-]*|\w+", PAGE))
POSITIONAL = ("model", "prompt", "prompts", "draft", "sampling", "stop", "beam")
FROM_RUN = ("source_tokenizer", "start")  # what a run brings along


def verb(name: str) -> ArgumentParser:
    actions = [a for a in parser()._actions if isinstance(a, _SubParsersAction)]
    found: ArgumentParser = actions[0].choices[name]
    return found


@pytest.mark.parametrize("name", ["generate", "score"])
def test_every_option_of_the_command_line(name: str) -> None:
    options = {o for action in verb(name)._actions for o in action.option_strings if o.startswith("--")}
    assert options - {"--help"} <= WORDS


@pytest.mark.parametrize("kind", [Sampling, Stop, Beam, PromptLookup])
def test_every_setting(kind: type) -> None:
    assert set(fields_of(kind)) <= WORDS


@pytest.mark.parametrize("function", [generate, beam_search, speculate, stream, read_prompt, Writer])
def test_every_argument(function: object) -> None:
    names = set(inspect.signature(function).parameters)  # type: ignore[arg-type]
    assert names - {*POSITIONAL, *FROM_RUN, "constraints"} <= WORDS


def test_every_number_of_the_statistics() -> None:
    assert {name for name in Stats.__dataclass_fields__ if name != "cache_bytes"} <= WORDS


def test_no_option_that_is_not_there() -> None:
    known = {o for name in ("generate", "score", "export") for a in verb(name)._actions for o in a.option_strings}
    assert {word for word in WORDS if word.startswith("--")} <= known
