"""GPTQ against the definition written out, AWQ against plain rounding, and what layers are fed."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from brickformer.errors import BrickError
from brickformer.quant import NF4, Calibration, Int4, Int8, Scheme, encode, quantize
from brickformer.quant.awq import awq
from brickformer.quant.gptq import gptq
from brickformer.quant.hessian import DAMP, gather, in_budget, output_error, runs, stages


def fed(inputs: int, rows: int = 400) -> tuple[Tensor, Tensor]:
    """Inputs that lean on each other, of unequal sizes, and their H."""
    x = torch.randn(rows, inputs // 4) @ torch.randn(inputs // 4, inputs) + 0.3 * torch.randn(rows, inputs)
    x = x * torch.rand(inputs).add(0.05)
    return x, x.t() @ x / rows


def written_out(w: Tensor, scheme: Scheme, h: Tensor) -> Tensor:
    """After each rounding the rest is solved anew: the best that is left, given what is fixed (float64)."""
    w, h = w.double(), h.double()
    scales = gptq(w.float(), scheme, h.float()).scales.float()  # (O, G): the same grids
    h = h + DAMP * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
    size = scheme.size or w.shape[1]
    left = torch.argsort(h.diagonal(), descending=True, stable=True).tolist()
    while left:
        j, left = left[0], left[1:]
        s = scales[:, j // size]
        rounded = scheme.value(scheme.code(w[:, j].float(), s, None), s, None).double()
        off = rounded - w[:, j]
        w[:, j] = rounded
        if left:  # minimise (d_j, d_rest) H (d_j, d_rest)ᵀ over d_rest
            w[:, left] -= off[:, None] * torch.linalg.solve(h[left][:, left], h[left, j])[None]
    return w.float()


@pytest.mark.parametrize("scheme", [Int8(), Int4(), NF4(group=32)], ids=repr)
def test_gptq_is_the_definition(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brickformer.quant.gptq.BLOCK", 24)  # several blocks, and a rest
    monkeypatch.setattr("brickformer.quant.gptq.ROWS", 5)
    w, (_, h) = torch.randn(12, 64), fed(64)
    ours, theirs = gptq(w, scheme, h).weight(), written_out(w, scheme, h)
    same = (ours - theirs).abs() < 1e-5 * w.abs().max()
    assert same.float().mean() > 0.98, "a tie may fall either way, and moves what follows"


@pytest.mark.parametrize("scheme", [Int4(), Int4(symmetric=False), NF4(), Int8()], ids=repr)
@pytest.mark.parametrize("inputs", [64, 50])
def test_gptq_answers_better_than_rounding(scheme: Scheme, inputs: int) -> None:
    w, (x, h) = torch.randn(24, inputs), fed(inputs)
    plain, ours = encode(w, scheme), gptq(w, scheme, h)
    error, better = (((c.weight() - w) @ x.t()).norm() / (w @ x.t()).norm() for c in (plain, ours))
    assert better < 0.7 * error
    assert output_error(w, ours, None, h) == pytest.approx(float(better), rel=1e-2)


def test_gptq_where_inputs_are_idle_or_alike() -> None:
    """An input that is always 0, one that is the copy of another, a layer that is fed nothing."""
    x = torch.randn(100, 32)
    x[:, 5] = 0.0
    x[:, 6] = x[:, 7]
    w = torch.randn(8, 32)
    again = gptq(w, Int8(), x.t() @ x).weight()
    assert again.isfinite().all() and not again[:, 5].any()
    assert ((again - w) @ x.t()).norm() < 0.02 * (w @ x.t()).norm()
    assert gptq(w, Int4(), torch.zeros(32, 32)).weight().isfinite().all()


def test_awq_protects_what_matters() -> None:
    w, x = torch.randn(24, 64), torch.randn(300, 64)
    x[:, 9] *= 40.0
    h = x.t() @ x / len(x)
    coded, d = awq(w, Int4(), h)
    assert d is not None and d[9] == d.max()
    ours = (coded.weight() / d - w) @ x.t()
    assert ours.norm() < 0.8 * ((encode(w, Int4()).weight() - w) @ x.t()).norm()
    even, none = awq(w, Int8(), torch.eye(64))
    assert none is None and even.codes.equal(encode(w, Int8()).codes), "nothing to protect: plain rounding"


class Odd(nn.Module):
    """Calls its layers in another order than it registers them, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.a, self.never = nn.Linear(6, 4), nn.Linear(5, 6), nn.Linear(3, 5), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Named(Odd):
    """The same, and tells each layer by name what it is fed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(input=torch.relu(self.b(input=torch.relu(self.a(input=x)))))


def test_inputs_may_be_named() -> None:
    model, named, x = Odd(), Named(), torch.randn(20, 3)
    named.load_state_dict(model.state_dict())
    for m in (model, named):
        quantize(m, Int4(), Calibration([lambda m: m(x)]))
    assert named(x).equal(model(x))


def test_one_at_a_time() -> None:
    model = Odd()
    with pytest.raises(BrickError, match="being quantized just now"):
        quantize(model, Int4(), Calibration([lambda m: quantize(model, Int4())]))


def test_layers_are_met_in_the_order_of_the_data() -> None:
    model = Odd()
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    batches = [torch.randn(7, 3), torch.randn(2, 4, 3)]
    readings = [lambda m, x=x: m(x) for x in batches]
    assert stages(model, names, readings) == [["a"], ["b"], ["c"]]
    seen = gather(model, ["a"], readings)["a"].h
    flat = torch.cat([b.reshape(-1, 3) for b in batches])
    torch.testing.assert_close(seen, flat.t() @ flat / 15)
    assert in_budget({"a": 3, "b": 5, "c": 6}, 8 * (9 + 25)) == [["a", "b"], ["c"]]
    assert in_budget({"a": 30, "b": 5}, 1) == [["a"], ["b"]]
    report = {m.name: m for m in quantize(model, Int8(), Calibration(readings))}
    assert report["never"].kind == "int8", "what no data reaches is rounded"


class Fan(nn.Module):
    """Three maps of one tensor, then one of another tensor of the same size, then the first again."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.q, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x) + self.k(x) * self.v(x)
        return self.out(y) + self.q(y)


def test_what_is_fed_one_tensor_is_done_together() -> None:
    names = ["k", "q", "v", "out"]
    assert stages(Fan(), names, [lambda m: m(torch.randn(2, 4))]) == [["q", "k", "v"], ["out"]]
    cut = [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert runs(cut, 9) == cut and runs([], 3) == []
    assert runs(cut, 3) == [["a", "b", "c"], ["d", "e"], ["f"]] and runs(cut, 1) == [["a", "b", "c", "d", "e", "f"]]


def test_later_layers_see_what_earlier_ones_became(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Odd(), torch.randn(9, 3)
    seen: dict[str, Tensor] = {}
    real = gptq

    def spy(w: Tensor, scheme: Scheme, h: Tensor):
        seen[str(len(seen))] = h
        return real(w, scheme, h)

    monkeypatch.setattr(sys.modules["brickformer.quant.quantize"], "gptq", spy)
    a = model.a.weight.detach().clone()
    quantize(model, Int4(), Calibration([lambda m: m(x)]))
    h = torch.relu(nn.functional.linear(x, model.a.weight, model.a.bias))
    torch.testing.assert_close(seen["1"], h.t() @ h / 9)
    assert not torch.allclose(model.a.weight, a, atol=1e-3)


def test_bad_calibration() -> None:
    with pytest.raises(BrickError, match="no calibration data"):
        quantize(Odd(), Int4(), Calibration([]))
    with pytest.raises(BrickError, match="'gptq' or 'awq'"):
        quantize(Odd(), Int4(), Calibration([lambda m: m(torch.randn(1, 3))], "best"))  # type: ignore[arg-type]
    with pytest.raises(BrickError, match="not finite on the calibration data"):
        quantize(Odd(), Int4(), Calibration([lambda m: m(torch.full((1, 3), torch.inf))]))
