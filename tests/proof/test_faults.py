"""`check` finds planted faults, and says which brick, which property, which numbers; good models pass."""

from __future__ import annotations

import random
from typing import get_args

import pytest
import torch
from contract.bricks import Cell, pairs, stars
from mutants.mutants import MUTANTS
from mutants.test_mutants import home
from mutants.world import world
from proof.faulty import Averaging, Fault, Faulty, Loud, WideWindow

from brickformer.embed import Embed, Head
from brickformer.feedforward import GLU, MLP
from brickformer.layers import Layer
from brickformer.mask import FULL, Mask
from brickformer.mixers.attention import Attention
from brickformer.mixers.cross import Cross
from brickformer.mixers.mamba import Mamba
from brickformer.mixers.shortconv import ShortConv
from brickformer.models import Decoder, Encoder, EncoderDecoder, ModelSpec
from brickformer.moe import MoE, Router
from brickformer.positions import Learned, Randomized, Rope
from brickformer.presets import bert, gpt2, llama, vaswani, vaswani_small
from brickformer.proof import PROPERTIES, Report, check
from brickformer.recipes import reverse, text

pytestmark = pytest.mark.unchecked

GOOD = Layer(Attention(4, kv_heads=2, position=Rope()), GLU(64))


def with_mixer(mixer: object) -> Decoder:
    """A decoder whose third layer has this mixer."""
    return Decoder(100, 64, (GOOD, GOOD, Layer(mixer, GLU(64)), GOOD))  # type: ignore[arg-type]


def found(report: Report) -> dict[str, tuple[str, str, str]]:
    """Property -> where, kind, numbers."""
    return {row.name: (row.where, row.kind, row.detail) for row in report.failures}


CAUGHT: dict[Fault, tuple[str, str]] = {
    "sees the future": ("causal", "changing token 1 changed the output at token 0 by "),
    "sees one token ahead": ("causal", "changing token 1 changed the output at token 0 by "),
    "forgets its cache": ("cached == full", "token by token: with a state the output at token 1 is off by "),
    "rows of its state stay": ("cached == full", "rows [1, 0, 1] picked: "),
    "its copy is no copy": ("cached == full", ""),
    "mixes the batch": ("batch == single", "row 0 of 3 and alone: token "),
    "ignores padding": ("padded == unpadded", "4 padded left: real token "),
    "random in eval": ("eval is deterministic", "the same call twice: token "),
    "counts calls": ("eval is deterministic", "the same call twice: token "),
    "dead parameter": ("gradients reach everything", "mixer.dead gets no gradient"),
    "detached": ("gradients reach everything", "mixer.decay gets no gradient"),
    "unregistered tensor": ("save → load equal", "allowed 0: a tensor is not in the file. Register it as a parameter"),
    "overflows": ("bf16 close to fp32", "numbers are not finite"),
    "answers in float32": ("bf16 close to fp32", ""),
    "crashes": ("runs", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
}


@pytest.mark.parametrize("fault", [fault for fault in get_args(Fault) if fault != "none"])
def test_a_fault_is_found_with_its_brick_its_property_and_its_numbers(fault: Fault) -> None:
    report = check(with_mixer(Faulty(fault)))
    name, says = CAUGHT[fault]
    assert not report.ok
    where, kind, detail = found(report)[name]
    assert (where, kind) == ("layers.2.mixer", "faulty") and says in detail
    assert f"layers.2.mixer (faulty): {name}: " in report.failures[0].failure() + str(report)
    assert {row.where for row in report.failures} <= {"layers.2.mixer", ""}, "another brick is blamed"


def test_the_good_one_passes() -> None:
    report = check(with_mixer(Faulty()))
    assert report.ok, str(report)
    assert report.line() == "10 properties of 4 layers" and report.distinct == 2


@pytest.mark.parametrize("off", [1, -1])
def test_a_window_that_is_off_by_one(off: int) -> None:
    for family, causal in ((Decoder, True), (Encoder, False)):
        layer = Layer(WideWindow(Mask(causal, window=16), off), MLP(8))
        row = found(check(family(50, 32, (layer,))))["unseen beyond a window"]
        assert row[:2] == ("layers.0.mixer", "wide_window") and "the window of 3" in row[2]


def test_a_norm_that_starts_loud() -> None:
    spec = Decoder(100, 64, (GOOD, Layer(Attention(4), MLP(32), norm=Loud())))
    assert found(check(spec))["first loss near ln V"][:2] == ("layers.1.norm", "loud")


def test_a_feed_forward_that_looks_around() -> None:
    rows = found(check(Decoder(100, 64, (GOOD, Layer(Attention(4), Averaging())))))
    assert rows["causal"][:2] == rows["cached == full"][:2] == ("layers.1.ffn", "averaging")


def test_bricks_inside_bricks_and_on_either_side_are_named() -> None:
    inside = check(with_mixer(ShortConv(Faulty("ignores padding"))))
    assert found(inside)["padded == unpadded"][0] == "layers.2.mixer.mixer"
    expert = Decoder(50, 32, (Layer(Attention(4), MoE(3, Averaging())),))
    assert found(check(expert))["causal"][0] == "layers.0.ffn.expert"
    source = Encoder(50, 32, (Layer(Attention(4, mask=FULL), Averaging()),))
    both = EncoderDecoder(source, Decoder(50, 32, (Layer(Faulty("mixes the batch"), MLP(8), cross=Cross(4)),)))
    rows = found(check(both))
    assert rows["batch == single"][0] == "decoder.layers.0.mixer"
    assert rows["padded == unpadded"][0] == "encoder.layers.0.ffn"


# ---- no false alarm


EVERYTHING: dict[str, ModelSpec] = {
    "llama": llama(),
    "llama, few key heads": llama(heads=32, kv_heads=8),
    "gpt2": gpt2(vocab=50_257),
    "bert": bert(vocab=30_522),
    "vaswani": vaswani(vocab=100),
    "vaswani_small": vaswani_small(vocab=100, shared=True),
    "reverse": reverse().model,
    "text": text("a file").model,
    "two tokens": Decoder(2, 7, (Layer(Attention(1), MLP(1)),)),
    "a table of three": Decoder(9, 16, (Layer(Attention(2), MLP(8)),), embed=Embed(position=Learned(3))),
    "a table of one": Decoder(9, 16, (Layer(Attention(2), MLP(8)),), embed=Embed(position=Learned(1))),
    "few places": Decoder(9, 16, (GOOD,), embed=Embed(randomized=Randomized(range=20, stride=3))),
    "window of two": Decoder(9, 16, (Layer(Attention(2, mask=Mask(window=2)), MLP(8)),)),
    "every layer another": Decoder(
        99, 64, tuple(Layer(Attention(4, mask=Mask(window=w)), GLU(8 * w), dropout=w / 50) for w in range(2, 20))
    ),
    "dropout everywhere": Decoder(99, 64, (Layer(Attention(4, dropout=0.5), MLP(9, dropout=0.5), dropout=0.5),) * 3),
    "one way": Encoder(99, 64, (Layer(Mamba(), MLP(64)),), one_way=True),
    "no head": Encoder(99, 64, (Layer(Attention(4, mask=FULL), MLP(64)),)),
    "flex": Decoder(99, 64, (Layer(Attention(4, softcap=5.0, backend="flex"), MLP(64)),)),
    "many experts": Decoder(99, 64, (Layer(Attention(4), MoE(64, GLU(32), Router(top_k=8))),)),
    "experts, one each": Decoder(99, 64, (Layer(Attention(4), MoE(8, GLU(32), Router(top_k=1, normalize=False))),)),
    "capped head": Decoder(99, 64, (GOOD,), head=Head(softcap=1.0, bias=True)),
    "odd width": Decoder(99, 250, (Layer(Attention(5, position=Rope()), MLP(77)),)),
    "fixed widths": Decoder(99, 512, (Layer(Attention(3, head_dim=170, position=Rope(width=64)), GLU(77)),)),
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_good_models_pass(name: str) -> None:
    report = check(EVERYTHING[name])
    assert report.ok, str(report)


def test_a_window_of_one_leaves_queries_and_keys_without_a_gradient() -> None:
    """One key always gets all the weight: what scores it cannot matter, and the report says so."""
    rows = found(check(Decoder(9, 16, (Layer(Attention(2, mask=Mask(window=1)), MLP(8)),))))
    assert list(rows) == ["gradients reach everything"] and rows["gradients reach everything"][0] == "layers.0.mixer"


@pytest.mark.parametrize("cell", [*stars()[::9], *pairs()[::9]], ids=str)
def test_what_keeps_the_contract_passes(cell: Cell) -> None:
    report = check(cell.spec())
    assert report.ok, str(report)
    not_owed = {row.name: row.detail for row in report.rows if row.outcome == "not owed"}
    assert ("causal" in not_owed) == (cell.family == "encoder" and "lstm_one_way" not in str(cell) and two_way(cell))
    assert ("cached == full" in not_owed) == (cell.family == "encoder")
    assert all(not_owed.values()), "it says why"


def two_way(cell: Cell) -> bool:
    """Whether some layer of an encoder sees the future."""
    return cell.stack == "mixed" or not cell.build().stack.mixers()[0].causal  # type: ignore[union-attr]


# ---- our own code, broken


ONLY_THE_SUITE = {
    "the mask is not applied after the softmax",
    "rotary turns values too",
    "documents see each other",
    "a document does not start at 0",
    "an encoder's memory has no padding",
    "rotary does nothing",
    "dropout without a switch",
    "the head is a copy",
}
"""What only the contract suite finds: packed documents, unused positions, rows of nothing but padding, ..."""


@pytest.mark.parametrize("mutant", MUTANTS[::3], ids=lambda m: m.name)
def test_our_own_mutants_are_found(mutant) -> None:  # type: ignore[no-untyped-def]
    import importlib

    with world({home(mutant.old): (mutant.old, mutant.new)}) as (bricks, _):
        spec = bricks.Cell(**mutant.cell).spec()
        report = importlib.import_module("brickformer.proof").check(spec)
    assert report.ok == (mutant.name in ONLY_THE_SUITE), str(report)


# ---- manners


def test_it_leaves_random_numbers_and_settings_as_they_are() -> None:
    random.seed(1)
    torch.manual_seed(1)
    expected = (torch.rand(3), random.random())
    random.seed(1)
    torch.manual_seed(1)
    with torch.no_grad():
        check(with_mixer(Faulty("random in eval")))
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]
    assert torch.get_default_dtype() is torch.float32


def test_it_says_the_same_twice() -> None:
    spec = reverse().model
    assert check(spec) == check(spec)


def test_every_property_is_owed_by_some_model() -> None:
    windowed = Decoder(9, 16, (Layer(Attention(2, mask=Mask(window=3)), MLP(8)),))
    report = check(windowed)
    assert [row.name for row in report.rows if row.outcome == "holds"] == [p.says for p in PROPERTIES]
    assert len(PROPERTIES) == 11


def test_a_model_is_also_asked_about_its_own_weights() -> None:
    model = gpt2(vocab=50, dim=32, depth=2, heads=4, max_len=32).build()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    report = check(model)
    assert report.ok and [row.name for row in report.rows[-3:]] == [
        "finite, own weights",
        "eval is deterministic, own weights",
        "save → load equal, own weights",
    ]
    assert model.training and all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    model.stack.layers[1].ffn.out.weight.data[0, 3] = torch.nan
    row = found(check(model))["finite, own weights"]
    assert "stack.layers.1.ffn.out.weight: 1 of " in row[2]


def test_what_cannot_be_built_is_an_error_and_no_report() -> None:
    from brickformer.errors import SpecError

    with pytest.raises(SpecError, match=r"layers.0: attention.heads: got 5, expected a divisor of dim=64"):
        check(Decoder(100, 64, (Layer(Attention(5), MLP(8)),)))
