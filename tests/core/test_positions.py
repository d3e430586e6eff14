"""Positions: each brick against its paper's formula, written here as loops or complex numbers."""

from __future__ import annotations

import cmath
import math
from itertools import product

import pytest
import torch
from torch import Tensor

from brickformer.errors import BrickError, SpecError
from brickformer.layers import Layer, Stack
from brickformer.mask import EMPTY, Span
from brickformer.mixers.attention import Attention
from brickformer.norms import RMSNorm
from brickformer.positions import Alibi, Dynamic, Learned, PositionSpec, Rope, Sinusoid, T5Bias
from brickformer.positions.absolute import sinusoid
from brickformer.positions.bias import T5BiasPosition, alibi_slopes

CPU = torch.device("cpu")
HEADS, WIDTH = 3, 6
PADDED = torch.tensor([[EMPTY, 0, 1, 2, 3], [0, 1, EMPTY, 2, EMPTY]])


# ---- rotary ---------------------------------------------------------------------------------------------------------


def turned(x: Tensor, p: int, theta: float) -> list[float]:
    """One head at position p: channel i and channel i + K/2 are the parts of a complex number turned by p·θ^(-2i/K)."""
    half = len(x) // 2
    z = [complex(x[i], x[i + half]) * cmath.exp(1j * p * theta ** (-2 * i / len(x))) for i in range(half)]
    return [c.real for c in z] + [c.imag for c in z]


@pytest.mark.parametrize("theta", [10_000.0, 50.0])
def test_rope_turns_complex_numbers(theta: float) -> None:
    rope = Rope(theta=theta).build(HEADS, WIDTH, causal=True)
    x = torch.randn(2, HEADS, 5, WIDTH, dtype=torch.float64)
    for at in (Span(0, 5), Span(1000, 5), Span(0, 5, PADDED)):
        out = rope.rotate(x, at)
        where = at.positions(CPU).expand(2, -1)
        for b, h, n in product(range(2), range(HEADS), range(5)):
            if where[b, n] != EMPTY:
                expected = turned(x[b, h, n], int(where[b, n]), theta)
                assert out[b, h, n].tolist() == pytest.approx(expected, abs=1e-12)


def test_rope_scores_know_only_how_far_apart_tokens_are() -> None:
    rope = Rope().build(HEADS, WIDTH, causal=True)
    q, k = torch.randn(2, 1, HEADS, 1, WIDTH, dtype=torch.float64)
    scores = [(rope.rotate(q, Span(p + 4, 1)) * rope.rotate(k, Span(p, 1))).sum(-1) for p in (0, 3, 77, 5000)]
    for score in scores[1:]:
        torch.testing.assert_close(score, scores[0])
    near = (rope.rotate(q, Span(3, 1)) * rope.rotate(k, Span(0, 1))).sum(-1)
    assert (near - scores[0]).abs().min() > 1e-3


def test_rope_keeps_lengths_and_types() -> None:
    rope = Rope().build(HEADS, WIDTH, causal=True)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(1, HEADS, 4, WIDTH).to(dtype)
        out = rope.rotate(x, Span(300, 4))
        assert out.dtype is dtype
        torch.testing.assert_close(out.double().norm(dim=-1), x.double().norm(dim=-1), rtol=2e-2, atol=0)


def test_rope_angles_do_not_suffer_from_a_low_precision_model() -> None:
    """Position 1001 in bfloat16 would be 1000: angles have to be computed higher up."""
    rope = Rope().build(1, 8, causal=True)
    x = torch.ones(1, 1, 1, 8)
    low = rope.rotate(x.bfloat16(), Span(1001, 1))
    assert (low.float() - rope.rotate(x, Span(1001, 1))).abs().max() <= 0.02


def test_rope_made_under_inference_mode_serves_training() -> None:
    rope = Rope(theta=1234.5).build(1, 4, causal=True)
    x = torch.randn(1, 1, 3, 4)
    with torch.inference_mode():
        rope.rotate(x, Span(0, 3))
    x.requires_grad_()
    rope.rotate(x, Span(0, 3)).sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_rope_adds_no_bias_and_biases_turn_nothing() -> None:
    x = torch.randn(1, HEADS, 4, WIDTH)
    assert Rope().build(HEADS, WIDTH, causal=True).bias(Span(0, 4), Span(0, 4), CPU) is None
    for spec in (Alibi(), T5Bias()):
        assert spec.build(HEADS, WIDTH, causal=True).rotate(x, Span(0, 4)) is x


# ---- biases ---------------------------------------------------------------------------------------------------------


def test_alibi_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(16) == pytest.approx([2 ** (-i / 2) for i in range(1, 17)])
    assert alibi_slopes(1) == [1 / 256]
    twelve = alibi_slopes(12)  # as published with the paper's code: the slopes of 8, then every other of 16
    assert twelve == pytest.approx(alibi_slopes(8) + alibi_slopes(16)[0::2][:4])
    assert len(set(alibi_slopes(20))) == 20


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_falls_with_the_distance(causal: bool) -> None:
    alibi = Alibi().build(4, WIDTH, causal=causal).double()
    slopes = alibi_slopes(4)
    for q, k in ((Span(0, 5), Span(0, 5)), (Span(4, 1), Span(0, 5)), (Span(0, 5, PADDED), Span(0, 5, PADDED))):
        bias = alibi.bias(q, k, CPU)
        assert bias is not None
        at_q, at_k = (at.positions(CPU).expand(2, -1) for at in (q, k))
        for b, h, i, j in product(range(2), range(4), range(q.length), range(k.length)):
            if EMPTY not in (at_q[b, i], at_k[b, j]):
                expected = -slopes[h] * abs(int(at_q[b, i]) - int(at_k[b, j]))
                assert float(bias[b if len(bias) > 1 else 0, h, i, j]) == pytest.approx(expected)
        assert bool(bias.isfinite().all())


def bucket(distance: int, buckets: int, max_distance: int, causal: bool) -> int:
    """The bucket of a key `distance` tokens before its query, as section 2.1 of the T5 paper describes it."""
    offset = 0
    if not causal:
        buckets //= 2
        if distance < 0:
            offset, distance = buckets, -distance
    distance = max(distance, 0)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return offset + min(exact + int(share * (buckets - exact)), buckets - 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (8, 20), (4, 9)])
def test_t5_buckets_are_those_of_the_paper(buckets: int, far: int, causal: bool) -> None:
    brick = T5Bias(buckets=buckets, max_distance=far).build(HEADS, WIDTH, causal=causal)
    assert isinstance(brick, T5BiasPosition)
    distances = [d for d in range(-200, 201) if abs(d) not in (far,)]  # at exactly `far` float32 may round either way
    got = brick.bucket(torch.tensor(distances)[None, None])[0, 0].tolist()
    edges = [d for d, g in zip(distances, got, strict=True) if g != bucket(d, buckets, far, causal)]
    exact = [d for d in edges if not _on_an_edge(abs(d), buckets if causal else buckets // 2, far)]
    assert not exact, f"distances in the wrong bucket: {exact}"
    unused = set() if causal else {buckets // 2}  # distance 0 counts as "before": "after, by 0" never happens
    assert set(got) == set(range(buckets)) - unused and len(edges) <= 6


def _on_an_edge(distance: int, buckets: int, far: int) -> bool:
    """Whether the logarithm lands on a whole number, where float32 and float64 may differ by one bucket."""
    exact = buckets // 2
    share = math.log(max(distance, 1) / exact) / math.log(far / exact) * (buckets - exact)
    return abs(share - round(share)) < 1e-5


@pytest.mark.parametrize("causal", [True, False])
def test_t5_bias_is_looked_up_by_positions(causal: bool) -> None:
    brick = T5Bias(buckets=8, max_distance=20).build(HEADS, WIDTH, causal=causal).double()
    assert isinstance(brick, T5BiasPosition)
    for q, k in ((Span(0, 5), Span(0, 5)), (Span(30, 1), Span(0, 31)), (Span(0, 5, PADDED), Span(0, 5, PADDED))):
        bias = brick.bias(q, k, CPU)
        at_q, at_k = (at.positions(CPU).expand(2, -1) for at in (q, k))
        for b, h, i, j in product(range(2), range(HEADS), range(q.length), range(k.length)):
            if EMPTY not in (at_q[b, i], at_k[b, j]):
                which = bucket(int(at_q[b, i]) - int(at_k[b, j]), 8, 20, causal)
                assert bias[b if len(bias) > 1 else 0, h, i, j] == brick.table.weight[which, h]
    assert list(dict(brick.named_parameters())) == ["table.weight"]


# ---- at the embedding -----------------------------------------------------------------------------------------------


def test_sinusoid_is_the_formula_of_2017() -> None:
    table = sinusoid(50, 8)
    for p, i in product(range(50), range(4)):
        angle = p / 10_000 ** (2 * i / 8)
        assert table[p, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert table[p, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_a_shared_table_is_one_for_each_stack() -> None:
    """One parameter, as T5 has it: every layer's gradient comes to it; two stacks have two, and so have two sizes."""

    def built(*heads: int, shared: bool) -> Stack:
        bias = T5Bias(buckets=8, max_distance=20, shared=shared)
        return Stack.of([Layer(Attention(h, position=bias), norm=RMSNorm()) for h in heads], 8)

    stack = built(2, 2, 2, shared=True)
    tables = [p for name, p in stack.named_parameters() if "table" in name]
    assert len(tables) == 1 and len(built(2, 2, shared=False).state_dict()) == len(
        built(2, 2, shared=True).state_dict()
    )
    assert len({name.split(".")[1] for name in stack.state_dict() if "table" in name}) == 3
    assert sum("table" in name for name, _ in built(2, 4, 2, shared=True).named_parameters()) == 2
    assert sum("table" in name for name, _ in built(2, 2, shared=False).named_parameters()) == 2
    other = built(2, 2, 2, shared=True)
    assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in stack.parameters()}
    x = torch.randn(1, 5, 8)
    with torch.no_grad():
        tables[0].normal_()
    (stack(x, Span(0, 5)) * x).sum().backward()
    whole = tables[0].grad
    assert whole is not None
    parts = torch.zeros_like(whole)
    for i in range(3):  # the share of each layer: the others read a table that learns nothing
        again = built(2, 2, 2, shared=False)
        again.load_state_dict(stack.state_dict())
        (again(x, Span(0, 5)) * x).sum().backward()
        grad = again.layers[i].mixer.position.table.weight.grad  # type: ignore[union-attr]
        parts += grad
    assert torch.allclose(whole, parts, atol=1e-6) and parts.abs().max() > 1e-3


@pytest.mark.parametrize("spec", [Sinusoid(max_len=9), Learned(max_len=9)], ids=["sinusoid", "learned"])
def test_tables_are_read_at_positions(spec: Sinusoid | Learned) -> None:
    brick = spec.build(8)
    table = torch.stack([brick(torch.zeros(1, 1, 8), Span(p, 1))[0, 0] for p in range(9)])
    assert len(table.unique(dim=0)) == 9
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(brick(x, Span(4, 5)), x + table[4:9])
    out = brick(x, Span(0, 5, PADDED))
    for b, n in product(range(2), range(5)):
        if PADDED[b, n] != EMPTY:
            torch.testing.assert_close(out[b, n], x[b, n] + table[PADDED[b, n]])
    assert brick(x.double(), Span(0, 5)).dtype is torch.float64


@pytest.mark.parametrize("spec", [Sinusoid(max_len=9), Learned(max_len=9)], ids=["Sinusoid", "Learned"])
def test_past_the_end_of_a_table_the_error_names_the_limit_and_what_has_none(spec: Sinusoid | Learned) -> None:
    brick = spec.build(8)
    brick(torch.zeros(1, 9, 8), Span(0, 9))
    for at in (Span(0, 10), Span(9, 1), Span(8, 2)):
        with pytest.raises(BrickError) as refused:
            brick(torch.zeros(1, at.length, 8), at)
        for part in ("holds 9 positions", f"reaches position {at.end - 1}", "max_len", "Rope", "Alibi", "T5Bias"):
            assert part in str(refused.value)
        assert type(spec).__name__ in str(refused.value)


def test_a_sinusoid_is_no_parameter_and_is_not_saved() -> None:
    brick = Sinusoid(max_len=9).build(8)
    assert not list(brick.parameters()) and not brick.state_dict()
    assert not Alibi().build(4, 4, causal=True).state_dict()


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Rope().build(4, 5, True), r"rope: got a head width of 5, expected an even one"),
        (lambda: Rope(theta=1.0), r"rope\.theta: got 1.0, expected a base above 1"),
        (lambda: Sinusoid().build(7), r"sinusoid: got a model width of 7, expected an even one"),
        (lambda: Sinusoid(max_len=0), r"sinusoid\.max_len: got 0, expected at least 1"),
        (lambda: Learned(max_len=0), r"learned\.max_len: got 0, expected at least 1"),
        (lambda: T5Bias(buckets=7), r"t5bias\.buckets: got 7, expected an even number, at least 4"),
        (lambda: T5Bias(buckets=2), r"t5bias\.buckets: got 2"),
        (lambda: T5Bias(buckets=32, max_distance=32), r"t5bias\.max_distance: got 32, expected more than buckets"),
    ],
)
def test_positions_refuse_what_they_cannot_do(make: object, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        make()  # type: ignore[operator]


def test_two_kinds_are_two_types() -> None:
    assert not issubclass(Sinusoid, PositionSpec) and issubclass(Rope, PositionSpec)
    with pytest.raises(SpecError, match=r"embed\.position: got Rope"):
        from brickformer.embed import Embed

        Embed(position=Rope())  # type: ignore[arg-type]


def test_dynamic_scaling_changes_nothing_and_ends_where_it_would() -> None:
    scaled, plain = (Rope(scaling=s).build(2, 8, causal=True) for s in (Dynamic(factor=4.0, original=6), None))
    x = torch.randn(1, 2, 6, 8)
    assert torch.equal(scaled.rotate(x, Span(0, 6)), plain.rotate(x, Span(0, 6)))
    with pytest.raises(BrickError, match=r"position 6; expected less than 6.*Ntk"):
        scaled.rotate(x[:, :, :1], Span(6, 1))
