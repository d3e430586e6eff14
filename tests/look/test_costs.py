"""Costs: every formula against torch's own counter, and cache bytes against the states themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from brickformer.attend import Attend
from brickformer.embed import Head
from brickformer.feedforward import GLU, MLP, FeedForward
from brickformer.layers import Layer, pattern
from brickformer.look.costs import cost
from brickformer.look.tree import table, tree
from brickformer.mask import FULL, Mask, Span
from brickformer.mixers.attention import Attention
from brickformer.mixers.delta import GatedDelta
from brickformer.mixers.differential import DifferentialAttention
from brickformer.mixers.latent import LatentAttention
from brickformer.mixers.lstm import LSTM
from brickformer.mixers.mamba import Mamba
from brickformer.mixers.mamba2 import Mamba2
from brickformer.mixers.shortconv import ShortConv
from brickformer.models import Decoder, DecoderModel, Encoder
from brickformer.moe import MoE, MoEFeedForward, Router
from brickformer.norms import RMSNorm
from brickformer.positions import Rope
from brickformer.presets import bert, gpt2, llama, vaswani
from brickformer.shapes import shapes_of

T, V, D = 24, 50, 32
LAYERS = {
    "multi-head": Layer(Attention(4, bias=True), MLP(48)),
    "grouped": Layer(Attention(4, kv_heads=2, position=Rope(), qk_norm=RMSNorm()), GLU(40), place="peri"),
    "multi-query": Layer(Attention(4, kv_heads=1, head_dim=16), GLU(40), arrange="parallel"),
    "value residual": Layer(Attention(4, kv_heads=2, value_residual=True), GLU(40), arrange="parallel_norms"),
    "window": Layer(Attention(4, mask=Mask(window=5)), MLP(48, bias=False)),
    "experts": Layer(Attention(4), MoE(6, GLU(24), router=Router(top_k=2), shared=MLP(16))),
}


def counted(run: object, *args: object) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run(*args)  # type: ignore[operator]
    return counter.get_total_flops()


def on_meta(spec: Decoder) -> DecoderModel:
    model = shapes_of(spec)  # there the counter also sees the fused attention kernels
    assert isinstance(model, DecoderModel)
    return model.eval()


@pytest.mark.parametrize("name", [n for n in LAYERS if n not in ("window", "experts")])
def test_reading_a_text_costs_what_the_counter_counts(name: str) -> None:
    model = on_meta(Decoder(V, D, pattern([LAYERS[name]], 3), head=Head(tied=False, bias=True)))
    ids = torch.zeros(2, T, dtype=torch.long, device="meta")
    assert counted(model, ids) == 2 * T * cost(model, T, D).flops


@pytest.mark.parametrize("name", LAYERS)
def test_a_decode_step_costs_what_the_counter_counts(name: str) -> None:
    """One token after T - 1 others: also where a window keeps only the last keys, and where experts are chosen."""
    spec = Decoder(V, D, pattern([LAYERS[name]], 2))
    model = on_meta(spec)
    if name == "experts":  # choosing them needs real numbers; there the counter sees only the formula written out
        model = spec.but(**{"layers.*.mixer.backend": "reference"}).build().eval()
    state = model.init_state(1, T)
    ids = torch.zeros(1, T, dtype=torch.long, device=model.head.project.weight.device)
    with torch.no_grad():
        for i in range(T - 1):
            model(ids[:, i : i + 1], None, state)
    assert counted(model, ids[:, :1], None, state) == cost(model, T, D).flops


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "value residual"])  # the stack asks its first layer twice
def test_every_brick_costs_what_the_counter_says_of_it(name: str) -> None:
    layer = LAYERS[name].but(**{"mixer.backend": "reference", "mixer.mask": Mask()})
    model = Decoder(V, D, (layer,)).build().eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(0, V, (1, T)))
    counts = {where: sum(by_kind.values()) for where, by_kind in counter.get_flop_counts().items()}
    for name, module in model.named_modules():
        inside_experts = ".experts" in name or ".attend" in name
        if name and not inside_experts and isinstance(module, nn.Linear | FeedForward | MoEFeedForward):
            assert counts[f"DecoderModel.{name}"] == T * cost(module, T, D).flops, name


def test_an_encoder_with_a_window_meets_the_keys_on_both_sides() -> None:
    spec = Encoder(V, D, (Layer(Attention(4, mask=Mask(causal=False, window=3)), MLP(48)),))
    narrow, wide = shapes_of(spec), shapes_of(spec.but(**{"layers.0.mixer.mask": FULL}))
    assert cost(wide, T, D).flops - cost(narrow, T, D).flops == 4 * D * (T - 5)


def test_reading_and_writing_are_told_apart() -> None:
    """Source: encoder, and keys and values once. Target: the decoder without them."""
    model = shapes_of(vaswani(vocab=V, dim=D, depth=2, heads=4)).eval()
    src = tgt = torch.zeros(1, T, dtype=torch.long, device="meta")
    read, write = cost(model.encoder, T, D), cost(model.decoder, T, D)
    assert counted(model, src, tgt) == T * (read.flops + write.source_flops + write.flops)
    assert counted(model.encode, src) == T * read.flops
    assert write.source_flops == 2 * 2 * D * 2 * D


@pytest.mark.parametrize(
    "spec",
    [
        gpt2(vocab=V, dim=D, depth=3, heads=4, max_len=2 * T),
        llama(vocab=V, dim=D, depth=2, heads=4, kv_heads=2),
        vaswani(vocab=V, dim=D, depth=2, heads=4),
    ],
    ids=lambda s: s.kind,
)
def test_cache_bytes_are_those_of_the_state(spec: Decoder) -> None:
    """Beside keys and values a state notes each token's position, 8 bytes a layer."""
    model = spec.build()
    layers = len(model.init_state(1, 1).layers)
    grown = model.init_state(1, T + 1).nbytes - model.init_state(1, T).nbytes
    decoder = model if isinstance(model, DecoderModel) else model.decoder
    assert grown == cost(decoder, T, D).kv_bytes + 8 * layers
    half = decoder.to(torch.bfloat16)
    assert cost(half, T, D).kv_bytes * 2 == grown - 8 * layers


def test_the_memory_kept_for_the_decoder_is_counted_once_a_source_token() -> None:
    model = vaswani(vocab=V, dim=D, depth=2, heads=4).build()
    state = model.init_state(1, 4)
    empty = state.nbytes
    model.decode(torch.zeros(1, 1, dtype=torch.long), model.encode(torch.zeros(1, T, dtype=torch.long)), state=state)
    assert state.nbytes - empty == T * cost(model.decoder, T, D).source_kv_bytes


def test_an_encoder_keeps_nothing() -> None:
    assert cost(shapes_of(bert(vocab=V, dim=D, depth=1, heads=4)), T, D).kv_bytes == 0


MIXERS = {
    "latent": LatentAttention(4, 8, 4),
    "latent, window": LatentAttention(4, 8, 4, mask=Mask(window=5)),
    "differential": DifferentialAttention(4),
    "mamba": Mamba(4),
    "mamba2": Mamba2(head_dim=8, state=4),
    "delta": GatedDelta(4),
    "lstm": LSTM(hidden=24),
    "convolved": ShortConv(LatentAttention(4, 8, 4)),
}


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_costs_what_its_last_token_costs_and_keeps_what_its_state_grows_by(name: str) -> None:
    """Not the mean over the row: reading all at once takes other forms (chunks, unpacked keys, one kernel)."""
    mixer = MIXERS[name].build(D).eval()
    for module in mixer.modules():
        if isinstance(module, Attend):
            module.backend = "reference"  # of which the counter sees the products, also on a CPU
    x, at = torch.randn(1, T, D), {"device": torch.device("cpu"), "dtype": torch.float32}
    state = mixer.init_state(1, T, **at)
    with torch.no_grad():
        for i in range(T - 1):
            mixer(x[:, i : i + 1], Span(i, 1), state)
    got = cost(mixer, T, D)
    assert got.known and got.flops == counted(mixer, x[:, -1:], Span(T - 1, 1), state) > 0
    one, two = (mixer.init_state(1, n, **at) for n in (1, 2))
    grown = two.nbytes - one.nbytes
    positions = 8 if grown else 0  # a cache notes where each token is
    assert got.kv_bytes == grown - positions


def test_an_lstm_that_reads_both_ways_costs_two() -> None:
    one, two = (cost(LSTM(hidden=24, bidirectional=both).build(D), T, D).flops for both in (False, True))
    assert one == 2 * 4 * 24 * (D + 24) + 2 * 24 * D and two == 2 * one


class Doubled(FeedForward):
    """A brick of somebody's own: a product that no formula here knows of."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.into, self.mix = nn.Linear(dim, dim, bias=False), nn.Parameter(torch.ones(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.into(x) @ self.mix


class Fussy(Doubled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not here")


def test_a_brick_without_a_formula_is_measured() -> None:
    assert cost(Doubled(D), T, D).flops == 2 * 2 * D * D
    unknown = cost(Fussy(D), T, D)
    assert not unknown.known
    assert not cost(nn.Sequential(Fussy(D), nn.Linear(D, D)), T, D).known


# ---- the table


def rows(spec: Decoder | Encoder, width: int = 100) -> list[str]:
    return table(tree(shapes_of(spec), T, spec.dim, spec.kind), width)


def test_layers_that_are_alike_are_one_row_and_their_sum_is_the_models() -> None:
    a, b = Layer(Attention(4), MLP(48)), Layer(Attention(4, kv_heads=2), MLP(48))
    for layers, names in (
        (pattern([a], 4), ["layers.0-3"]),
        (pattern([a, b], 4), ["layers.0,2", "layers.1,3"]),
        ((a, a, b), ["layers.0,1", "layers.2"]),
    ):
        text = rows(Decoder(V, D, layers))
        found = [word for line in text for word in line.split() if word.startswith("layers.")]
        assert found == names
    root = tree(shapes_of(Decoder(V, D, pattern([a, b], 6))), T, D, "decoder")
    stack = next(p for p in root.parts if p.name == "stack")
    assert stack.params == sum(p.params * p.times for p in stack.parts)
    assert stack.cost.flops == sum(p.cost.flops * p.times for p in stack.parts)


def test_parts_of_attention_add_up_to_it() -> None:
    root = tree(shapes_of(Decoder(V, D, (LAYERS["grouped"],))), T, D, "decoder")
    mixer = root.parts[1].parts[0].parts[0]
    assert mixer.name == "mixer" and sum(p.cost.flops for p in mixer.parts) == mixer.cost.flops
    assert next(p for p in mixer.parts if p.attends).cost.flops == 4 * D * T


def test_a_tied_head_is_counted_once_and_says_so() -> None:
    tied, untied = (
        next(line for line in rows(Decoder(V, D, (LAYERS["grouped"],), head=Head(tied=t))) if "head.project" in line)
        for t in (True, False)
    )
    assert "tied" in tied and f"{V * D:,}" not in tied
    assert "tied" not in untied and f"{V * D:,}" in untied


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_wider_than_asked(width: int) -> None:
    spec = gpt2(vocab=50_257, depth=2)
    assert max(map(len, rows(spec, width))) <= width
    assert isinstance(on_meta(spec).stack.mixers()[0].get_submodule("attend"), Attend)


def test_only_the_experts_that_are_used_are_counted() -> None:
    line = next(line for line in rows(Decoder(V, D, (LAYERS["experts"],))) if "experts" in line)
    assert "6 × GLU, 2 used" in line
    assert f"{6 * 3 * D * 24:,}" in line and f"{2 * 2 * 3 * D * 24:,}" in line
