"""Attend: every backend is compared with a softmax written here as loops, in float64, over plain lists of keys."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from brickformer.attend import Attend, Backend, attention_weights
from brickformer.errors import SpecError
from brickformer.mask import CAUSAL, EMPTY, FULL, Mask, Span

B, H, K = 2, 4, 6
FLEX = pytest.param("flex", marks=pytest.mark.unchecked)  # torch traces the mask, checks and all
BACKENDS = ["reference", "matmul", "sdpa", FLEX, "auto"]


def by_hand(attend: Attend, q: Tensor, k: Tensor, v: Tensor, q_at: Span, k_at: Span, bias: Tensor | None) -> Tensor:
    """(B, H, T, K): one query at a time, over the list of keys it may see; nothing seen, nothing said."""
    out = torch.zeros_like(q)
    scale = 1 / math.sqrt(q.shape[-1]) if attend.scale is None else attend.scale
    for b, h, t in product(range(q.shape[0]), range(q.shape[1]), range(q.shape[2])):
        g = h * k.shape[1] // q.shape[1]
        scores, values = [], []
        for s in range(k.shape[2]):
            if not _sees(attend.mask, _of(q_at, b, t), _of(k_at, b, s)):
                continue
            score = sum((q[b, h, t] * k[b, g, s]).tolist()) * scale
            if attend.softcap is not None:
                score = attend.softcap * math.tanh(score / attend.softcap)
            if bias is not None:
                score += float(bias[b if len(bias) > 1 else 0, h if bias.shape[1] > 1 else 0, t, s])
            scores.append(score)
            values.append(v[b, g, s])
        if scores:
            weights = [math.exp(score - max(scores)) for score in scores]
            out[b, h, t] = torch.stack([w * x for w, x in zip(weights, values, strict=True)]).sum(0) / sum(weights)
    return out


def _of(at: Span, b: int, i: int) -> tuple[int, int]:
    pos = at.start + i if at.pos is None else int(at.pos[b, i])
    return pos, 0 if at.doc is None else int(at.doc[b, i])


def _sees(mask: Mask, q: tuple[int, int], k: tuple[int, int]) -> bool:
    if k[0] == EMPTY or k[1] != q[1] or (mask.causal and k[0] > q[0]):
        return False
    return mask.window is None or abs(q[0] - k[0]) < mask.window


_PADDED = torch.tensor([[EMPTY, 0, 1, 2, 3], [0, 1, 2, EMPTY, EMPTY]])
_NOTHING = torch.tensor([[0, 1, 2, 3, 4], [EMPTY] * 5])
_DOC = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 0, 0]])
CASES: dict[str, tuple[Mask, Span, Span]] = {
    "everything": (FULL, Span(0, 5), Span(0, 5)),
    "causal": (CAUSAL, Span(0, 5), Span(0, 5)),
    "window": (Mask(window=2), Span(0, 5), Span(0, 5)),
    "two-way window": (Mask(False, 2), Span(0, 5), Span(0, 5)),
    "decode": (CAUSAL, Span(4, 1), Span(0, 5)),
    "decode with a window": (Mask(window=3), Span(4, 1), Span(0, 5)),
    "chunk": (CAUSAL, Span(3, 2), Span(0, 5)),
    "padded": (CAUSAL, Span(0, 5, _PADDED), Span(0, 5, _PADDED)),
    "padded, two-way": (FULL, Span(0, 5, _PADDED), Span(0, 5, _PADDED)),
    "padded keys": (FULL, Span(0, 3), Span(0, 5, _PADDED)),
    "nothing to see": (FULL, Span(0, 3), Span(0, 5, _NOTHING)),
    "packed": (CAUSAL, Span(0, 5, None, _DOC), Span(0, 5, None, _DOC)),
    "keys all later": (CAUSAL, Span(0, 3), Span(7, 4)),
}


def _tensors(q_at: Span, k_at: Span, groups: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(1)
    shapes = [(B, H, q_at.length, K), (B, groups, k_at.length, K), (B, groups, k_at.length, K)]
    q, k, v = (torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes)
    return q * 2, k, v


def _bias(kind: str, q_at: Span, k_at: Span) -> Tensor | None:
    shapes = {"per head": (1, H, q_at.length, k_at.length), "per row": (B, 1, q_at.length, k_at.length)}
    shapes["both"] = (B, H, q_at.length, k_at.length)
    return torch.randn(shapes[kind], dtype=torch.float64) if kind in shapes else None


VARIANTS: list[tuple[int, str, dict[str, Any]]] = [
    (4, "none", {}),
    (2, "none", {"scale": 0.9}),
    (1, "per head", {}),
    (2, "per row", {}),
    (4, "both", {"scale": 0.2}),
    (2, "none", {"softcap": 1.3}),
    (1, "both", {"softcap": 0.7, "scale": 1.1}),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_backends_equal_the_loop(case: str, backend: Backend) -> None:
    mask, q_at, k_at = CASES[case]
    for groups, kind, options in VARIANTS[1::4] if backend == "flex" else VARIANTS:  # each is traced anew: slow
        if backend in ("matmul", "sdpa") and "softcap" in options:
            continue  # refused: see below
        attend = Attend(mask, backend=backend, **options)
        q, k, v = _tensors(q_at, k_at, groups)
        bias = _bias(kind, q_at, k_at)
        expected = by_hand(attend, q, k, v, q_at, k_at, bias)
        got = attend(q, k, v, q_at, k_at, bias)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12, msg=f"G={groups}, {kind} bias, {options}")
        weights = attend.weights(q, k, q_at, k_at, bias)
        said = weights @ v.repeat_interleave(H // groups, dim=1)
        torch.testing.assert_close(said, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_weights_sum_to_one_or_to_nothing(case: str) -> None:
    mask, q_at, k_at = CASES[case]
    q, k, _ = _tensors(q_at, k_at, 2)
    total = Attend(mask).weights(q, k, q_at, k_at).sum(-1)
    blind = torch.tensor(
        [
            [
                not any(_sees(mask, _of(q_at, b, t), _of(k_at, b, s)) for s in range(k_at.length))
                for t in range(q_at.length)
            ]
            for b in range(B)
        ]
    )[:, None].expand_as(total)
    torch.testing.assert_close(total, (~blind).to(total.dtype))


@pytest.mark.parametrize("backend", ["reference", "matmul", "sdpa", FLEX])
@pytest.mark.parametrize("case", ["nothing to see", "keys all later", "padded, two-way"])
def test_a_query_that_may_see_nothing_gets_zeros_and_finite_gradients(case: str, backend: Backend) -> None:
    mask, q_at, k_at = CASES[case]
    q, k, v = _tensors(q_at, k_at, 2)
    if backend != "flex":  # torch has no backward of flex on a CPU
        for x in (q, k, v):
            x.requires_grad_()
    for bias in (None, torch.randn(B, H, q_at.length, k_at.length, dtype=torch.float64)):
        out = Attend(mask, backend=backend)(q, k, v, q_at, k_at, bias)
        assert bool(out.isfinite().all())
        if case == "nothing to see":
            assert out[1].abs().sum() == 0 and out[0].abs().sum() > 0
        if case == "keys all later":
            assert out.abs().sum() == 0
        if backend != "flex":
            grads = torch.autograd.grad(out.square().sum() + out.sum(), (q, k, v))
            assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_the_formula(case: str) -> None:
    mask, q_at, k_at = CASES[case]
    for groups, kind, options in [v for v in VARIANTS if "softcap" not in v[2]]:
        inputs = [x.requires_grad_() for x in _tensors(q_at, k_at, groups)]
        bias = _bias(kind, q_at, k_at)
        if bias is not None:
            inputs.append(bias.requires_grad_())
        grads = []
        for backend in ("reference", "sdpa", "matmul"):
            out = Attend(mask, backend=backend, **options)(*inputs[:3], q_at, k_at, bias)  # type: ignore[arg-type]
            grads.append(torch.autograd.grad((out.sin() * torch.arange(K)).sum(), inputs))
        for name, expected, *ways in zip("q k v bias".split(), *grads, strict=False):
            for got in ways:
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("backend", ["reference", "matmul", "sdpa", FLEX])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 8e-2)])
def test_lower_precision_stays_near(dtype: torch.dtype, tolerance: float, backend: Backend) -> None:
    few = ["window", "nothing to see"]
    for case in few if backend == "flex" else CASES:
        mask, q_at, k_at = CASES[case]
        for groups, kind in ((2, "none"), (4, "both")):
            q, k, v = _tensors(q_at, k_at, groups, dtype)
            bias = _bias(kind, q_at, k_at)
            attend = Attend(mask, backend=backend)
            expected = by_hand(attend, q.double(), k.double(), v.double(), q_at, k_at, bias)
            out = attend(q, k, v, q_at, k_at, None if bias is None else bias.to(dtype))
            assert out.dtype is dtype
            off = (out.double() - expected).abs().max().item()
            assert off <= tolerance, f"{case}, {kind} bias: off by {off:.3g}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    """Scores near the end of float16: the largest wins, nothing is NaN."""
    q = torch.full((1, 1, 2, 4), 100.0, dtype=dtype)
    k = torch.tensor([[1.0] * 4, [100.0] * 4, [-100.0] * 4], dtype=dtype)[None, None]
    v = torch.tensor([[1.0] * 4, [2.0] * 4, [3.0] * 4], dtype=dtype)[None, None]
    for backend in ("reference", "matmul", "sdpa"):
        out = Attend(FULL, scale=0.5, backend=backend)(q, k, v, Span(0, 2), Span(0, 3))  # type: ignore[arg-type]
        assert torch.equal(out, torch.full_like(out, 2.0)), backend


def test_softcap_bounds_scores_before_the_bias() -> None:
    q, k = (
        torch.full((1, 1, 1, 4), 1e3, dtype=torch.float64),
        torch.tensor([[1e3] * 4, [-1e3] * 4], dtype=torch.float64),
    )
    allowed = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    bias = torch.tensor([0.0, 2.0], dtype=torch.float64)[None, None, None]
    weights = attention_weights(q, k[None, None], allowed, bias=bias, softcap=1.5)
    expected = torch.softmax(torch.tensor([1.5, -1.5 + 2.0], dtype=torch.float64), 0)
    torch.testing.assert_close(weights[0, 0, 0], expected)


# ---- which kernel, and why ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attend", "q_at", "k_at", "said"),
    [
        (Attend(CAUSAL), Span(0, 5), Span(0, 5), "sdpa, is_causal"),
        (Attend(CAUSAL), Span(4, 1), Span(0, 5), "sdpa, no mask needed"),
        (Attend(FULL), Span(0, 5), Span(0, 7), "sdpa, no mask needed"),
        (Attend(Mask(window=3)), Span(4, 1), Span(0, 5), "sdpa, no mask needed: the last 3 keys are cut out"),
        (Attend(CAUSAL), Span(3, 2), Span(0, 5), "sdpa, dense mask (1, 1, 2, 5): 2 queries start at slot 3"),
        (Attend(Mask(window=2)), Span(0, 5), Span(0, 5), "sdpa, dense mask (1, 1, 5, 5): a window of 2 over 5 keys"),
        (Attend(FULL), Span(0, 3), Span(0, 5, _PADDED), "sdpa, dense mask (2, 1, 1, 5): keys are padded"),
        (Attend(CAUSAL), Span(0, 5, _PADDED), Span(0, 5), "sdpa, dense mask (2, 1, 5, 5): queries are padded"),
        (
            Attend(CAUSAL),
            Span(0, 5, None, _DOC),
            Span(0, 5, None, _DOC),
            "dense mask (2, 1, 5, 5): documents are packed",
        ),
        (
            Attend(CAUSAL, softcap=2.5),
            Span(0, 5),
            Span(0, 5),
            "reference, is_causal (soft cap 2.5, which sdpa cannot do)",
        ),
        (Attend(CAUSAL, backend="flex"), Span(0, 5), Span(0, 5), "flex, is_causal"),
        (Attend(CAUSAL, backend="reference"), Span(0, 5), Span(0, 5), "reference, is_causal"),
    ],
)
def test_explain_says_which_kernel_and_why(attend: Attend, q_at: Span, k_at: Span, said: str) -> None:
    assert said in attend.explain(q_at, k_at)


@pytest.mark.unchecked
def test_explain_names_the_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import brickformer.attend as module

    ran = []
    for name in ("reference", "matmul", "sdpa", "flex"):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=real, **kw: (ran.append(n), f(*a, **kw))[1])
    for backend, softcap in product(("reference", "matmul", "sdpa", "flex", "auto"), (None, 2.0)):
        if backend in ("matmul", "sdpa") and softcap is not None:
            continue
        attend = Attend(CAUSAL, backend=backend, softcap=softcap)  # type: ignore[arg-type]
        attend(*_tensors(Span(0, 5), Span(0, 5), 4), Span(0, 5), Span(0, 5))
        assert attend.explain(Span(0, 5), Span(0, 5)).startswith(f"{ran[-1]}, ")
    longer = ((CAUSAL, 64, "matmul"), (CAUSAL, 512, "matmul"), (CAUSAL, 513, "sdpa"), (CAUSAL, 1, "sdpa"))
    for mask, tokens, kernel in (*longer, (FULL, 64, "matmul"), (FULL, 65, "sdpa")):
        attend, at = Attend(mask), Span(0, tokens)
        q, k, v = _tensors(at, at, 4)
        attend(q.requires_grad_(), k, v, at, at)
        assert ran[-1] == kernel and attend.explain(at, at, learning=True).startswith(f"{kernel}, ")
        with torch.no_grad():
            attend(q, k, v, at, at)
        assert ran[-1] == "sdpa" and attend.explain(at, at).startswith("sdpa, ")


@pytest.mark.parametrize("tokens", [128, 129, 300])
@pytest.mark.parametrize("kind", ["none", "both"])
def test_a_causal_triangle_in_blocks_is_the_whole(tokens: int, kind: str) -> None:
    at = Span(0, tokens)
    inputs = [x.requires_grad_() for x in _tensors(at, at, 2)]
    bias = _bias(kind, at, at)
    results = []
    for backend in ("reference", "matmul"):
        out = Attend(CAUSAL, backend=backend)(*inputs, at, at, bias)  # type: ignore[arg-type]
        results.append((out, *torch.autograd.grad((out.sin() * torch.arange(K)).sum(), inputs)))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "tokens", "past"), [(40, 300, 0), (40, 257, 100), (130, 400, 7), (1, 300, 0)])
@pytest.mark.parametrize("kind", ["none", "both"])
def test_a_short_window_in_blocks_is_the_whole(causal: bool, window: int, tokens: int, past: int, kind: str) -> None:
    """Also with keys from before, from a cache that starts anywhere."""
    mask, q_at, k_at = Mask(causal, window), Span(past, tokens), Span(past // 2, past - past // 2 + tokens)
    assert "blocks of queries" in Attend(mask).explain(q_at, k_at)
    inputs = [x.requires_grad_() for x in _tensors(q_at, k_at, 2)]
    bias, sinks, results = _bias(kind, q_at, k_at), torch.randn(H, dtype=torch.float64), []
    for backend in ("reference", "sdpa", "matmul", "auto"):
        out = Attend(mask, backend=backend)(*inputs, q_at, k_at, bias, sinks)  # type: ignore[arg-type]
        results.append((out, *torch.autograd.grad((out.sin() * torch.arange(K)).sum(), inputs)))
    for expected, *ways in zip(*results, strict=True):
        for got in ways:
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("value", [3, 9])
def test_values_of_another_width_need_no_map_of_all_by_all(value: int) -> None:
    tokens, groups = 200, 2
    q, k, v = (torch.randn(B, h, tokens, w) for h, w in ((H, K), (groups, K), (groups, value)))
    for given in (q, k, v):
        given.requires_grad_()
    outs, at = [], Span(0, tokens)
    for backend in ("reference", "sdpa"):
        with _Largest() as largest:
            out = Attend(CAUSAL, backend=backend)(q, k, v, at, at)  # type: ignore[arg-type]
        outs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert largest.numbers < H * tokens * tokens / 8
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class _Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made meanwhile, of one row of the batch."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            self.numbers = max(self.numbers, x.numel() // B if isinstance(x, Tensor) else 0)
        return out


def test_what_a_kernel_cannot_do_is_refused() -> None:
    for backend in ("sdpa", "matmul"):
        with pytest.raises(SpecError, match=rf"'{backend}' cannot cap scores. Use 'auto', 'flex' or 'reference'"):
            Attend(CAUSAL, softcap=2.0, backend=backend)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"'flex' cannot drop weights. Use dropout=0.0, or 'auto' or 'reference'"):
        Attend(CAUSAL, dropout=0.1, backend="flex")


def test_it_is_a_module_without_parameters() -> None:
    attend = Attend(Mask(window=3), softcap=2.0)
    assert not attend.state_dict() and not list(attend.parameters())
    seen: list[int] = []
    attend.register_forward_pre_hook(lambda module, args: seen.append(len(args)))
    q, k, v = _tensors(Span(0, 5), Span(0, 5), 4)
    attend(q, k, v, Span(0, 5), Span(0, 5))
    assert seen == [5]
