"""`brick generate`: every way to find an answer, what is shown of it, and which of them exclude each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import Brick
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from brickformer.cli import main
from brickformer.generate import Writer
from brickformer.recipes import Trained

LONG = ["--set", "max_tokens=12"]


@pytest.fixture(scope="session")
def writing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a language model of three steps: what it writes is noise, and always the same."""
    out = tmp_path_factory.mktemp("writing")
    (out / "book.txt").write_text("a cat sat on a mat and the dog ran home.\n" * 80)
    mixer = {"kind": "attention", "heads": 2, "position": "rope"}
    layer = json.dumps({"kind": "layer", "mixer": mixer, "ffn": {"kind": "glu", "hidden": 8}})
    small = ["--steps", "3", "--set", "train.batch=2", "--set", "model.dim=16", "--set", f"model.layers=[{layer}]"]
    assert main(["train", "text", "--data", str(out / "book.txt"), "--out", str(out), *small]) == 0
    return out / "text-001"


def test_a_stream_is_the_same_text(brick: Brick, trained: Path, writing: Path) -> None:
    for run, items in ((trained, ["7 1 4", "1 2 3"]), (writing, ["a cat", "dog"])):
        whole = brick("generate", run, *items, *LONG, "--set", "seed=4")
        pieces = brick("generate", run, *items, *LONG, "--set", "seed=4", "--stream", "--stats")
        assert pieces.out == whole.out and "ms a token" in pieces.err and pieces.err.count("\n") == 1
    assert "word 2: got 'x'" in brick("generate", trained, "7 x", "--stream").error


def test_a_cache_of_int8(brick: Brick, trained: Path) -> None:
    said = brick("generate", trained, "7 1 4", "0 1 2 3 4", "--cache", "int8", "--stats")
    assert said.out == "4 1 7\n4 3 2 1 0\n"
    plain = brick("generate", trained, "7 1 4", "0 1 2 3 4", "--stats")
    assert said.err != plain.err and "cache" in said.err
    beams = brick("generate", trained, "7 1 4", "--cache", "int8", "--set", "width=3")
    assert beams.out == "4 1 7\n"


def test_samples_are_drawn_apart_and_the_first_is_the_one_alone(brick: Brick, writing: Path) -> None:
    three = brick("generate", writing, "a cat", *LONG, "--samples", "3").out.removesuffix("\n").split("\na cat")
    assert len(three) == len(set(three)) == 3
    assert brick("generate", writing, "a cat", *LONG).out == three[0] + "\n"


def test_guesses_change_nothing_of_a_greedy_answer(brick: Brick, trained: Path, writing: Path, tiny: Path) -> None:
    greedy = ["a cat sat on a cat", *LONG, "--set", "temperature=0"]
    plain = brick("generate", writing, *greedy).out
    for draft in (["lookup"], ["lookup", "--set", "ngram=1", "--set", "ahead=2"], [writing]):
        said = brick("generate", writing, *greedy, "--stats", "--draft", *draft)
        assert said.out == plain and "accepted" in said.err
    said = brick("generate", trained, "7 1 4", "--draft", tiny, "--stats")
    assert said.out == "4 1 7\n" and "accepted" in said.err
    assert "its tokens are not those of the run" in brick("generate", trained, "7 1 4", "--draft", writing).error


def test_logprobs_are_those_of_score(brick: Brick, trained: Path, writing: Path) -> None:
    text, whole, each = brick("generate", trained, "7 1 4", "--logprobs").out.rstrip("\n").split("\t")
    assert text == "4 1 7"
    parts = [part.rsplit(" ", 1) for part in each.split(", ")]
    assert [name for name, _ in parts] == ['"4"', '"1"', '"7"', "2"], "the end has a number and no text"
    assert sum(float(p) for _, p in parts) == pytest.approx(float(whole), abs=5e-4)
    scored = brick("score", trained, "7 1 4\t4 1 7").out.rstrip("\n").split("\t")
    assert scored[:3] == ["7 1 4", "4 1 7", whole] and scored[4] == each
    run = Trained.open(writing)
    ids = torch.tensor([run.target.encode("a cat")], device=run.writer.device)
    with torch.no_grad():
        log = run.model(ids).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
    said = brick("score", writing, "a cat").out.split("\t")
    assert float(said[1]) == pytest.approx(log.sum().item(), abs=2e-4)
    assert float(said[2]) == pytest.approx((-log.mean()).exp().item(), abs=1e-3)


def test_what_cannot_be_scored_is_named_and_the_others_go_on(brick: Brick, trained: Path, writing: Path) -> None:
    Path("pairs.tsv").write_text("1 2\t2 1\n1 2\n1 x\t2 1\n1 2\t2 ?\n3 4\t4 3\n")
    said = brick("score", trained, "pairs.tsv")
    assert said.code == 2 and [line.split("\t")[0] for line in said.out.splitlines()] == ["1 2", "3 4"]
    errors = said.err.splitlines()
    assert len(errors) == 3 and all(e.startswith("brick: pairs.tsv, line ") for e in errors)
    assert "line 2, 1 columns; expected SOURCE TAB TARGET" in errors[0]
    assert "line 3, word 2: got 'x'" in errors[1] and "line 4, word 2: got '?'" in errors[2]
    assert "no token to score" in brick("score", writing, "a").error


def test_a_prompt_is_read_once_and_gone_on_from(brick: Brick, trained: Path, writing: Path) -> None:
    for cache in ("float", "int8"):
        said = brick("generate", writing, "a cat ", "--save-prompt", "kept", "--cache", cache)
        assert (said.code, said.out) == (0, "") and "kept 6 tokens" in said.err
        asked = ["--set", "temperature=0", *LONG]
        whole = brick("generate", writing, "a cat sat", "a cat ran", *asked, "--cache", cache).out
        rest = brick("generate", writing, "--prompt", "kept", "sat", "ran", *asked).out
        assert [f"a cat {line}" for line in rest.splitlines()] == whole.splitlines()
        alone = brick("generate", writing, "a cat ", *asked, "--cache", cache).out
        assert "a cat " + brick("generate", writing, "--prompt", "kept", *asked, "--stream").out == alone
    assert "read by another model" in brick("generate", trained, "--prompt", "kept").error
    assert "no such file" in brick("generate", trained, "--prompt", "nowhere").error
    assert "got 2 items" in brick("generate", writing, "a", "b", "--save-prompt", "kept").error
    assert "at least one token" in brick("generate", writing, "", "--save-prompt", "kept").error


def test_compiling_is_told_and_paid_once(brick: Brick, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile makes of a step is tested in generate/compiled.py; here, that the step is asked for."""
    made: list[Any] = []

    class Step:
        def __init__(self, decoder: Any, backend: str) -> None:
            self.decoder, self.seconds, self.calls = decoder, 0.0, 0
            made.append(self)

        def renew(self) -> None:
            """Nothing changes here."""

        def __call__(self, ids: Any, state: Any) -> Any:
            self.calls, self.seconds = self.calls + 1, 1.5
            return self.decoder.logits(self.decoder.hidden(ids, None, state))[:, -1]

    monkeypatch.setattr("brickformer.generate.writer.CompiledStep", Step)
    items = ["7 1 4"] * 300  # more than are answered together
    said = brick("generate", tiny, *items, *LONG, "--compile")
    assert said.out == brick("generate", tiny, *items, *LONG).out and said.err == "compiled in 1.5 s\n"
    assert len(made) == 1 and made[0].calls > 1
    assert "compiled in 1.5 s" in brick("generate", tiny, "7 1 4", *LONG, "--compile", "--stats").err


def test_options_may_stand_anywhere(brick: Brick, trained: Path) -> None:
    assert brick("generate", trained, "7 1 4", "--set", "max_tokens=9", "1 2 3").out == "4 1 7\n3 2 1\n"
    assert brick("generate", "--set", "max_tokens=9", trained, "--cache", "int8", "7 1 4").out == "4 1 7\n"
    for words in (["generate", str(trained), "7 1 4", "--set", "seed=1", "--nonsense"], ["show", "gpt2", "llama"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)


def test_beams_keep_to_bans(brick: Brick, trained: Path) -> None:
    said = brick("generate", trained, "7 1 4", "--set", "width=3", "--set", "best=3", "--set", "banned=[7]")
    one = Trained.open(trained).target.decode([7])
    assert len(said.out.splitlines()) == 3 and one not in said.out


EXCLUDED = [
    ("--set width=3 --stream", "a beam search and --stream"),
    ("--set width=3 --draft lookup", "a beam search and --draft"),
    ("--set width=3 --samples 2", "a beam search and --samples"),
    ("--draft lookup --compile", "--draft and --compile"),
    ("--draft lookup --no-cache", "--draft and --no-cache"),
    ("--draft lookup --samples 2", "--draft and --samples"),
    ("--stream --no-cache", "--stream and --no-cache"),
    ("--stream --samples 2", "--stream and --samples"),
    ("--stream --logprobs", "--stream and --logprobs"),
    ("--no-cache --cache int8", "--no-cache and --cache"),
    ("--no-cache --compile", "--no-cache and --compile"),
    ("--prompt x --cache int8", "--cache and --prompt"),
    ("--save-prompt x --stream", "--save-prompt and --stream"),
    ("--samples 0", "--samples: got 0, expected at least 1"),
    ("--set ngram=2", "Add --draft lookup"),
    ("--set ahead=2", "Add --draft lookup"),
    ("--draft lookup --set ahead=0", "--set ahead: got 0"),
    ("--draft lookup --set ahead=many", "--set ahead: got 'many'"),
    ("--draft lookup --set ngram=0", "ngram: got 0"),
    ("--draft nowhere", "nowhere"),
    ("--set temperature=-0.5", "temperature: got -0.5, expected 0 (greedy) or above"),
    ("--set temperature=1 --set top_p=0", "top_p"),
    ("--set temperature=1 --set top_p=1.5", "top_p: got 1.5, expected a probability above 0, up to 1"),
    ("--set banned=[4] --set forced=[4]", "token 4 is both banned and forced"),
    ("--set banned=[0,1,2,3,4,5,6,7,8,9,10,11,12]", "no token is allowed"),
    ("--set banned=[99]", "got token 99, expected ids from 0 to 12"),
    ("--set min_tokens=9 --set max_tokens=3", "from 0 to max_tokens (3)"),
    ("--set width=2 --set best=3", "from 1 to width (2)"),
]


@pytest.mark.parametrize(("options", "says"), EXCLUDED, ids=[options for options, _ in EXCLUDED])
def test_what_cannot_be_is_one_line_and_answers_nothing(brick: Brick, tiny: Path, options: str, says: str) -> None:
    said = brick("generate", tiny, "1 2 3", *options.split())
    assert says in said.error and said.out == ""


def test_an_item_past_the_limit_is_named_and_the_others_go_on(brick: Brick, trained: Path) -> None:
    said = brick("generate", trained, "7 1 4", " ".join("1" * 1025), "1 2 3")
    assert (said.code, said.out) == (2, "4 1 7\n3 2 1\n")
    assert "1025 tokens, expected at most 1024" in said.error


def test_an_item_that_runs_out_of_tokens_is_named_and_the_others_go_on(brick: Brick, writing: Path) -> None:
    """No character may come twice: the item that has most of them runs out first."""
    known = "".join(Trained.open(writing).target.tokens)[:-2]
    said = brick(
        "generate", writing, "a", known.replace("\n", ""), "--set", "no_repeat_ngram=1", "--set", "max_tokens=6"
    )
    assert said.code == 2 and said.out.startswith("a") and "no token is allowed as token" in said.error


def test_an_item_whose_logits_are_not_finite_is_named_and_the_others_go_on(brick: Brick, trained: Path) -> None:
    broken = Path(shutil.copytree(trained, "broken-001"))
    weights = load_file(broken / "weights.safetensors")
    run = Trained.open(trained)
    assert run.source is not None
    (nine,) = run.source.encode("9")
    table = next(name for name in weights if name.startswith("encoder.embed.tokens"))
    weights[table][nine] = torch.nan
    with safe_open(broken / "weights.safetensors", framework="pt") as file:
        header = file.metadata()
    save_file(weights, broken / "weights.safetensors", header)
    for way in ([], ["--no-cache"], ["--set", "width=2"], ["--draft", "lookup"], ["--cache", "int8"]):
        said = brick("generate", broken, "7 1 4", "1 9 2", "1 2 3", "--set", "banned=[12]", *way)
        assert said.code == 2 and len(said.out.splitlines()) == 2, way
        assert "'1 9 2', prompt 2: the logits of token 1 are not finite" in said.error


def test_a_writer_knows_its_step_and_its_cache(trained: Path) -> None:
    run = Trained.open(trained)
    assert isinstance(run.writer, Writer) and run.writer.compiled is None and run.writer.cache == "float"
    assert run.write(cache="int8").cache == "int8"
