"""Products on packed weights: the fast ones within their stated bound of the exact one, and the exact one exact."""

from __future__ import annotations

import copy
import itertools
import sys
import types
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brickformer.quant import NF4, Int4, Int8, QuantLinear, Scheme, encode
from brickformer.quant.codes import grouped
from brickformer.quant.products import _nf4, choose, exactly, few, for_bitsandbytes, made

FEW = few(torch.device("cpu"))
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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [32, 64])
def test_nf4_as_bitsandbytes_reads_it(group: int, shape: tuple[int, int]) -> None:
    """It has a reader of the same layout for CPUs. It is not installed with the tests, so this one is run by hand."""
    pytest.importorskip("bitsandbytes")
    coded = encode(torch.randn(shape), NF4(group=group))
    codes, scales, size, whole = for_bitsandbytes(coded)
    read = torch.ops.bitsandbytes.dequantize_4bit(codes, scales, size, "nf4", whole, torch.float32)
    torch.testing.assert_close(read[:, : shape[1]], coded.weight(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("group", [32, 64])
@torch.no_grad()
def test_the_product_of_nf4(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row with a stand-in for the kernel, told in its own terms; more rows the exact way."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    calls = []

    def gemv_4bit(x: Tensor, codes: Tensor, shape: Sequence[int], scales: Tensor, levels: Tensor, size: int) -> Tensor:
        calls.append(x)
        both = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], -1).flatten()
        weight = levels[both.int()].view(-1, size) * scales[:, None]
        return F.linear(x, weight.view(*shape).to(x.dtype))

    monkeypatch.setattr(torch.ops, "bitsandbytes", types.SimpleNamespace(gemv_4bit=gemv_4bit), raising=False)
    coded = encode(torch.randn(33, 50), NF4(group=group))
    product, plain = _nf4(coded), coded.weight(torch.bfloat16)
    for rows in (1, 3):
        x = torch.randn(rows, 50).bfloat16()
        torch.testing.assert_close(product(x), F.linear(x, plain))
    assert len(calls) == 1


@torch.no_grad()
def test_what_is_there_decides_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names only: what torch and its neighbours offer, each way round."""

    class There:
        """Codes that say they lie on a GPU."""

        def __init__(self, scheme: Scheme) -> None:
            self.scheme, self.codes = scheme, self
            self.device = torch.device("cuda")

    products = "brickformer.quant.products"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(f"{products}.find_spec", lambda _: None)
    monkeypatch.setattr(f"{products}._on_cuda", lambda _: False)
    for scheme in (Int8(), Int4(), NF4()):
        assert choose(There(scheme))[0] == "exact"  # type: ignore[arg-type]
    assert "bitsandbytes" in choose(There(NF4()))[1]  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(f"{products}.find_spec", lambda _: object())
    monkeypatch.setattr(f"{products}._on_cuda", lambda _: True)
    names = {"int8": "int8pack", "int4": "tinygemm", "nf4": "gemv_4bit"}
    for scheme in (Int8(), Int4(), NF4()):
        assert choose(There(scheme))[0] == names[scheme.kind]  # type: ignore[arg-type]
    assert choose(There(NF4(group=16)))[0] == "exact"  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_products_on_cuda() -> None:
    for scheme, shape in itertools.product([*FAST, NF4()], SHAPES):
        coded = encode(torch.randn(shape, device="cuda"), scheme)
        product = made(coded)
        if product is None:
            continue
        x, weight = torch.randn(1, shape[1], device="cuda"), coded.weight(torch.float64)
        exact = x.double() @ weight.t()
        bound = 2.0**-8 * (x.abs().double() @ weight.abs().t() + exact.abs())
        if coded.zeros is not None:
            cut = grouped(x.abs(), scheme).sum(-1).double()
            bound = bound + 2.0**-8 * 8.0 * cut @ coded.scales.double().abs().t()
        off = (product(x.bfloat16()).double() - exact).abs()
        assert (off <= bound + 1e-30).all(), (scheme, shape, choose(coded))


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
def test_few_rows_exactly(scheme: Scheme) -> None:
    """Where it is asked for, however often, and not a call longer."""
    ours, plain = layer(scheme, (33, 50))
    x = torch.randn(3, 50)
    wanted, near = plain(x), ours(x)
    assert not near.equal(wanted)
    with exactly():
        with exactly():
            torch.testing.assert_close(ours(x), wanted)
        torch.testing.assert_close(ours(x), wanted)
    assert ours(x).equal(near)


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
