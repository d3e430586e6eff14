"""Surgery: what is coded and what is left, in models of ours and of others; what is refused."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from generate.worlds import DECODERS, PROMPTS, encoder_decoder
from torch import nn

from brickformer import GLU, Attention, Decoder, Head, Layer, Rope, llama, vaswani
from brickformer.errors import BrickError
from brickformer.generate import Stop, Writer, generate
from brickformer.moe import MoE
from brickformer.quant import NF4, Calibration, Int4, Int8, QuantEmbedding, QuantLinear, quantize
from brickformer.surgery import get, places, replace

STOP = Stop(max_tokens=6)


def small(**more: object) -> nn.Module:
    return llama(vocab=50, dim=32, depth=2, heads=4, hidden=48, **more).build().eval()


def test_the_model_answers_nearly_the_same() -> None:
    for make, near in ((Int8, 0.05), (Int4, 0.6), (NF4, 0.6)):
        model = small()
        ids = torch.randint(0, 50, (2, 9))
        with torch.no_grad():
            before = model(ids)
            matrices = quantize(model, make())
            after = model(ids)
        assert 0 < (after - before).norm() < near * before.norm()
        assert matrices[0].name == "stack.layers.0.mixer.qkv" and len(matrices) == 9
        assert not any(isinstance(m, nn.Linear) for m in model.modules())
        coded = {p.name: p.module for p in places(model, QuantLinear)}
        assert sum(m.after for m in matrices) == sum(m.coded.nbytes for m in coded.values())
        assert coded["stack.layers.0.ffn.gate_up"].parts == (48, 48)


@pytest.mark.parametrize("scheme", [Int8(), Int4()], ids=repr)
@pytest.mark.parametrize("kind", [*DECODERS, "encoder-decoder"])
def test_every_way_to_write_gives_the_same_tokens(kind: str, scheme: Int8 | Int4) -> None:
    """Packed or not, with the cache or without: where each call has few rows, all take the same product."""
    model = (DECODERS[kind]() if kind in DECODERS else encoder_decoder()).float().eval()
    quantize(model, scheme)
    start = {} if kind in DECODERS else {"start": [1]}
    plain, packed = Writer(model, **start), Writer(model, packed=True, **start)
    prompts = [PROMPTS[0][:4]]
    one, two = (generate(w, prompts, stop=STOP).results[0] for w in (plain, packed))
    assert one.tokens == two.tokens and len(one.tokens) == 6
    assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
    exact = copy.deepcopy(model)
    for place in list(places(exact, QuantLinear)):
        m = place.module
        linear = nn.Linear(m.in_features, m.out_features, bias=m.bias is not None)
        linear.weight.data, linear.bias, linear.parts = m.weight, m.bias, m.parts
        replace(exact, place.name, linear)
    away = generate(Writer(exact, **start), prompts, stop=Stop(max_tokens=1)).results[0]
    assert away.logprobs == pytest.approx(one.logprobs[:1], abs=0.1)


def test_heads_and_tables() -> None:
    tied = small(tied=True)
    kinds = {m.name: m.kind for m in quantize(tied, Int4(), head="keep")}
    assert kinds["head.project"] == "kept" and tied.head.project.weight is tied.embed.tokens.weight

    left = small(tied=True)
    with pytest.raises(BrickError, match="head: got 'own', expected 'same', 'int8' or 'keep'"):
        quantize(left, Int4(), head="own")
    quantize(left, Int4(), head="int8")
    assert left.head.project.scheme == Int8() and isinstance(left.embed.tokens, nn.Embedding)

    both = small(tied=True)
    ids = torch.randint(0, 50, (2, 9))
    with torch.no_grad():
        before = both(ids)
        report = {m.name: m for m in quantize(both, Int8(), table=True)}
        assert (both(ids) - before).norm() < 0.05 * before.norm()
    assert both.head.project.codes is both.embed.tokens.codes, "one set of codes"
    assert report["head.project"].kind == "int8, tied" and report["head.project"].after == 0
    assert isinstance(both.embed.tokens, QuantEmbedding)
    assert generate(both, [[1, 2, 3]], stop=STOP).results[0].tokens
    torch.testing.assert_close(both.embed.tokens(ids), both.embed.tokens.coded.weight()[ids])


def test_some_stay_as_they_are() -> None:
    model = small()
    kinds = {m.name: m.kind for m in quantize(model, Int4(), keep=["stack.layers.1", "stack.layers.0.ffn.out"])}
    assert [n for n, k in kinds.items() if k == "kept"] == [
        "stack.layers.0.ffn.out",
        *(f"stack.layers.1.{n}" for n in ("mixer.qkv", "mixer.out", "ffn.gate_up", "ffn.out")),
    ]
    experts = Decoder(20, 16, (Layer(Attention(4), MoE(3, GLU(24))),)).build()
    kinds = {m.name: m.kind for m in quantize(experts, Int8())}
    assert kinds["stack.layers.0.ffn.router.project"] == "kept" and kinds["stack.layers.0.ffn.experts.2.out"] == "int8"


def test_a_token_table_stays_where_it_is_named() -> None:
    for keep in (["embed"], ["embed.tokens"]):
        model = small(tied=True)
        report = quantize(model, Int8(), keep=keep, table=True)
        (line,) = [m for m in report if m.name == "embed.tokens"]
        assert isinstance(model.embed.tokens, nn.Embedding) and line.kind == "kept"
        assert isinstance(model.head.project, QuantLinear) and line.before == line.after == 50 * 32 * 4
    assert "embed.tokens" not in [m.name for m in quantize(small(), Int8())], "which nobody asked to code"


def test_progress_ends_at_the_whole_and_never_passes_it() -> None:
    ids = torch.randint(0, 50, (2, 9))
    calibration = Calibration([lambda m: m(ids)])
    for more in ({}, {"table": True}, {"table": True, "calibration": calibration}, {"table": True, "head": "keep"}):
        for tied in (True, False):
            told: list[tuple[int, int]] = []
            quantize(small(tied=tied), Int4(), progress=lambda *at, told=told: told.append(at), **more)
            done, whole = zip(*told, strict=True)
            assert len(set(whole)) == 1 and list(done) == sorted(set(done)) and done[-1] == whole[0]


def test_nothing_is_left_to_calibrate_where_the_table_is_all() -> None:
    model = small(tied=True)
    calibration = Calibration([lambda m: m(torch.randint(0, 50, (2, 9)))])
    report = quantize(model, Int8(), calibration, keep=["stack"], table=True)
    assert {m.name for m in report if m.kind != "kept"} == {"embed.tokens", "head.project"}


@torch.no_grad()
def test_a_packed_writer_sees_weights_that_were_loaded() -> None:
    models = [small(tied=False) for _ in "ab"]
    for model in models:
        quantize(model, Int8())
    writer = Writer(models[0], packed=True)
    first = generate(writer, [[5, 7]], stop=STOP).results[0].logprobs
    codes = {name: t for name, t in models[1].state_dict().items() if name.endswith(("codes", "scales"))}
    models[0].load_state_dict(codes, strict=False)
    again = generate(writer, [[5, 7]], stop=STOP).results[0].logprobs
    assert again == generate(models[0], [[5, 7]], stop=STOP).results[0].logprobs != first


def test_a_layer_in_a_loop_is_coded_once() -> None:
    model = Decoder(20, 16, (Layer(Attention(4, position=Rope()), GLU(24)),), loops=3, head=Head(tied=False)).build()
    assert len(quantize(model, Int8())) == 5
    shared = nn.Sequential(*[nn.Linear(4, 4)] * 3)
    assert len(quantize(shared, Int8())) == 1 and shared[0] is shared[2] and isinstance(shared[0], QuantLinear)


def test_models_of_others() -> None:
    """Also where other code reads `.weight`; what cannot be replaced stays as it is."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = layer(x)
        kinds = {m.name: m.kind for m in quantize(layer, Int8())}
        assert kinds == {"self_attn.out_proj": "kept", "linear1": "int8", "linear2": "int8"}
        assert 0 < (layer(x) - before).norm() < 0.02 * before.norm()


def test_what_is_refused_leaves_the_model_as_it_was() -> None:
    model = small()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(BrickError, match=r"no such module; did you mean 'stack.layers.0.mixer.qkv'"):
        quantize(model, Int4(), keep=["stack.layers.0.mixer.qkw"])
    model.stack.layers[1].ffn.out.weight.data[3, 4] = torch.nan
    with pytest.raises(BrickError, match=r"stack.layers.1.ffn.out.weight \[3, 4\] is nan"):
        quantize(model, Int4())
    model.stack.layers[1].ffn.out.weight.data[3, 4] = before["stack.layers.1.ffn.out.weight"][3, 4]
    gain = model.stack.norm.weight.data
    gain[5] = -torch.inf
    with pytest.raises(BrickError, match=r"stack.norm.weight \[5\] is -inf"):
        quantize(model, Int4(), keep=["head"])
    gain[5] = before["stack.norm.weight"][5]
    assert all(t.equal(before[name]) for name, t in model.state_dict().items())
    with pytest.raises(BrickError, match="no linear map is left"):
        quantize(model, Int4(), keep=["stack", "head"])
    quantize(model, Int4())
    with pytest.raises(BrickError, match="quantized already"):
        quantize(model, Int8())


def test_no_full_matrix_is_held_for_longer_than_its_turn() -> None:
    """When a matrix is coded, those before it are gone."""
    import gc
    import weakref

    for calibration in (None, Calibration([lambda m: m(torch.randint(0, 50, (2, 9)))])):
        model = small()
        alive = [weakref.ref(p.module.weight) for p in places(model, nn.Linear)]
        left: list[int] = []

        def told(done: int, whole: int, alive: list = alive, left: list = left) -> None:
            gc.collect()
            left.append(sum(p is not None and p.numel() > 0 for p in (ref() for ref in alive)))

        quantize(model, Int4(), calibration, progress=told)
        assert left[-1] <= 1 and max(n + i for i, n in enumerate(left)) <= len(alive) + 1


def test_surgery_says_what_is_not_there() -> None:
    model = vaswani(vocab=9, dim=8, depth=1, heads=2, hidden=8).build()
    with pytest.raises(BrickError, match="did you mean 'decoder.head.project'"):
        get(model, "decoder.head.projekt")
    with pytest.raises(BrickError, match="cannot be replaced inside itself"):
        replace(model, "", nn.Identity())


class Twice(nn.Linear):
    """A map of someone else: more than x Wᵀ + b, with another map inside."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.more = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x) + self.more(x)


@pytest.mark.parametrize("by_data", [False, True])
def test_a_class_of_others_that_does_more_stays(by_data: bool) -> None:
    model, x = nn.Sequential(Twice(16, 16), nn.Tanh(), nn.Linear(16, 16)).eval(), torch.randn(4, 16)
    before = model(x)
    matrices = quantize(model, Int8(), Calibration([lambda m: m(x)]) if by_data else None)
    assert {m.name: m.kind for m in matrices} == {"0": "kept", "0.more": "int8", "2": "int8"}
    assert (model(x) - before).norm() < 0.02 * before.norm()


def test_packing_leaves_a_class_of_others_its_forward() -> None:
    model = small()
    old = get(model, "stack.layers.0.mixer.out")
    replace(model, "stack.layers.0.mixer.out", Twice(old.in_features, old.out_features))
    plain, packed = (generate(Writer(model, packed=p), [[3, 4, 5]], stop=STOP).results[0] for p in (False, True))
    assert plain.tokens == packed.tokens and plain.logprobs == pytest.approx(packed.logprobs, abs=1e-5)


@pytest.mark.parametrize("by_data", [False, True])
def test_a_weight_that_a_hook_makes_is_coded_as_it_is(by_data: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, x = nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 16)), torch.randn(4, 16)
    before = model(x)
    quantize(model, Int8(), Calibration([lambda m: m(x)]) if by_data else None)
    assert (model(x) - before).norm() < 0.02 * before.norm()
