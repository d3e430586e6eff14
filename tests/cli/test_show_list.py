"""`brick show` and `brick list`."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from cli.conftest import Brick

from brickformer.presets import PRESETS, gpt2
from brickformer.recipes import Trained

MINE = '''
"""A brick of my own."""
from typing import final
from torch import nn
from brickformer.feedforward import FeedForward, FeedForwardSpec
from brickformer.spec import spec


@spec("bilinear")
class Bilinear(FeedForwardSpec):
    """Two products, multiplied (arXiv 2002.05202). hidden: units."""

    hidden: int = 7

    def build(self, dim):
        return BilinearFeedForward(dim, self.hidden)


@final
class BilinearFeedForward(FeedForward):
    def __init__(self, dim, hidden):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(dim, hidden), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.out(self.a(x) * self.b(x))
'''


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_shown_with_its_exact_totals(brick: Brick, name: str) -> None:
    said = brick("show", name)
    assert said.code == 0 and max(map(len, said.out.splitlines())) <= 80
    assert "parameters  " in said.out and "FLOPs       " in said.out
    assert ("KV cache" in said.out) == (name != "bert")


def test_gpt2_is_shown_as_it_was_published(brick: Brick) -> None:
    out = brick("show", "gpt2").out
    assert "124,439,808 (498 MB in float32)" in out
    assert f"{2 * 12 * 768 * 4:,} bytes a token" in out
    assert "layers.0-11" in out and "12 × layer" in out
    weights = 12 * (4 * 768**2 + 8 * 768**2) + 50_257 * 768
    assert 2 * weights + 12 * 4 * 768 * 1024 == 284_812_800 and "285 M a token" in out


def test_set_sizes_a_preset_and_changes_its_spec(brick: Brick) -> None:
    out = brick("show", "gpt2", "--set", "depth=2", "--set", "dim=64", "--set", "heads=4", "--set", "vocab=100",
                "--set", "layers.0.mixer.mask.window=8").out  # fmt: skip
    spec = gpt2(depth=2, dim=64, heads=4, vocab=100).but(**{"layers.0.mixer.mask.window": 8})
    assert f"{sum(p.numel() for p in spec.build().parameters()):,}" in out
    assert "causal, window 8" in out and "layers.1" in out


def test_more_context_means_more_operations(brick: Brick) -> None:
    near, far = (brick("show", "gpt2", "--context", n).out for n in ("1", "1001"))
    assert "247 M a token" in near and "284 M a token" in far  # 4 · 768 · 12 more for each token
    assert "expected at least 1" in brick("show", "gpt2", "--context", "0").error
    for verb in ("show", "explain"):
        assert (
            "got 1025, expected at most as many positions as the model knows, 1,024"
            in brick(verb, "gpt2", "--context", "1025").error
        )
        assert "the model knows, 2,147,483,647" in brick(verb, "llama", "--context", "9" * 30).error


def test_a_window_lets_go_of_what_is_behind_it(brick: Brick) -> None:
    """Bytes a token are those of a cache that grows; what is held is that of one that stopped growing."""
    assert "bytes a token; " in brick("show", "gpt2").out
    said = " ".join(brick("show", "gpt2", "--set", "layers.*.mixer.mask.window=128").out.split())
    assert "73,728 bytes a token until a window is full; 18.9 MB for 1,024 tokens" in said


def test_a_star_may_begin_a_path_in_a_preset(brick: Brick) -> None:
    out = " ".join(brick("show", "vaswani", "--set", "*.layers.*.place=post").out.split())
    assert out.count("place='post'") == 2
    assert "* stands for nothing here" in brick("show", "vaswani", "--set", "*.heads=3").error


def test_a_run_and_files_of_its_spec_show_the_same(brick: Brick, tiny: Path) -> None:
    spec = Trained.open(tiny).run.model
    shown = brick("show", tiny).out
    Path("model.json").write_text(spec.to_json())
    Path("model.yaml").write_text(spec.to_yaml())
    Path("run.json").write_text(Trained.open(tiny).run.to_json())
    for file in ("model.json", "model.yaml", "run.json"):
        assert brick("show", file).out == shown


def test_what_cannot_be_shown(brick: Brick) -> None:
    Path("part.json").write_text('{"kind": "mask"}')
    Path("cut.json").write_text('{"kind": "deco')
    Path("wrong.yaml").write_text("kind: decoder\nvocab: many\ndim: 8\nlayers: []\n")
    Path("typo.json").write_text(json.dumps({**gpt2().to_dict(), "dimm": 3}))
    Path("empty").mkdir()
    assert "did you mean 'llama'?" in brick("show", "lama").error
    assert "nothere.json: no such file" in brick("show", "nothere.json").error
    assert "got 'mask', a part" in brick("show", "part.json").error
    assert "not JSON" in brick("show", "cut.json").error
    assert "wrong.yaml.vocab: got 'many' (str), expected int" in brick("show", "wrong.yaml").error
    assert "did you mean 'dim'?" in brick("show", "typo.json").error
    assert "not a run folder" in brick("show", "empty").error


def test_misspelt_and_wrong_settings(brick: Brick) -> None:
    assert "did you mean 'depth'?" in brick("show", "gpt2", "--set", "dept=2").error
    assert "expected int" in brick("show", "gpt2", "--set", "depth=two").error
    assert "did you mean 'heads'?" in brick("show", "gpt2", "--set", "layers.*.mixer.head=2").error
    assert "from 0 to 11" in brick("show", "gpt2", "--set", "layers.12.place=post").error
    assert "expected path=value" in brick("show", "gpt2", "--set", "depth").error
    assert "expected 'pre' | 'post'" in brick("show", "gpt2", "--set", "layers.*.place=pst").error


# ---- list


def test_every_spec_in_the_source_is_listed(brick: Brick, root: Path) -> None:
    """Read from the syntax trees, so that a brick in a file that nothing imports is noticed."""
    kinds = set()
    for path in root.glob("brickformer/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.ClassDef(decorator_list=marks):
                    for mark in marks:
                        match mark:
                            case ast.Call(func=ast.Name(id="spec"), args=[ast.Constant(value=str(kind))]):
                                kinds.add(kind)
                case _:
                    pass
    said = brick("list")
    listed = {line.split()[0] for line in said.out.splitlines() if line.startswith("  ") and line[2] != " "}
    assert len(kinds) > 20 and kinds <= listed
    assert max(map(len, said.out.splitlines())) <= 80


def test_a_brick_is_listed_with_slot_options_and_paper(brick: Brick) -> None:
    out = brick("list", "norm").out
    assert out.splitlines()[0] == "norm"
    assert "layernorm" in out and "arXiv 1607.06450" in out and "eps: float = 1e-05; bias: bool = true" in out
    out = brick("list", "attention").out
    assert "arXiv 1706.03762" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith("    ") and line.strip()}
    assert rows["heads"] == ["int", "needed"]
    assert rows["backend"] == ["auto", "|", "reference", "|", "matmul", "|", "sdpa", "|", "flex", "auto"]
    assert rows["kv_heads"] == ["int", "|", "none", "none"]


def test_an_unknown_slot(brick: Brick) -> None:
    assert "did you mean 'mixer'?" in brick("list", "mixr").error
    assert "did you mean 'presets'?" in brick("list", "preset").error


def test_presets_are_listed(brick: Brick) -> None:
    names = {line.split()[0] for line in brick("list", "presets").out.splitlines()[1:] if line[2] != " "}
    assert names == set(PRESETS)
    out = " ".join(brick("list", "gpt2").out.split())
    assert repr(gpt2()) in out and "heads = 12" in out and "llama" not in out
    assert brick("list").out.endswith(brick("list", "presets").out)


# ---- --use


def test_a_brick_of_ones_own_joins_in(brick: Brick) -> None:
    Path("mine.py").write_text(MINE)
    ffn = "layers.*.ffn=bilinear"
    shown = brick("show", "gpt2", "--use", "mine.py", "--set", ffn, "--set", "dim=24", "--set", "heads=2")
    assert shown.code == 0 and "24 → 7" in shown.out
    listed = brick("list", "bilinear", "--use", "mine.py").out
    assert listed.startswith("feed-forward\n") and "arXiv 2002.05202" in listed and "hidden  int  7" in listed


def test_files_that_cannot_be_used(brick: Brick) -> None:
    Path("broken.py").write_text("x = 1\ny = x.nothing\n")
    Path("syntax.py").write_text("x = (\n")
    Path("taken.py").write_text(MINE.replace('"bilinear"', '"mlp"'))
    assert "--use gone.py: no such file. Name" in brick("list", "--use", "gone.py").error
    assert "no such file; did you mean 'broken'?" in brick("list", "--use", "brokn.py").error
    assert "broken.py, line 2: AttributeError" in brick("list", "--use", "broken.py").error
    assert "syntax.py, line 1" in brick("list", "--use", "syntax.py").error
    assert "already belongs to" in brick("list", "--use", "taken.py").error


# ---- help


@pytest.mark.parametrize("verb", ["", "train", "generate", "show", "list"])
def test_help_fits_a_terminal(brick: Brick, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    with pytest.raises(SystemExit) as stop:
        brick(*([verb] if verb else []), "--help")
    out = capsys.readouterr().out
    assert not stop.value.code
    assert ("examples:" if verb else "start here:") in out
    assert max(map(len, out.splitlines())) <= 80
