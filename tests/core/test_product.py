"""The product of linear maps: oneDNN's against `F.linear`, its gradients and theirs, and who gets it when."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from brickformer import product as module
from brickformer.product import by_onednn, product

SHAPES = [((5, 7), 3, True), ((7,), 3, True), ((2, 3, 7), 1, False), ((1, 7), 9, True), ((0, 7), 3, True)]

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN in this torch")


def factors(rows: tuple[int, ...], outputs: int, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=random) for shape in (rows, (outputs, rows[-1]), (outputs,))]
    x, weight, b = (t.requires_grad_() for t in made)
    return x, weight, b if bias else None


@pytest.mark.parametrize(("rows", "outputs", "bias"), SHAPES)
def test_it_is_the_linear_map_and_so_are_its_gradients(rows: tuple[int, ...], outputs: int, bias: bool) -> None:
    x, weight, b = factors(rows, outputs, bias)
    ours, theirs = by_onednn(x, weight, b), F.linear(x, weight, b)
    torch.testing.assert_close(ours, theirs)
    assert ours.is_contiguous()
    inputs = [t for t in (x, weight, b) if t is not None]
    g = torch.randn_like(theirs)
    for mine, other in zip(torch.autograd.grad(ours, inputs, g), torch.autograd.grad(theirs, inputs, g), strict=True):
        torch.testing.assert_close(mine, other)


def test_gradients_of_gradients() -> None:
    x, weight, b = factors((2, 5, 6), 4, True)
    twice = []
    for f in (by_onednn, F.linear):
        (g,) = torch.autograd.grad(f(x, weight, b).sin().sum(), weight, create_graph=True)
        twice.append(torch.autograd.grad(g.sin().sum(), [x, weight, b]))
    for mine, other in zip(*twice, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_views_of_every_kind() -> None:
    x, weight, _ = factors((4, 6, 8), 3, False)
    for view in (x[:, ::2], x.transpose(0, 1), x.expand(4, 6, 8), x[..., 1:-1]):
        w = weight[:, : view.shape[-1]]
        torch.testing.assert_close(by_onednn(view, w, None), F.linear(view, w))
    torch.testing.assert_close(by_onednn(x[0].t(), weight.new_ones(2, 6), None), x[0].sum(0)[:, None].expand(8, 2))


def test_the_operator_keeps_torchs_rules() -> None:
    torch.library.opcheck(by_onednn, factors((2, 5, 6), 4, True))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which products were made, from 64 multiplications on."""
    made: list[str] = []
    plain = module._linear

    def learning(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        made.append("learning")
        return plain(x, weight, bias)

    def reading(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        made.append("reading")
        return plain(x, weight, bias)

    monkeypatch.setattr(module, "by_onednn", learning)
    monkeypatch.setattr(module, "_linear", reading)
    monkeypatch.setattr(module, "WIDE", True)
    monkeypatch.setattr(module, "LARGE", 64)
    monkeypatch.setattr(module, "MATRIX", 16)
    monkeypatch.setattr(module, "FEW", 2)
    return made


def test_learning_takes_large_products_in_float32_on_a_wide_cpu(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, b = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True), torch.randn(4)
    torch.testing.assert_close(product(x, weight, b), F.linear(x, weight, b))
    assert calls == ["learning"]
    product(x[:3], weight, b)
    product(x.double(), weight.double(), b.double())
    product(x.bfloat16(), weight.bfloat16(), b.bfloat16())
    assert product(x.to("meta"), weight.to("meta"), None).device.type == "meta"
    with torch.autocast("cpu", torch.bfloat16):
        assert product(x, weight, b).dtype is torch.bfloat16
    torch.func.vmap(product, (0, None))(x.expand(3, 4, 4), weight)
    torch.func.grad(lambda w: product(x, w).sum())(weight)
    monkeypatch.setattr(module, "WIDE", False)
    product(x, weight, b)
    assert calls == ["learning"]
    with pytest.raises(RuntimeError, match="same dtype|mat1 and mat2|expected"):
        product(x, weight.double(), None)


def test_reading_takes_few_rows_of_a_large_matrix(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, b = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    monkeypatch.setattr(module, "WIDE", False)
    with torch.no_grad():
        torch.testing.assert_close(product(x[:2], weight, b), F.linear(x[:2], weight, b))
        product(x[0], weight.requires_grad_())
        assert calls == ["reading"] * 2
        product(x[:3], weight, b)
        product(x[:2], weight[:3], b[:3])
        assert calls == ["reading"] * 2
        monkeypatch.setattr(module, "WIDE", True)
        product(x[:3], weight, b)
    assert calls == ["reading"] * 3


def test_a_compiled_graph_holds_it_whole() -> None:
    """An operator that the compiler did not know would break the graph or stop it."""

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(by_onednn(x, weight, bias)).square().mean()

    x, weight, b = factors((2, 5, 6), 4, True)
    assert b is not None
    grads = [
        torch.autograd.grad(f(x, weight, b), [x, weight, b]) for f in (layer, torch.compile(layer, fullgraph=True))
    ]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)
