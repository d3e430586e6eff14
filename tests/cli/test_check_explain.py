"""`brick check` and `brick explain`, and the check before training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli.conftest import TINY, Brick, contents
from torch.utils.flop_counter import FlopCounterMode

from brickformer.look.amounts import bytes_
from brickformer.presets import gpt2, llama
from brickformer.proof import check, kernels_of, limits_of, twin_of
from brickformer.recipes import reverse
from brickformer.train import RunFolder

LEAKY = '''
"""A feed-forward that looks around."""
from typing import final
from torch import nn
from brickformer.feedforward import FeedForward, FeedForwardSpec
from brickformer.spec import spec


@spec("leaky")
class Leaky(FeedForwardSpec):
    """Adds the mean of all tokens."""

    def build(self, dim):
        return LeakyFeedForward(nn.Linear(dim, dim))


@final
class LeakyFeedForward(FeedForward):
    def __init__(self, out):
        super().__init__()
        self.out = out

    def forward(self, x):
        return self.out(x + x.mean(1, keepdim=True))
'''


def test_check_says_what_holds_and_what_is_not_owed(brick: Brick) -> None:
    said = brick("check", "gpt2", "--set", "depth=3")
    assert said.code == 0 and said.err == ""
    assert said.out.rstrip().endswith("all hold: 10 properties of 3 layers")
    assert "unseen beyond a window      -      no mask has a window" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    bert = brick("check", "bert").out
    assert "encoder: it sees the future" in bert and "encoder: it keeps no state" in bert


def test_check_names_the_brick_the_property_and_the_numbers(brick: Brick) -> None:
    Path("leaky.py").write_text(LEAKY)
    said = brick("check", "gpt2", "--set", "depth=2", "--set", "layers.1.ffn=leaky", "--use", "leaky.py")
    assert said.code == 1
    assert "causal                      BROKEN layers.1.ffn" in said.out
    lines = said.err.splitlines()
    assert lines[0].startswith(
        "brick: layers.1.ffn (leaky): causal: changing token 1 changed the output at token 0 by "
    )
    assert lines[0].endswith(", allowed 1e-09") and lines[-1].endswith("of 10 properties do not hold.")
    assert "Traceback" not in said.err


def test_check_as_json(brick: Brick) -> None:
    said = brick("check", "gpt2", "--json")
    data = json.loads(said.out)
    assert data == check(gpt2(vocab=50_257)).to_dict() | {"properties": data["properties"]}
    assert data["ok"] and len(data["properties"]) == 11 and data["layers"] == 12
    Path("leaky.py").write_text(LEAKY)
    said = brick("check", "gpt2", "--set", "layers.*.ffn=leaky", "--use", "leaky.py", "--json")
    broken = [p for p in json.loads(said.out)["properties"] if p["outcome"] == "broken"]
    assert said.code == 1 and {p["where"] for p in broken} == {"layers.0.ffn"}


def test_check_of_a_run_asks_its_own_weights_too(brick: Brick, tiny: Path) -> None:
    before = contents(tiny)
    said = brick("check", tiny)
    assert said.code == 0 and said.out.rstrip().endswith("all hold: 13 properties of 4 layers")
    assert contents(tiny) == before
    assert brick("check", "reverse").code == 0
    Path("spec.json").write_text(llama(dim=64, depth=2, heads=4).to_json())
    assert brick("check", "spec.json").code == 0


def test_check_and_explain_of_bad_input(brick: Brick) -> None:
    for verb in ("check", "explain"):
        assert "no run folder, no .json or .yaml file, no preset" in brick(verb, "gpt7").error
        assert "attention.heads: got 5, expected a divisor of dim=768" in brick(verb, "gpt2", "--set", "heads=5").error
    assert "brick: invalid: layers.0: attention.heads" in brick("explain", "gpt2", "--set", "heads=5").error
    Path("half.json").write_text('{"kind": "decoder", "vocab": 9}')
    assert "invalid: half.json.dim: missing" in brick("explain", "half.json").error
    assert "invalid" not in brick("explain", "nothing.json").error


def test_train_checks_before_the_first_step_and_says_so_in_a_line(brick: Brick) -> None:
    said = brick("train", "reverse", *TINY)
    (line,) = [line for line in said.out.splitlines() if line.startswith("check")]
    assert line.startswith("check   10 properties of 4 layers hold, in ")
    record = Path("runs/reverse-001/metrics.jsonl").read_text()
    assert "check" not in record and "propert" not in record


def test_a_model_that_is_broken_is_not_trained(brick: Brick) -> None:
    Path("leaky.py").write_text(LEAKY)
    said = brick("train", "reverse", *TINY[:-2], "--use", "leaky.py", "--set", "model.decoder.layers.1.ffn=leaky")
    assert said.code == 1 and not Path("runs").exists()
    assert said.err.startswith(
        "brick: decoder.layers.1.ffn (leaky): causal: changing token 1 changed the output at token 0"
    )
    assert said.err.splitlines()[-1].startswith("brick: not trained: ") and "step" not in said.err


def test_the_check_does_not_change_what_is_learnt(brick: Brick, monkeypatch: pytest.MonkeyPatch) -> None:
    import brickformer.cli.train as verb

    dropped = [*TINY, "--set", "model.*.layers.*.dropout=0.1"]
    brick("train", "reverse", *dropped)
    monkeypatch.setattr(verb, "proved", lambda session: True)
    brick("train", "reverse", *dropped)
    (one, _), (other, _) = (RunFolder.open(Path(f"runs/reverse-00{i}")).weights() for i in (1, 2))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- explain


def explained(brick: Brick, *args: str) -> str:
    said = brick("explain", *args)
    assert said.code == 0 and max(map(len, said.out.splitlines())) <= 80
    return " ".join(said.out.split())


def test_explain_says_costs_kernels_and_limits(brick: Brick) -> None:
    said = explained(brick, "llama")
    for part in (
        "valid decoder, D 4096, 32 layers",
        "parameters 6,738,415,616",
        "FLOPs 13.8 G a token",
        "state 1,048,576 bytes a token",
        "layers.0.mixer (and in 31 layers like it) training sdpa, flash, is_causal",
        "decoding sdpa, flash, no mask",
        "mask.causal = false: sees the future, which a decoder must not",
        "packed documents with a state: KV cannot keep packed documents apart",
    ):
        assert part in said, part
    assert "kernels, on a CPU none: no brick attends" in explained(brick, "gpt2", "--set", "layers.*.mixer=lstm")


@pytest.mark.parametrize(
    ("settings", "case", "says"),
    [
        (
            {"softcap": 30.0},
            "training",
            "reference (not fused: scores are capped, which sdpa cannot do; on a GPU: flex)",
        ),
        ({"backend": "reference"}, "training", "reference (not fused: backend='reference' asks for it)"),
        ({"dropout": 0.1}, "training", "sdpa, math (not fused: weights are dropped), is_causal"),
        ({"dropout": 0.1}, "decoding", "sdpa, flash, no mask"),
        (
            {"position": {"kind": "t5bias"}},
            "training",
            "sdpa, math (not fused: the bias is learned), a bias on the scores",
        ),
        (
            {"position": {"kind": "alibi"}},
            "training",
            "sdpa, flash, a bias on the scores (on a GPU: not FlashAttention)",
        ),
        (
            {"mask": {"kind": "mask", "window": 64}},
            "training",
            "sdpa, flash, a dense mask (on a GPU: not FlashAttention)",
        ),
        ({"mask": {"kind": "mask", "window": 64}}, "decoding", "sdpa, flash, no mask"),
        ({"sinks": True}, "decoding", "a bias on the scores"),
        ({}, "padded", "sdpa, flash, a dense mask (on a GPU: not FlashAttention)"),
        ({"backend": "flex"}, "training", "flex, a block mask (backend='flex' asks for it)"),
    ],
)
def test_explain_says_which_kernel_and_why_not_the_fused_one(settings: dict[str, object], case: str, says: str) -> None:
    spec = gpt2(vocab=50, depth=2).but(**{"layers.*.mixer.dropout": 0.0})
    spec = spec.but(**{f"layers.1.mixer.{name}": value for name, value in settings.items()})
    used = {one.where: one.kernels for one in kernels_of(twin_of(spec))}
    assert says in used["layers.1.mixer" if settings else "layers.0.mixer"][case]


def test_what_explain_counts_is_what_a_real_model_does(brick: Brick) -> None:
    """Operations of the 24th token by torch's own counter, bytes of a real state."""
    spec = gpt2(vocab=50, dim=32, depth=2, heads=4, max_len=64).but(**{"layers.*.mixer.backend": "reference"})
    Path("spec.json").write_text(spec.to_json())
    said = explained(brick, "spec.json", "--context", "24")
    model, ids = spec.build().eval(), torch.zeros(1, 24, dtype=torch.long)
    state = model.init_state(1, 24)
    with torch.no_grad():
        model(ids[:, :23], state=state)
        with FlopCounterMode(display=False) as counter:
            model(ids[:, 23:], state=state)
    assert f"FLOPs {counter.get_total_flops():,} a token (matrix products and attention over 24 tokens" in said
    grown = model.init_state(1, 25).nbytes - state.nbytes - 2 * 8  # beside keys and values: a position a layer
    assert f"state {grown:,} bytes a token; {bytes_(state.nbytes)} for 24 tokens" in said
    assert f"parameters {sum(p.numel() for p in model.parameters()):,} (" in said


def test_explain_counts_layers_in_good_english(brick: Brick) -> None:
    assert "layers.0.mixer (and in 1 layer like it)" in explained(brick, "gpt2", "--set", "depth=2")


def test_explain_says_what_cannot_be_combined() -> None:
    def said(**changes: object) -> str:
        return "\n".join(limits_of(twin_of(gpt2(vocab=50).but(**changes))))

    assert "longer input: embed knows 1,024 positions" in said()
    assert "layers.0.mixer.backend = flex: backend 'flex' cannot drop weights" in said()
    assert "layers.0.place = post: got 'post', expected 'pre'" in said(**{"layers.*.arrange": "parallel"})
    assert "speculative decoding: mamba: a recurrent state cannot rewind" in said(**{"layers.1.mixer": "mamba"})
    both = "\n".join(limits_of(twin_of(reverse().model)))
    assert "decoder.layers.0.arrange = parallel: got 'parallel', expected 'serial' when there is cross-att" in both
