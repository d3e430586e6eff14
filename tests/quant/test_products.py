"""Products on packed weights: the fast ones within their stated bound of the exact one, and the exact one exact."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brickformer.quant import NF4, Int4, Int8, QuantLinear, Scheme, encode
from brickformer.quant.codes import grouped
from brickformer.quant.products import FEW, choose, made

FAST = [Int8(), Int4(), Int4(group=64), Int4(symmetric=False), Int4(group=128, symmetric=False)]
SHAPES = [(64, 64), (33, 50), (1, 7), (16, 130), (100, 32)]


def layer(scheme: Scheme, shape: tuple[int, int], bias: bool = True) -> tuple[QuantLinear, nn.Linear]:
    """A coded layer, and a plain one with the numbers that it stands for."""
    linear = nn.Linear(shape[1], shape[0], bias=bias)
    coded = encode(linear.weight, scheme)
    made = QuantLinear(scheme, (shape[0],), shape[1], bias=linear.bias, coded=coded)
    linear.weight.data = coded.weight()
    return made, linear


@pytest.mark.parametrize("scheme", FAST, ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, FEW])
@torch.no_grad()
def test_fast_products_are_within_their_bound(scheme: Scheme, shape: tuple[int, int], rows: int) -> None:
    coded = encode(torch.randn(shape), scheme)
    product = made(coded)
    assert product is not None and choose(coded)[0] in ("int8pack", "int4pack")
    x = torch.randn(rows, shape[1])
    exact = x.double() @ coded.weight(torch.float64).t()
    bound = 2.0**-8 * (x.abs().double() @ coded.weight(torch.float64).abs().t() + exact.abs())
    if coded.zeros is not None:
        cut = grouped(x.abs(), scheme).sum(-1).double()  # (R, G)
        bound = bound + 2.0**-8 * 8.0 * cut @ coded.scales.double().abs().t()
    got = product(x.bfloat16()).double()
    assert got.shape == exact.shape and ((got - exact).abs() <= bound + 1e-30).all()


@pytest.mark.parametrize("scheme", [*FAST, NF4(), Int4(group=16)], ids=repr)
@torch.no_grad()
def test_many_rows_and_gradients_are_exact(scheme: Scheme) -> None:
    ours, plain = layer(scheme, (33, 50))
    x = torch.randn(3, FEW, 50)
    torch.testing.assert_close(ours(x), plain(x))
    with torch.enable_grad():
        one, other = (torch.randn(1, 1, 50, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in "ab")
        ours(one).square().sum().backward()
        plain(other).square().sum().backward()
    torch.testing.assert_close(one.grad, other.grad)
    for empty in (x[:0], x[:, :0]):
        assert ours(empty).shape == plain(empty).shape


@pytest.mark.parametrize("scheme", [NF4(), Int4(group=16)], ids=repr)
@torch.no_grad()
def test_where_there_is_no_kernel_one_row_is_exact_too(scheme: Scheme) -> None:
    ours, plain = layer(scheme, (33, 50), bias=False)
    x = torch.randn(1, 50)
    assert made(ours.coded) is None and ours.explain().startswith("exact: ")
    torch.testing.assert_close(ours(x), plain(x))


def test_a_device_without_the_kernel_takes_the_exact_way() -> None:
    for scheme in FAST:
        elsewhere = QuantLinear(scheme, (64,), 64)  # nothing is known of the device "meta"
        assert choose(elsewhere.coded)[0] == "exact" and "meta" in elsewhere.explain()
        assert elsewhere(torch.empty(1, 64, device="meta")).shape == (1, 64)


@pytest.mark.parametrize("scheme", FAST, ids=repr)
def test_inputs_that_lie_anywhere(scheme: Scheme) -> None:
    """A kernel that reads aligned memory only is given such."""
    coded = encode(torch.randn(32, 64), scheme)
    product = made(coded)
    x, room = torch.randn(1, 64).bfloat16(), torch.empty(1, 80, dtype=torch.bfloat16)
    for at in (1, 3, 8):
        room[:, at : at + 64] = x
        assert product is not None and product(room[:, at : at + 64]).equal(product(x))


@torch.no_grad()
def test_divided_inputs() -> None:
    w, d = torch.randn(40, 64), torch.rand(64) + 0.5
    ours = QuantLinear(Int8(), (40,), 64, divide=d, coded=encode(w * d, Int8()))
    for rows in (1, 20):
        x = torch.randn(rows, 64)
        assert (ours(x) - F.linear(x, w)).norm() < 0.03 * F.linear(x, w).norm()
    torch.testing.assert_close(ours.weight, w, rtol=0.0, atol=0.05)


@torch.no_grad()
def test_copies_and_other_types() -> None:
    """A deep copy has a kernel of its own; in half precision the scales stay as they were."""
    ours, _ = layer(Int4(), (64, 64))
    x = torch.randn(1, 64)
    before = ours(x)
    other = copy.deepcopy(ours)
    other.codes.zero_()
    other.codes = other.codes.clone()
    assert ours(x).equal(before) and not other(x).equal(before)
    half = copy.deepcopy(ours).half()
    assert half.scales.dtype is torch.bfloat16 and half.scales.equal(ours.scales)
    assert half(x.half()).dtype is torch.float16
    torch.testing.assert_close(half(x.half()).float(), before, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scheme", FAST, ids=repr)
@torch.no_grad()
def test_other_weights_loaded_into_the_same_memory(scheme: Scheme) -> None:
    """What was made of the old codes is forgotten, in shallow copies too."""
    (ours, _), (other, _) = layer(scheme, (48, 64)), layer(scheme, (48, 64))
    x, twin = torch.randn(1, 64), copy.copy(ours)
    assert not ours(x).equal(other(x))
    ours.load_state_dict(other.state_dict())
    assert ours(x).equal(other(x)) and twin(x).equal(other(x)) and ours.product()(x).equal(other(x))


def test_one_row_reads_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix is not made for a decode step."""
    ours, _ = layer(Int8(), (32, 32))

    def never(*_: object) -> Tensor:
        raise AssertionError("the matrix was made")

    monkeypatch.setattr("brickformer.quant.codes.Coded.weight", never)
    with torch.no_grad():
        ours(torch.randn(1, 1, 32))
        with pytest.raises(AssertionError, match="was made"):
            ours(torch.randn(1, FEW + 1, 32))
