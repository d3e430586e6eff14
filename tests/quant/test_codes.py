"""Codes: every weight becomes the nearest number of its grid; what is packed comes out again; sizes are as stated."""

from __future__ import annotations

import pytest
import torch

from brickformer.errors import BrickError, SpecError
from brickformer.quant import NF4, Int4, Int8, Scheme, encode
from brickformer.quant.codes import check_finite, grouped, pack, sizes, unpack
from brickformer.quant.grid import nf4_levels

SCHEMES = [Int8(), Int4(), Int4(group=64), Int4(symmetric=False), Int4(group=16), NF4(), NF4(group=32)]
PAPER = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
-0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"""


def test_the_levels_of_nf4_are_those_of_the_paper() -> None:
    expected = torch.tensor([float(x) for x in PAPER.split()])
    torch.testing.assert_close(nf4_levels(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("columns", [1, 2, 7, 64])
def test_half_bytes(columns: int) -> None:
    codes = torch.randint(0, 16, (3, columns), dtype=torch.uint8)
    packed = pack(codes)
    assert packed.shape == (3, (columns + 1) // 2)
    for row, bytes_ in zip(codes.tolist(), packed.tolist(), strict=True):
        for i, code in enumerate(row):
            assert code == (bytes_[i // 2] >> 4 * (i % 2)) & 15
    assert unpack(packed)[:, :columns].equal(codes)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@pytest.mark.parametrize("shape", [(5, 64), (3, 50), (2, 1), (4, 200)])
def test_each_weight_becomes_the_nearest_number_of_its_grid(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Against every code tried in turn, with the scales that were chosen."""
    w = torch.randn(shape) * torch.rand(shape[0], 1) * 3
    coded = encode(w, scheme)
    got = coded.weight()
    assert got.shape == w.shape and coded.inputs == shape[1]
    count = range(-127, 128) if scheme.bits == 8 else range(16)
    zeros = None if coded.zeros is None else unpack(coded.zeros)[:, : coded.scales.shape[1], None]
    tried = [scheme.value(torch.tensor(c), coded.scales[..., None].float(), zeros) for c in count]
    grid = torch.stack([t.expand(*coded.scales.shape, 1) for t in tried], -1)  # (O, G, 1, codes)
    nearest = (grouped(w, scheme)[..., None] - grid).abs().amin(-1)
    off = (grouped(w, scheme) - grouped(got, scheme)).abs()
    torch.testing.assert_close(off, nearest, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_a_step_is_as_wide_as_bits_allow(scheme: Scheme) -> None:
    """Rounding to `levels` evenly spaced numbers between ± the longest weight is never better than 1.2 times ours."""
    w = torch.randn(16, 256)
    ours = (encode(w, scheme).weight() - w).square().mean()
    cut = grouped(w, scheme)
    step = cut.abs().amax(-1, keepdim=True) / (127 if scheme.bits == 8 else 7)
    plain = ((cut / step).round() * step - cut).square().mean()
    assert ours < (1.2 if scheme.bits == 8 else 1.0) * plain


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_zeros_stay_zeros_and_extremes_stay_finite(scheme: Scheme) -> None:
    assert not encode(torch.zeros(3, 40), scheme).weight().any()
    w = torch.randn(3, 40)
    w[1] = 0.0
    w[2] *= 1e-15
    w[0] *= 1e15
    again = encode(w, scheme).weight()
    assert again.isfinite().all() and not again[1].any()
    for row in (0, 2):
        assert (again[row] - w[row]).norm() < 0.2 * w[row].norm()


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_rows_know_nothing_of_each_other_nor_of_blocks(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(6, 70)
    whole = encode(w, scheme)
    monkeypatch.setattr("brickformer.quant.codes.BLOCK", 100)  # a row at a time
    alone = encode(w, scheme)
    assert whole.codes.equal(alone.codes) and whole.scales.equal(alone.scales)
    assert whole.rows(torch.tensor([4, 1])).equal(whole.weight()[[4, 1]])


def test_bytes_of_a_matrix() -> None:
    w = torch.randn(512, 512)
    of = {repr(s): encode(w, s).nbytes / w.nbytes for s in SCHEMES}
    assert of["Int8()"] <= 0.27 and of["Int4()"] <= 0.16 and of["Int4(symmetric=False)"] <= 0.16
    assert of["NF4()"] < of["NF4(group=32)"] <= 0.16
    for scheme in SCHEMES:
        coded = encode(torch.randn(5, 70), scheme)
        for name, (shape, dtype) in sizes(scheme, 5, 70).items():
            tensor = getattr(coded, name)
            assert tensor.shape == shape and tensor.dtype is dtype
        assert ("zeros" in sizes(scheme, 5, 70)) == (coded.zeros is not None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_named(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brickformer.quant.codes.BLOCK", 20)
    w = torch.randn(8, 10)
    check_finite(w, "w")
    w[5, 3] = bad
    with pytest.raises(BrickError, match=rf"layer \[5, 3\] is {bad}"):
        check_finite(w, "layer")


@pytest.mark.parametrize("group", [0, 8, 33, 512])
def test_groups_are_powers_of_two(group: int) -> None:
    with pytest.raises(SpecError, match=r"16, 32, 64, 128 or 256"):
        Int4(group=group)
