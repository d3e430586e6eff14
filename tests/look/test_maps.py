"""What is looked at, against the formula written out and against the models' own arithmetic.

A map must be the one that attention used: multiplied with the values it gives what the layer gave. It must not depend
on how the text was read: at once, through a cache, a ring, left padded, or row by row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from brickformer import (
    GLU,
    MLP,
    Alibi,
    Attention,
    Cross,
    Decoder,
    DecoderModel,
    Encoder,
    EncoderDecoder,
    Layer,
    Mask,
    Rope,
    Span,
    pattern,
)
from brickformer.attend import Attend
from brickformer.errors import DataError
from brickformer.look import Pick, Watch, attention
from brickformer.look import hidden as hidden_module
from brickformer.look import maps as maps_module
from brickformer.look import watch as watch_module
from brickformer.look.hidden import hidden_attention, looked_at
from brickformer.look.influence import influence
from brickformer.mixers.base import Mixer, MixerSpec
from brickformer.mixers.delta import GatedDelta
from brickformer.mixers.differential import DifferentialAttention
from brickformer.mixers.latent import LatentAttention
from brickformer.mixers.lstm import LSTM
from brickformer.mixers.mamba import Mamba
from brickformer.mixers.mamba2 import Mamba2
from brickformer.mixers.pointwise import Pointwise
from brickformer.norms import RMSNorm

VOCAB, DIM, TEXT = 17, 24, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
SIGHTED: dict[str, MixerSpec] = {
    "plain": Attention(heads=4),
    "grouped, rotary, window": Attention(heads=4, kv_heads=2, position=Rope(), mask=Mask(window=4)),
    "alibi, cap, sinks": Attention(heads=4, position=Alibi(), softcap=5.0, sinks=True),
    "latent": LatentAttention(heads=2, rank=6, rope_dim=4, head_dim=8),
    "differential": DifferentialAttention(heads=2),
}


def decoder(*mixers: MixerSpec) -> DecoderModel:
    """A layer for each mixer, its weights shaken so that no map is even."""
    model = Decoder(VOCAB, DIM, tuple(Layer(m, GLU(16)) for m in mixers)).build().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.fixture
def seen_by_attend(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """What every call of attention gave, and its values: (out, v)."""
    calls: list[tuple[Tensor, Tensor]] = []
    forward = Attend.forward

    def spied(self: Attend, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
        out = forward(self, q, k, v, *rest)
        calls.append((out, v))
        return out

    monkeypatch.setattr(Attend, "forward", spied)
    return calls  # type: ignore[return-value]


@pytest.mark.parametrize("name", SIGHTED)
@pytest.mark.parametrize("tile", [1, 7, 2**22])
def test_the_map_times_the_values_is_what_the_layer_gave(
    name: str, tile: int, seen_by_attend: list[tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps_module, "TILE", tile)
    model = decoder(SIGHTED[name])
    with torch.no_grad(), Watch(model) as watch:
        model(torch.tensor([TEXT]))
    (seen,) = watch.maps()
    out, v = seen_by_attend[-1]
    v = v.repeat_interleave(seen.heads // v.shape[1], 1)[0]
    torch.testing.assert_close(seen.weights @ v, out[0], rtol=1e-4, atol=1e-5)
    assert seen.rows == seen.keys == range(len(TEXT))


def cached(model: DecoderModel, watch: Watch, chunks: list[int]) -> None:
    state = model.init_state(1, len(TEXT))
    with torch.inference_mode(), watch:
        first = 0
        for n in chunks:
            model(torch.tensor([TEXT[first : first + n]]), None, state)
            first += n


@pytest.mark.parametrize("name", SIGHTED)
@pytest.mark.parametrize("chunks", [[10], [1] * 10, [4, 1, 1, 3, 1]], ids=str)
def test_a_cache_or_a_ring_gives_the_same_map(name: str, chunks: list[int]) -> None:
    model = decoder(SIGHTED[name])
    with torch.no_grad(), Watch(model, tokens=TEXT) as whole:
        model(torch.tensor([TEXT]))
    parts = Watch(model, tokens=TEXT)
    cached(model, parts, chunks)
    (a,), (b,) = whole.maps(), parts.maps()
    torch.testing.assert_close(b.weights, a.weights, rtol=1e-4, atol=1e-5)
    for one, other in zip(a.stats, b.stats, strict=True):
        for field in ("entropy", "distance", "first", "previous", "same_token", "diagonal"):
            assert getattr(one, field) == pytest.approx(getattr(other, field), rel=1e-3, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_padding_is_nobody(side: str) -> None:
    model = decoder(Attention(heads=4, position=Rope()), Mamba(state=4), GatedDelta(heads=2), LSTM())
    valid = torch.ones(2, 13, dtype=torch.bool)
    holes = {"left": [0, 1, 2], "right": [10, 11, 12], "between": [2, 5, 6]}[side]
    valid[1, holes] = False
    ids = torch.randint(VOCAB, (2, 13))
    ids[1, valid[1]] = torch.tensor(TEXT)
    with torch.no_grad(), Watch(model, Pick(batch=1)) as padded:
        model(ids, Span.of(ids, valid=valid))
    with torch.no_grad(), Watch(model) as alone:
        model(torch.tensor([TEXT]))
    for a, b in zip(padded.maps(), alone.maps(), strict=True):
        torch.testing.assert_close(a.weights, b.weights, rtol=1e-3, atol=1e-4)


def test_rows_and_layers_are_only_those_asked_for() -> None:
    model = decoder(*SIGHTED.values())
    with torch.no_grad(), Watch(model) as everything:
        model(torch.tensor([TEXT]))
    pick = Pick(rows=(3, 7), only=("stack.layers.1",))
    with torch.no_grad(), Watch(model, pick) as some:
        model(torch.tensor([TEXT]))
    (seen,) = some.maps()
    assert seen.name == "stack.layers.1.mixer" and seen.rows == seen.keys == range(3, 7)
    torch.testing.assert_close(seen.weights, everything.maps()[1].weights[:, 3:7, 3:7])


@pytest.mark.parametrize("name", ["grouped, rotary, window", "alibi, cap, sinks"])
def test_heads_are_only_those_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(SIGHTED[name], Mamba2(head_dim=8, state=6))
    with torch.no_grad(), Watch(model) as everything:
        model(torch.tensor([TEXT]))
    made, weights = 0, Attend.weights

    def watched(self: Attend, *args: object) -> Tensor:
        nonlocal made
        out = weights(self, *args)  # type: ignore[arg-type]
        made += out.shape[1]
        return out

    monkeypatch.setattr(Attend, "weights", watched)
    pick = Pick(only=("stack.layers.0:2,4", "stack.layers.1.mixer:3"))
    with torch.no_grad(), Watch(model, pick) as some:
        model(torch.tensor([TEXT]))
    assert made == 2, "no other head is computed"
    for seen, whole, heads in zip(some.maps(), everything.maps(), ([1, 3], [2]), strict=True):
        assert seen.labels == [str(h + 1) for h in heads] and list(seen.places) == heads
        torch.testing.assert_close(seen.weights, whole.weights[heads])
        assert [s.entropy for s in seen.stats] == pytest.approx([whole.stats[h].entropy for h in heads])


def test_nothing_large_is_made_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """2000 tokens, 4 heads: 16 M weights in all; no single call makes more than TILE of them."""
    monkeypatch.setattr(maps_module, "TILE", 2**16)
    most, weights = 0, Attend.weights

    def watched(self: Attend, *args: object) -> Tensor:
        nonlocal most
        made = weights(self, *args)  # type: ignore[arg-type]
        most = max(most, made.numel())
        return made

    monkeypatch.setattr(Attend, "weights", watched)
    model = decoder(Attention(heads=4, position=Rope()))
    view = attention(model, [t % VOCAB for t in range(2000)], rows=(1900, 2000), remove=False)
    assert 0 < most <= 2**16
    assert view.maps[0].weights.shape == (4, 100, 100)
    assert [en for en, _ in view.left_out] == ["Left out: tokens 0 to 1899 of 2000."]


def translator() -> EncoderDecoder:
    return EncoderDecoder(
        Encoder(VOCAB, DIM, pattern([Layer(Attention(heads=2, mask=Mask(causal=False)), MLP(16))], 2)),
        Decoder(VOCAB, DIM, pattern([Layer(Attention(heads=2), MLP(16), cross=Cross(heads=2))], 1)),
    )


def test_cross_attention_is_told_by_its_sides(seen_by_attend: list[tuple[Tensor, Tensor]]) -> None:
    model = translator().build().eval()
    view = attention(model, [1, 2, 3], source=TEXT, remove=False)
    sides = [(m.name, m.kind, m.side, m.key_side, tuple(m.weights.shape)) for m in view.maps]
    assert sides == [
        ("encoder.stack.layers.0.mixer", "self", "source", "source", (2, 10, 10)),
        ("encoder.stack.layers.1.mixer", "self", "source", "source", (2, 10, 10)),
        ("decoder.stack.layers.0.mixer", "self", "target", "target", (2, 3, 3)),
        ("decoder.stack.layers.0.cross", "cross", "target", "source", (2, 3, 10)),
    ]


def test_a_loop_gives_a_map_a_turn() -> None:
    model = Decoder(VOCAB, DIM, (Layer(Attention(heads=2), GLU(16)),), loops=3).build().eval()
    names = [m.name for m in attention(model, TEXT).maps]
    assert names == [f"stack.layers.0.mixer ({i} of 3)" for i in (1, 2, 3)]
    watch = Watch(model)
    cached(model, watch, [6, 1, 1, 1, 1])
    for a, b in zip(watch.maps(), attention(model, TEXT).maps, strict=True):
        torch.testing.assert_close(a.weights, b.weights, rtol=1e-4, atol=1e-5)


# ---- mixers without attention


@pytest.mark.parametrize(
    "spec",
    [
        Mamba(state=4),
        Mamba(state=4, inner_norm=RMSNorm()),
        Mamba2(head_dim=8, state=6, groups=2),
        GatedDelta(heads=2, value_heads=4),
    ],
    ids=["mamba", "mamba, normed", "mamba2", "gated_delta"],
)
def test_hidden_attention_is_the_derivative_of_what_the_scan_reads(
    spec: MixerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """y is linear in the values that are scanned: α is ∂y/∂value. The scan itself is asked, by autograd."""
    import brickformer.mixers.delta as delta
    import brickformer.mixers.mamba as mamba
    import brickformer.mixers.mamba2 as mamba2

    mixer = spec.build(16).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    alpha = hidden_attention(mixer, x)  # type: ignore[arg-type]
    found: list[Tensor] = []
    given: list[tuple[Tensor, Tensor]] = []  # what was scanned, what the scan gave: (H, T, P)

    def asked(y: Tensor, values: Tensor) -> None:  # (1, T, H, P) or (1, T, I): channel 0 of each head
        heads = y.shape[2]
        for h in range(heads):
            rows = []
            for t in range(9):
                target = y[0, t, h] if y.ndim == 3 else y[0, t, h, 0]
                (g,) = torch.autograd.grad(target, values, retain_graph=True)
                rows.append(g[0, :, h] if y.ndim == 3 else g[0, :, h, 0])
            found.append(torch.stack(rows))

    scan, ssd, rule = mamba.selective_scan, mamba2.ssd, delta.gated_delta_rule

    def of_mamba(dt: Tensor, u: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        u = u.detach().requires_grad_()
        y, h = scan(dt.detach(), u, *rest)
        asked(y, u)
        given.append((u[0].t()[..., None], y[0].t()[..., None]))
        return y, h

    def of_mamba2(dt: Tensor, u: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        u = u.detach().requires_grad_()
        y, h = ssd(dt.detach(), u, *rest)
        asked(y, u)
        given.append((u[0].transpose(0, 1), y[0].transpose(0, 1)))
        return y, h

    def of_delta(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        v = v.detach().requires_grad_()
        y, h = rule(q, k, v, *rest)
        asked(y, v)
        given.append((v[0].transpose(0, 1), y[0].transpose(0, 1)))
        return y, h

    monkeypatch.setattr(mamba, "selective_scan", of_mamba)
    monkeypatch.setattr(mamba2, "ssd", of_mamba2)
    monkeypatch.setattr(delta, "gated_delta_rule", of_delta)
    mixer(x, Span(0, 9))
    torch.testing.assert_close(alpha.detach(), torch.stack(found), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(alpha.detach() @ given[0][0], given[0][1], rtol=1e-8, atol=1e-10)


def all_of(mixer: Mixer, x: Tensor, rows: Tensor) -> Tensor:
    """What is looked at, its parts put in their places."""
    found = [(some, weights.clone()) for some, weights in looked_at(mixer, x, rows)]
    assert torch.equal(torch.cat([some for some, _ in found]), rows), "every row once"
    return torch.cat([weights for _, weights in found], 1)


@pytest.mark.parametrize(
    "spec",
    [Mamba(state=4), Mamba2(head_dim=8, state=6, groups=2), GatedDelta(heads=2, value_heads=4), LSTM(hidden=12)],
    ids=lambda s: s.kind,
)
def test_some_rows_of_a_long_text_are_those_of_the_whole(spec: MixerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, rows = 200, torch.tensor([3, 63, 64, 65, 128, 199])
    mixer, x = spec.build(16), torch.randn(1, tokens, 16)
    with torch.no_grad():
        whole = all_of(mixer, x, torch.arange(tokens))
        monkeypatch.setattr(hidden_module, "NUMBERS", 2**11)
        some = all_of(mixer, x, rows)
    torch.testing.assert_close(some, whole[:, rows], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [[66, 0, 64, 64, 3], []], ids=["any order", "none"])
@pytest.mark.parametrize(
    "spec", [Mamba(state=4), Mamba2(head_dim=8, state=6), GatedDelta(heads=2)], ids=lambda s: s.kind
)
def test_rows_are_asked_in_any_order_more_than_once_or_not_at_all(spec: MixerSpec, rows: list[int]) -> None:
    mixer, x, asked = spec.build(16), torch.randn(1, 67, 16), torch.tensor(rows, dtype=torch.long)
    with torch.no_grad():
        some, whole = (hidden_attention(mixer, x, r) for r in (asked, None))  # type: ignore[arg-type]
    torch.testing.assert_close(some, whole[:, asked], rtol=1e-4, atol=1e-6)


LONG: dict[str, MixerSpec] = {
    "plain": Attention(heads=2),
    "window": Attention(heads=2, mask=Mask(window=100)),
    "latent": LatentAttention(heads=2, rank=6, rope_dim=4, head_dim=8),
    "mamba": Mamba(state=4),
    "mamba2": Mamba2(head_dim=24, state=6),
    "gated delta": GatedDelta(heads=2),
    "lstm": LSTM(),
}


@pytest.mark.parametrize("name", [*LONG, "cross"])
def test_no_large_tensor_is_made_of_a_long_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 tokens, 384 of them shown: 384 k weights a head, computed 64 k at a time."""
    tokens = 1000
    monkeypatch.setattr(maps_module, "TILE", 2**16)
    monkeypatch.setattr(hidden_module, "NUMBERS", 2**16)
    text = [t % VOCAB for t in range(tokens)]
    spec = translator() if name == "cross" else Decoder(VOCAB, DIM, (Layer(LONG[name], GLU(16)),))
    model = spec.build().eval()
    with Largest() as largest:
        found = attention(model, text, source=text if name == "cross" else None, remove=False).maps
    assert found[0].weights.shape[1:] == (384, 384)
    shown = found[0].weights.numel()  # the result itself
    assert largest.numbers <= max(shown, 2**18), "neither all by all nor all that was asked for at once"


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made meanwhile."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("both", [False, True])
def test_influence_is_what_autograd_says_of_the_same_directions(both: bool) -> None:
    mixer = LSTM(hidden=12, bidirectional=both).build(8).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    directions = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double()
    jacobian = torch.autograd.functional.jacobian(lambda z: mixer(z, Span(0, 6)), x)[0, :, :, 0]  # (T, D, T, D)
    exact = torch.einsum("ud,tdsx->utsx", directions, jacobian).square().sum(-1).mean(0).sqrt()
    torch.testing.assert_close(influence(mixer, x), exact, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(influence(mixer, x, torch.tensor([4, 1])), exact[[4, 1]], rtol=1e-9, atol=1e-12)


def test_influence_is_the_size_of_the_jacobian() -> None:
    mixer = LSTM(hidden=12).build(8).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda z: mixer(z, Span(0, 6)), x)[0, :, :, 0]  # (T, D, T, D)
    exact = jacobian.square().sum((1, 3)).sqrt()
    found = influence(mixer, x)
    assert torch.equal(found > 0, exact > 0), "what cannot move an output has no influence"
    assert float((found.log() - exact.log())[exact > 0].std()) < 0.5, "eight directions tell the size to a factor"


def test_a_summary_that_goes_on_is_said_and_not_guessed() -> None:
    model = decoder(Mamba(state=4), Attention(heads=2))
    watch = Watch(model)
    cached(model, watch, [6, 1, 1, 1, 1])
    assert watch.unknown == ["stack.layers.0.mixer"]
    mamba, plain = watch.maps()
    assert mamba.rows == range(6) and plain.rows == range(10)


# ---- what cannot be looked at


def test_no_attention_at_all() -> None:
    model = decoder(Pointwise(GLU(16)))
    with pytest.raises(DataError, match="no attention and no mixer"):
        attention(model, TEXT)


def test_rows_that_are_not_there() -> None:
    model = decoder(Attention(heads=2))
    with pytest.raises(DataError, match=r"got tokens 50:60, expected a part of 0:10"):
        attention(model, TEXT, rows=(50, 60))
    with pytest.raises(DataError, match="no tokens"):
        attention(model, [])
    with pytest.raises(DataError, match="reads a source"):
        attention(translator().build(), TEXT)


def test_a_model_of_nan_is_said() -> None:
    model = decoder(Attention(heads=2))
    with torch.no_grad():
        model.stack.layers[0].mixer.qkv.weight.fill_(math.nan)
    with pytest.raises(DataError, match=r"stack\.layers\.0\.mixer: its weights are not finite"):
        attention(model, TEXT)


@pytest.mark.parametrize("inference", [False, True])
def test_no_graph_is_kept_while_a_scan_is_asked(inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters want gradients: a graph of all tiles would hold on to every tile."""
    kept: list[bool] = []

    def asked(*args: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for some, weights in looked_at(*args):
            kept.append(weights.requires_grad or weights.grad_fn is not None)
            yield some, weights

    monkeypatch.setattr(watch_module, "looked_at", asked)
    model = decoder(Mamba(state=4), Mamba2(head_dim=8, state=6), GatedDelta(heads=2), LSTM())
    with torch.inference_mode(inference), Watch(model) as watch:
        model(torch.tensor([TEXT]))
    assert len(watch.maps()) == 4 and kept == [False] * 4


def test_the_influence_of_an_lstm_is_seen_under_inference_mode() -> None:
    model = decoder(LSTM())
    with torch.inference_mode(), Watch(model) as watch:
        model(torch.tensor([TEXT]))
    torch.testing.assert_close(watch.maps()[0].weights, attention(model, TEXT, remove=False).maps[0].weights)


def test_the_model_is_left_as_it_was() -> None:
    model = decoder(Attention(heads=2, dropout=0.1), Mamba(state=4)).train()
    attention(model, TEXT)
    assert model.training
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_every_map_sums_to_one() -> None:
    model = decoder(Attention(heads=2), Mamba(state=4), Mamba2(head_dim=8, state=6), GatedDelta(heads=2), LSTM())
    for m in attention(model, TEXT, remove=False).maps:
        torch.testing.assert_close(m.weights.sum(-1), torch.ones(m.heads, len(TEXT)))
        assert not bool(m.weights.triu(1).any()), "nobody looks ahead"
        assert math.isfinite(m.stats[0].entropy)


def test_nn_modules_are_not_our_business_here() -> None:
    with pytest.raises(DataError), Watch(nn.Linear(2, 2)) as watch:
        watch.maps()
