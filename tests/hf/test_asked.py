"""What a checkpoint asks of whoever writes with it: answers are those of transformers' generate(), or it is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from hf.cases import Case, quiet, shake
from hf.test_decoders import SIZES, rope
from hf.test_encoders import bart, marian, t5

import brickformer
from brickformer.cli import main
from brickformer.errors import DataError
from brickformer.generate import Sampling, Stop
from brickformer.hf.asked import THEIRS, Asked, read_asked
from brickformer.recipes import Trained
from brickformer.recipes.published import imported

pytestmark = pytest.mark.unchecked

SOURCE, TOKENS, END = [5, 6, 7, 8, 2], 9, 3
ONCE = Sampling(no_repeat_ngram=1)
"""A random model repeats itself: then no answer would tell one beginning from another."""
KINDS: dict[str, Callable[..., Case]] = {"bart": bart, "marian": marian, "t5": t5}
LIKE = ("--set", "no_repeat_ngram=1", "--set", f"max_tokens={TOKENS}", "--set", f"ids=[{END}]")
Asking = Callable[[dict[str, Any]], Path]


@pytest.fixture(params=KINDS)
def asking(request: pytest.FixtureRequest, tmp_path: Path) -> Asking:
    """Writes a small random checkpoint whose generation_config.json says so."""
    case = KINDS[request.param]("asked", eos_token_id=END, forced_eos_token_id=None)
    torch.manual_seed(2)
    with quiet(), torch.no_grad():
        model = case.kind(case.kind.config_class(**case.options)).eval()
        shake(model)
        case.after(model)
        model.save_pretrained(tmp_path / "model")

    def write(said: dict[str, Any]) -> Path:
        file = tmp_path / "model" / "generation_config.json"
        kept = json.loads(file.read_text())
        ids = {name: kept[name] for name in kept if "token_id" in name}
        file.write_text(json.dumps(ids | {"no_repeat_ngram_size": 1} | said))
        return tmp_path / "model"

    return write


def theirs(folder: Path, **options: Any) -> list[int]:
    """What transformers writes after the first id."""
    with quiet(), torch.no_grad():
        model = t.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        ids = torch.tensor([SOURCE])
        seen = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=seen, max_new_tokens=TOKENS, do_sample=False, **options)
    return list(map(int, out[0, 1:]))


def run_of(folder: Path, tmp_path: Path) -> Path:
    return imported(brickformer.load(folder), tmp_path / "runs").path


def answered(run: Path, sampling: Sampling = ONCE) -> list[int]:
    text = " ".join(map(str, SOURCE))
    result = Trained.open(run).generate([text], sampling, Stop(max_tokens=TOKENS, ids=(END,))).results[0]
    assert result.error is None, result.error
    return result.tokens


def said_by(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_the_first_token_is_theirs(asking: Asking, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = theirs(asking({}))
    first = next(i for i in range(4, 13) if i != free[0])
    forced = theirs(folder := asking({"forced_bos_token_id": first}))
    assert forced[0] == first and forced[1:] != free[1:]
    run = run_of(folder, tmp_path)
    assert answered(run) == forced
    out = said_by(capsys, "generate", str(run), " ".join(map(str, SOURCE)), *LIKE)
    assert out.split() == [str(i) for i in forced if i != END]
    other = next(i for i in range(4, 13) if i not in (first, free[0]))  # another language, say
    assert answered(run, ONCE.but(forced=(other,))) == theirs(folder, forced_bos_token_id=other)


def test_runs_that_may_not_be_written_are_not(asking: Asking, tmp_path: Path) -> None:
    """Each ban changes the answer after it; the id before the answer counts, an end stays an end."""
    start, bans = 0, [[END]]
    for at in range(5):
        free = [start, *theirs(asking({"bad_words_ids": bans}))]
        bans.append(free[max(0, at - 1) : at + 2])
    told = theirs(folder := asking({"bad_words_ids": bans}))
    assert told != free[1:] and {len(ban) for ban in bans} == {1, 2, 3}
    run = run_of(folder, tmp_path)
    assert answered(run) == told
    with_first = asking({"bad_words_ids": bans, "forced_bos_token_id": bans[1][-1]})  # forced is stronger
    assert theirs(with_first)[0] == bans[1][-1] and answered(run_of(with_first, tmp_path)) == theirs(with_first)


def test_beams_are_said(asking: Asking, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers stay greedy; with what is printed they are those of the search that is asked for."""
    folder = asking({"num_beams": 3, "early_stopping": True, "length_penalty": 2, "forced_eos_token_id": END})
    out = said_by(capsys, "import", str(folder), "--out", str(tmp_path / "runs"))
    said, undone = out.splitlines()[-2:]
    assert said.endswith("with:  --set width=3 --set length_penalty=2.0 --set no_repeat_ngram=1")
    assert undone == "not done, though it asks for it:  forced_eos_token_id"
    run = tmp_path / "runs" / "model-001"
    assert answered(run) == theirs(folder, num_beams=1, forced_eos_token_id=None)
    settings = said.split("with:  ")[1].split()
    text = " ".join(map(str, SOURCE))
    out = said_by(capsys, "generate", str(run), text, *settings, *LIKE[2:])
    assert out.split() == [str(i) for i in theirs(folder, forced_eos_token_id=None) if i != END]


def test_what_is_drawn_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A decoder is given its first token; settings of drawing count where something is drawn."""
    with quiet():
        t.LlamaForCausalLM(t.LlamaConfig(**SIZES, **rope("default"))).save_pretrained(tmp_path / "chat")
    said = {"do_sample": True, "temperature": 1, "top_p": 0.9, "top_k": 5, "typical_p": 1.0, "min_p": None}
    said |= {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "num_beams": 1, "forced_bos_token_id": 4}
    (tmp_path / "chat" / "generation_config.json").write_text(json.dumps(said | {"bad_words_ids": [[1], [2, 3]]}))
    out = said_by(capsys, "import", str(tmp_path / "chat"), "--out", str(tmp_path / "runs"))
    settings = out.splitlines()[-2].split("with:  ")[1]
    assert settings == (
        "--set repetition=1.1 --set no_repeat_ngram=3 --set temperature=1.0 --set top_k=5 --set top_p=0.9"
    )
    assert out.splitlines()[-1].endswith(":  forced_bos_token_id")
    run = Trained.open(tmp_path / "runs" / "chat-001")
    assert run.allowed(Sampling()) == Sampling(banned=(1,), banned_runs=((2, 3),))
    said_by(capsys, "generate", str(tmp_path / "runs" / "chat-001"), "5 6", *settings.split(), "--set", "max_tokens=3")


def test_which_file_counts() -> None:
    """As in transformers: config.json where there is no other; ids that open and close are looked for in both."""
    config = {"decoder_start_token_id": 7, "forced_bos_token_id": 1, "num_beams": 2, "bad_words_ids": [[5], [-1], 3]}
    assert read_asked(config, None, "x", answers=True) == Asked(7, 1, (5,), said=("width=2", "early=false"))
    assert read_asked(config, {}, "x", answers=True) == Asked(7)
    assert read_asked(config, {"decoder_start_token_id": 8, "do_sample": False, "top_k": 3}, "x", answers=True) == (
        Asked(8)
    )
    assert read_asked({"bos_token_id": 2}, None, "x", answers=True).start == 2
    assert read_asked({"decoder_start_token_id": 2}, None, "x", answers=False) == Asked()


def test_what_drawing_means_there() -> None:
    """Without a word on it theirs takes 50 tokens at a temperature of 1."""
    with quiet():
        defaults = t.GenerationConfig._get_default_generation_params()
    assert {name: defaults[name] for name in THEIRS} == THEIRS
    assert read_asked({}, {"do_sample": True, "top_p": 1.0}, "x", answers=False).said == ("temperature=1.0", "top_k=50")
    assert read_asked({}, {"do_sample": True, "top_k": 0}, "x", answers=False).said == ("temperature=1.0",)
    assert read_asked({}, {"do_sample": True, "num_beams": 4}, "x", answers=False).said == ("width=4", "early=false")


def test_a_first_token_that_is_forbidden() -> None:
    with pytest.raises(DataError, match=r"x/g\.json: forced_bos_token_id: got 5, which bad_words_ids forbids"):
        read_asked({}, {"forced_bos_token_id": 5, "bad_words_ids": [[5]]}, "x/g.json", answers=True)
