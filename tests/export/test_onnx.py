"""ONNX graphs: the same logits as ours, token by token; what a graph cannot say is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args, get_origin

import pytest
import torch

from brickformer import (
    GLU,
    MLP,
    Alibi,
    Attention,
    Cross,
    Decoder,
    Embed,
    EncoderDecoder,
    Head,
    Layer,
    LayerNorm,
    Learned,
    Mask,
    RMSNorm,
    Rope,
    Sinusoid,
    Spec,
    gpt2,
    llama,
    vaswani,
)
from brickformer.embed import Transform
from brickformer.errors import BrickError, RunError, SpecError, StateError
from brickformer.export.engine import Reader
from brickformer.export.fields import QUIET, SAID
from brickformer.export.graph import Graph
from brickformer.export.onnx import export_onnx
from brickformer.generate import Sampling, Stop, Writer, generate
from brickformer.mask import FULL
from brickformer.mixers.lstm import LSTM
from brickformer.mixers.pointwise import Pointwise
from brickformer.mixers.shortconv import ShortConv
from brickformer.models import AnyModel, EncoderDecoderModel, ModelSpec
from brickformer.moe import MoE
from brickformer.norms import DynamicTanh, NoNorm, OffsetRMSNorm, ScaleNorm
from brickformer.positions import Randomized, Yarn
from brickformer.positions.rotary import Dynamic
from brickformer.quant import NF4, Int4, Int8, Scheme, quantize
from brickformer.recipes.onnx import Onnx, compare, matrix_of
from brickformer.spec import fields_of

V, T = 40, 80


def one(mixer: Spec | None = None, ffn: Spec | None = None, **more: object) -> Decoder:
    layer = Layer(mixer or Attention(heads=4, position=Rope()), GLU(48) if ffn is None else ffn, **more)
    return Decoder(V, 64, (layer, layer))


SPECS: dict[str, Callable[[], ModelSpec]] = {
    "llama, grouped keys": lambda: llama(vocab=V, dim=64, depth=2, heads=4, kv_heads=2, hidden=48),
    "llama, tied": lambda: llama(vocab=V, dim=64, depth=1, heads=2, hidden=48, tied=True),
    "gpt2": lambda: gpt2(vocab=V, dim=64, depth=2, heads=4, max_len=100),
    "vaswani": lambda: vaswani(vocab=V, dim=64, depth=2, heads=4, hidden=80, max_len=100, shared=True),
    "vaswani, post": lambda: vaswani(vocab=V, dim=32, depth=1, heads=4, hidden=80, max_len=100, place="post"),
    "cross-attention, grouped, normed": lambda: vaswani(vocab=V, dim=64, depth=1, heads=4, hidden=32).but(
        **{"decoder.layers.0.cross.kv_heads": 2, "decoder.layers.0.cross.qk_norm": RMSNorm(),
           "encoder.layers.0.mixer.kv_heads": 2, "encoder.layers.0.mixer.position": Rope()}
    ),
    "window": lambda: one(Attention(heads=4, mask=Mask(window=5))),
    "window of one": lambda: one(Attention(heads=4, mask=Mask(window=1))),
    "half turned, normed heads": lambda: one(Attention(heads=4, qk_norm=RMSNorm(), position=Rope(width=8))),
    "interleaved, slowed": lambda: one(
        Attention(heads=4, position=Rope(layout="interleaved", scaling=Yarn(factor=4.0, original=16)))
    ),
    "heads of 12": lambda: one(
        Attention(heads=4, head_dim=12, position=Rope(), mask=Mask(window=6), qk_norm=LayerNorm(bias=False))
    ),
    "soft caps": lambda: one(Attention(heads=4, softcap=2.0)).but(**{"head": Head(softcap=3.0)}),
    "gate, biases, scale": lambda: one(Attention(heads=4, gate=True, bias=True, scale=0.3)),
    "short convolutions": lambda: Decoder(
        V, 64, (Layer(ShortConv(Attention(4, position=Rope()), 3)), Layer(ShortConv(Pointwise(GLU(40)), 4)))
    ),
    "parallel": lambda: one(Attention(4), MLP(40), arrange="parallel", layerscale=0.3),
    "parallel, two norms": lambda: one(Attention(4), MLP(40, activation="gelu"), arrange="parallel_norms"),
    "peri, layerscale": lambda: one(ffn=MLP(40, activation="gelu_tanh"), place="peri", layerscale=0.2),
    "branch, relu2": lambda: one(ffn=GLU(40, activation="relu2"), place="branch", norm=DynamicTanh()),
    "deep, scalenorm": lambda: one(ffn=MLP(40, activation="silu"), place="deep", norm=ScaleNorm()),
    "heads normed as one": lambda: one(Attention(heads=4, kv_heads=2, position=Rope(), qk_norm_all=RMSNorm())),
    "offset gains": lambda: one(norm=OffsetRMSNorm()),
    "no norm before a mixer": lambda: one(mixer_norm=NoNorm()),
    "rows skipped, segments": lambda: one(Attention(4)).but(embed=Embed(position=Learned(100, skip=2), segments=2)),
    "narrow table": lambda: one().but(embed=Embed(width=24, norm=LayerNorm()), head=Head(tied=False)),
    "head scaled": lambda: one().but(head=Head(scaled=True)),
    "biases of an attention, none of its output": lambda: one(Attention(4, bias=True, out_bias=False)),
    "feed-forward with other biases": lambda: Decoder(
        V, 64, (Layer(Attention(4), MLP(40, bias=False)), Layer(Attention(4), GLU(40, bias=True, activation="gelu")))
    ),
    "eps, base": lambda: Decoder(V, 64, (
        Layer(Attention(4, position=Rope(theta=50.0), qk_norm=LayerNorm(0.3)), GLU(40), norm=RMSNorm(0.3)),
        Layer(Attention(4), norm=OffsetRMSNorm(0.3)),
        Layer(Attention(4), norm=ScaleNorm(2.0)),
        Layer(Attention(4), norm=DynamicTanh(alpha=2.0)),
    )),
    "dynamic, as far as it goes": lambda: one(Attention(4, position=Rope(scaling=Dynamic(2.0, original=T)))),
    "sinusoid in halves": lambda: one(Attention(4)).but(embed=Embed(position=Sinusoid(100, layout="halves"))),
    "cross-attention, wide heads, bias, scale": lambda: vaswani(vocab=V, dim=64, depth=1, heads=4, hidden=32).but(
        **{"decoder.layers.0.cross": Cross(heads=4, head_dim=12, bias=True, scale=0.4),
           "encoder.layers.0.mixer": Attention(4, head_dim=12, mask=FULL, gate=True, bias=True, qk_norm=RMSNorm()),
           "encoder.loops": 2, "encoder.head": Head(), "encoder.pooler": True}
    ),
    "two tables of one vocabulary": lambda: vaswani(vocab=V, dim=32, depth=1, heads=2, hidden=32, shared=False),
    "an encoder of one way": lambda: vaswani(vocab=V, dim=32, depth=1, heads=2, hidden=32).but(
        **{"encoder.one_way": True}
    ),
    "what training alone sees": lambda: vaswani(vocab=V, dim=32, depth=1, heads=2, hidden=32, dropout=0.3).but(
        **{f"{side}.layers.0.{part}.{field}": value for field, value in (("dropout", 0.3), ("backend", "reference"))
           for side, part in (("encoder", "mixer"), ("decoder", "mixer"), ("decoder", "cross"))},
        **{"decoder.layers.0.ffn": GLU(40, dropout=0.3), "encoder.layers.0.ffn.dropout": 0.3,
           "decoder.layers.0.mixer.mask": Mask(window=9)}
    ),
    "loops": lambda: one().but(loops=3),
    "table, norm": lambda: one(Attention(4)).but(
        embed=Embed(position=Learned(100), scaled=True, norm=LayerNorm()), head=Head(tied=False, bias=True)
    ),
}  # fmt: skip


def lively(spec: ModelSpec) -> AnyModel:
    """Gains, biases and tables that are not what they start as."""
    model = spec.build().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p) * (p.abs().mean() + 0.1))
    return model


def read(model: AnyModel) -> tuple[Reader, torch.Tensor, list[int], list[int] | None]:
    """The graphs ready to read, our logits of a whole row, the row, its source."""
    made = export_onnx(model, matrix_of)
    ids, source = torch.randint(1, V, (1, T)), None
    with torch.no_grad():
        if isinstance(model, EncoderDecoderModel):
            source = torch.randint(1, V, (1, 11))
            ours = model(source, ids)[0]
            source = source[0].tolist()
        else:
            ours = model(ids)[0]
    return Reader(made.graphs, made.facts(), 1), ours, ids[0].tolist(), source


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_ours(name: str) -> None:
    """A prompt, single tokens past the slots that were asked for, a chunk, and a second row after the first."""
    reader, ours, ids, source = read(lively(SPECS[name]()))
    near = {"rtol": 1e-4, "atol": 1e-4 * float(ours.abs().max())}
    for room in (7, T):
        reader.begin(source, room=room)
        torch.testing.assert_close(reader.feed(ids[:7])[0], ours[6], **near)
        for t in range(7, T - 6):
            torch.testing.assert_close(reader.feed(ids[t : t + 1])[0], ours[t], **near)
        torch.testing.assert_close(reader.feed(ids[T - 6 :])[0], ours[-1], **near)
    assert reader.nbytes > 0


@pytest.mark.parametrize("scheme", [Int8(), Int4(), Int4(group=16, symmetric=False), Int4(group=128)], ids=repr)
@pytest.mark.parametrize("name", ["llama, grouped keys", "vaswani", "heads of 12"])
def test_coded_weights_are_the_same_weights(name: str, scheme: Scheme) -> None:
    """Within what 8 bits of the inputs cost; a wrong nibble, zero point or scale would cost far more."""
    model = lively(SPECS[name]())
    quantize(model, scheme)
    reader, ours, ids, source = read(model)
    reader.begin(source)
    theirs = torch.cat([reader.feed([i]).clone() for i in ids[:20]])
    assert (theirs - ours[:20]).norm() < 0.05 * ours[:20].norm()
    plain = export_onnx(lively(SPECS[name]()), matrix_of, max_len=T)
    small = export_onnx(model, matrix_of, max_len=T)
    assert all(len(small.graphs[side]) < 0.8 * len(plain.graphs[side]) for side in plain.graphs)


def test_inputs_that_were_divided() -> None:
    from brickformer.quant import Calibration

    model = lively(SPECS["llama, grouped keys"]())
    with torch.no_grad():
        model.embed.tokens.weight[:, 3] *= 30.0
    quantize(model, Int4(), Calibration([lambda m: m(torch.randint(0, V, (4, 30)))], "awq"))
    assert any(m.divide is not None for m in model.modules() if hasattr(m, "divide"))
    reader, ours, ids, _ = read(model)
    reader.begin()
    theirs = torch.cat([reader.feed([i]).clone() for i in ids[:20]])
    assert (theirs - ours[:20]).norm() < 0.05 * ours[:20].norm()


def two_way(mixer: Spec) -> EncoderDecoder:
    return vaswani(vocab=V, dim=32, depth=1, heads=2, hidden=32).but(
        **{"encoder.one_way": True, "encoder.layers.0.mixer": mixer}
    )


REFUSED: dict[str, tuple[Callable[[], ModelSpec], str]] = {
    "alibi": (lambda: one(Attention(4, position=Alibi())), "alibi"),
    "lstm": (lambda: one(LSTM()), "lstm"),
    "moe": (lambda: one(ffn=MoE(2, GLU(8))), "moe"),
    "sinks": (lambda: one(Attention(4, sinks=True)), "sinks"),
    "transform": (lambda: one().but(head=Head(transform=Transform())), "transform"),
    "randomized": (lambda: one().but(embed=Embed(randomized=Randomized(200))), "embed.randomized"),
    "a window in an encoder": (lambda: two_way(Attention(2, mask=Mask(causal=False, window=3))), "window"),
    "a soft cap in an encoder": (lambda: two_way(Attention(2, mask=FULL, softcap=2.0)), "soft cap"),
    "past only, in an encoder": (lambda: two_way(Attention(2)), "causal"),
    "a convolution in an encoder": (lambda: two_way(ShortConv(Attention(2, mask=FULL))), "shortconv in an encoder"),
    "values": (lambda: one(Attention(4, value_residual=True)), "value_residual"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_say_is_refused_by_name(name: str) -> None:
    make, what = REFUSED[name]
    with pytest.raises(SpecError, match=f"export: .*{what}.*expected"):
        export_onnx(make().build(), matrix_of)


def test_every_field_of_every_spec_is_decided() -> None:
    """A new field is red here until the graph says it, or it is listed as refused. What is said is tried above with
    another value than its default, each choice of a literal in one of its places."""
    refused = {Attention: {"sinks", "value_residual"}, Embed: {"randomized"}, Head: {"transform"}}
    tried: dict[tuple[type[Spec], str], set[object]] = {}
    chosen: dict[tuple[object, ...], set[object]] = {}
    for make in SPECS.values():
        for part in make().parts():
            for field in fields_of(type(part)):
                tried.setdefault((type(part), field), set()).add(getattr(part, field))
    for kind, said in SAID.items():
        quiet = QUIET.get(kind, frozenset())
        assert not said & quiet
        assert fields_of(kind).keys() == said | quiet | refused.get(kind, set()), kind
        for f in dataclasses.fields(kind):
            if f.name in said | quiet:
                values = tried.get((kind, f.name), set())
                assert values - {f.default}, f"{kind.kind}.{f.name} is never tried"
                if get_origin(fields_of(kind)[f.name]) is Literal and f.name in said:
                    chosen.setdefault(get_args(fields_of(kind)[f.name]), set()).update(values)
    assert all(set(choices) == values for choices, values in chosen.items()), chosen
    assert QUIET.keys() <= SAID.keys()


def test_a_field_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = {**SAID, Attention: SAID[Attention] - {"softcap"}}
    monkeypatch.setattr("brickformer.export.fields.SAID", fewer)
    export_onnx(one(Attention(4)).build(), matrix_of)
    with pytest.raises(SpecError, match=r"export: attention.softcap=2.0 cannot be written .* expected None"):
        export_onnx(one(Attention(4, softcap=2.0)).build(), matrix_of)


def test_each_side_has_its_own_end() -> None:
    spec = vaswani(vocab=V, dim=32, depth=1, heads=2, hidden=32, max_len=90).but(
        **{"encoder.embed.position.max_len": 20, "encoder.layers.0.mixer.position": Rope(scaling=Dynamic(2.0, 12))}
    )
    reader, *_ = read(lively(spec))
    assert (reader.max_source, reader.max_len) == (12, 90)
    with pytest.raises(StateError, match="reads 12 positions of a source; got 13 tokens"):
        reader.begin(list(range(1, 14)))


def test_what_is_refused_leaves_the_row_as_it_was() -> None:
    reader, ours, ids, source = read(lively(SPECS["vaswani"]()))
    near = {"rtol": 1e-4, "atol": 1e-4 * float(ours.abs().max())}
    reader.begin(source)
    with pytest.raises(StateError, match="no token to read; expected at least one"):
        reader.feed([])
    reader.feed(ids[:5])
    with pytest.raises(StateError, match="reads 100 positions of a source; got 101 tokens"):
        reader.begin([1] * 101)
    with pytest.raises(StateError, match="no token"):
        reader.feed([])
    with pytest.raises(StateError, match="asked for token 106"):
        reader.feed([1] * 101)
    torch.testing.assert_close(reader.feed(ids[5:70])[0], ours[69], **near)
    torch.testing.assert_close(reader.feed(ids[70:71])[0], ours[70], **near)


def test_caches_end_where_positions_do() -> None:
    """Asked for twice as many, and grown by doubling: slots past the last position would never be filled."""
    reader, ours, ids, _ = read(lively(SPECS["gpt2"]()))
    reader.begin(room=200)
    most = reader.nbytes
    reader.begin(room=64)
    assert reader.nbytes * 100 == most * 64
    for token in ids:
        logits = reader.feed([token])
    assert reader.nbytes == most
    torch.testing.assert_close(logits[0], ours[-1], rtol=1e-4, atol=1e-4 * float(ours.abs().max()))


def test_a_graph_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = export_onnx(lively(one()), matrix_of)

    class Full:
        def __getattr__(self, name: str) -> object:
            if name == "InferenceSession":
                raise MemoryError
            return lambda: self

    monkeypatch.setattr("brickformer.export.engine.runtime", Full)
    with pytest.raises(RunError, match="cannot be loaded: MemoryError"):
        Reader(made.graphs, made.facts(), 1)


@pytest.mark.parametrize("name", ["vaswani", "window"])
def test_prompts_are_compared_too(name: str) -> None:
    """Several tokens at once go through other code of a kernel than one."""
    model = lively(SPECS[name]())
    reader, *_ = read(model)
    right = compare(model, reader)
    assert right.gap < 1e-3 and right.same == right.tokens == 32

    class Off:
        max_len, max_source, begin = reader.max_len, reader.max_source, reader.begin

        def feed(self, ids: list[int]) -> torch.Tensor:
            return reader.feed(ids) + (len(ids) > 1)

    assert 0.9 < compare(model, Off()).gap < 1.1  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama, grouped keys", "vaswani"])
def test_answers_are_those_of_our_engine(name: str) -> None:
    """Rows one after another, several samples, drawn and not; also where the graph's positions end."""
    model = lively(SPECS[name]())
    made = export_onnx(model, matrix_of, max_len=30)
    engine = Onnx(Reader(made.graphs, made.facts(), 1), "float32")
    start = [0] if isinstance(model, EncoderDecoderModel) else []
    writer = Writer(model, start=start, max_len=30)
    prompts = [[3], list(range(1, 12)), [5, 4]]
    for sampling in (Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=4), Sampling(repetition=1.4, banned=(1,))):
        ours = generate(writer, prompts, sampling, Stop(max_tokens=50), samples=2)
        theirs = engine.generate(Writer(model, start=start), prompts, sampling, Stop(max_tokens=50), samples=2)
        for a, b in zip(ours.results, theirs.results, strict=True):
            assert (a.prompt, a.sample, a.tokens, a.finish) == (b.prompt, b.sample, b.tokens, b.finish)
            assert a.finish == "length" and b.error is None
            assert b.logprobs == pytest.approx(a.logprobs, abs=1e-3)
    (long,) = engine.generate(Writer(model, start=[0] * 31), [[1]], Sampling(), Stop()).results if start else (
        engine.generate(Writer(model), [[1] * 31], Sampling(), Stop()).results
    )  # fmt: skip
    assert long.finish == "error" and "asked for token 31" in str(long.error)
    with pytest.raises(BrickError, match="samples=0"):
        engine.generate(writer, prompts, Sampling(), Stop(), samples=0)
    with pytest.raises(BrickError, match="expected a list of prompts"):
        engine.generate(writer, "one text", Sampling(), Stop())


def test_other_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively(SPECS["gpt2"]())
    with pytest.raises(SpecError, match="an encoder alone"):
        export_onnx(vaswani(vocab=V, dim=8, depth=1, heads=2, hidden=8).encoder.build(), matrix_of)
    reader, _, ids, _ = read(model)
    reader.begin()
    reader.feed(ids)
    with pytest.raises(StateError, match="has 100 positions; asked for token 101"):
        reader.feed(ids[:21])
    with pytest.raises(RunError, match="cannot be loaded"):
        Reader({"decoder": b"nonsense"}, export_onnx(model, matrix_of).facts(), 1)
    quantize(model, NF4())
    with pytest.raises(SpecError, match="nf4 cannot be written"):
        export_onnx(model, matrix_of)
    monkeypatch.setattr("brickformer.export.graph.LIMIT", 1000)
    with pytest.raises(BrickError, match="at most .* in one graph. Export it with --bits 4"):
        export_onnx(one().build(), matrix_of)


def test_a_constant_stands_in_a_graph_once() -> None:
    graph = Graph()
    assert graph.ints(1, 2) == graph.ints(1, 2) != graph.ints(12) and len(graph.weights) == 2
    made = lively(SPECS["loops"]())
    three, once = (len(export_onnx(m, matrix_of).graphs["decoder"]) for m in (made, lively(one())))
    assert three < 1.1 * once, "weights that are met again"
