"""Attention that is written out: its scale, the axis of its softmax, its heads.

    weights = softmax(q·kᵀ / √K + mask) over the keys

The trace gives q, k, scores, weights and context. A scale folded into q, into k, into both or into the initial values
is as good (T5), and a norm of q and k makes any scale legitimate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from brickformer.doctor.exam import Exam, Probe, grads, number
from brickformer.doctor.report import Finding
from brickformer.doctor.trace import Heads, traced


def seen(e: Exam) -> str | None:
    """Only attention that is written out, or torch's kernel, can be watched."""
    if e.trace.heads:
        return None
    return "no attention that is written out was seen"


def _scale(e: Exam) -> list[Finding]:
    found: list[Finding] = []
    for h, fresh in zip(e.trace.heads, e.fresh_trace.heads, strict=False):
        if h.factor is None or h.width < 2:
            continue
        right = h.width**-0.5
        heads = h.q.shape[1] if h.q.ndim == 4 and h.q.shape[2] == e.p.tokens else 0
        if (
            heads > 1
            and heads != h.width
            and heads != e.p.tokens
            and math.isclose(abs(h.factor), heads**-0.5, rel_tol=1e-6)
        ):
            found.append(_scale_finding(e, h, right))
            break
        ratio = abs(h.factor) / right
        if 0.66 < ratio < 1.5 or _folded(fresh, right, ratio):
            continue
        if math.isclose(h.factor, 1.0 / h.width, rel_tol=1e-6) and not h.fused:
            continue  # 1/K: maximal update parametrisation
        found.append(_scale_finding(e, h, right))
        break
    return found or _by_length(e)


def _by_length(e: Exam) -> list[Finding]:
    """The constant does not change with the length."""
    n = e.p.tokens
    if n < 5:
        return []
    try:
        short = e.traced(e.p.model, e.ids[:1, : n - 2]).heads
    except Exception:
        return []  # of one length only
    for h, s in zip(e.trace.heads, short, strict=False):
        if h.factor and s.factor and math.isclose(s.factor / h.factor, math.sqrt(n / (n - 2)), rel_tol=1e-6):
            return [_scale_finding(e, h, h.width**-0.5)]
    return []


def _folded(h: Heads, right: float, ratio: float) -> bool:
    """Whether the initial values of q are smaller than those of k by what is missing."""
    q, k = float(h.q.detach().std()), float(h.k.detach().std())
    return k > 0 and ratio > 1.5 and 0.6 < (q / k) * ratio < 1.6 and q / k < 0.75


def _scale_finding(e: Exam, h: Heads, right: float) -> Finding:
    assert h.factor is not None
    tokens, dim = e.p.tokens, _dim(e, h)
    f = abs(h.factor)
    if math.isclose(f, 1.0):
        cause = "the scores are not divided by anything"
    elif h.q.ndim == 4 and math.isclose(f, h.q.shape[1] ** -0.5, rel_tol=1e-6) and h.q.shape[2] == tokens:
        cause = f"{h.q.shape[1]} heads of width {h.width}, scaled as if it were the other way round: they are swapped"
    elif math.isclose(f, tokens**-0.5, rel_tol=1e-6) and tokens != dim:
        cause = f"divided by the root of the length ({tokens} tokens here), not of the width of a head"
    elif dim and math.isclose(f, dim**-0.5, rel_tol=1e-6):
        cause = f"divided by √{dim}, the width of the model, not by √{h.width}, the width of a head"
    elif math.isclose(f, math.sqrt(h.width), rel_tol=1e-6):
        cause = "multiplied by √K instead of divided"
    elif math.isclose(f, 1.0 / h.width, rel_tol=1e-6):
        cause = "scaled twice: q by hand, and once more inside scaled_dot_product_attention"
    else:
        cause = f"the constant is {f:.4g} = 1/√{f**-2:.4g}"
    return Finding(
        "scale",
        "error",
        h.place,
        f"scores are {f:.4g} · q·k for heads of width {h.width}",
        f"{right:.4g} = 1/√{h.width}",
        cause,
        "divide the scores by math.sqrt(q.shape[-1]), once",
        "q, k of unit variance: (q @ k.mT * scale).std()  # about 1",
        "likely",
    )


def _dim(e: Exam, h: Heads) -> int:
    module = e.p.model.get_submodule(h.place) if h.place else e.p.model
    while True:
        for _, weight in module.named_parameters():
            if weight.ndim == 2:
                return int(weight.shape[1])
        return 0


def _softmax(e: Exam) -> list[Finding]:
    for h in e.trace.heads:
        if h.over is not None and h.over > 1 + 1e-4:
            return [
                Finding(
                    "softmax axis",
                    "error",
                    h.place,
                    f"the weights that are contracted with v sum to {number(h.over)} for some query",
                    "1 (or less, where some are dropped)",
                    "the softmax runs over another axis than the keys (queries, heads or the batch)",
                    "softmax over the last axis of (.., queries, keys): scores.softmax(dim=-1)",
                    "weights.sum(-1)  # must be 1 for every query",
                    explains=frozenset("causality padding batch scale overfit cached input eval".split())
                    | {"masked rows"},
                )
            ]
        if h.softmaxes > 1:
            return [
                Finding(
                    "softmax axis",
                    "error",
                    h.place,
                    f"{h.softmaxes} softmaxes one after the other",
                    "one",
                    "the weights go through softmax again, which flattens them",
                    "remove one of them",
                )
            ]
    return _over_time(e)


def _over_time(e: Exam) -> list[Finding]:
    """What the model says of the next token is a distribution over the ids."""
    for place, axis, shape in e.trace.said:
        if shape[-1] in (e.p.vocab, e.p.target_vocab) and len(shape) > 2 and axis not in (-1, len(shape) - 1):
            return [
                Finding(
                    "softmax axis",
                    "error",
                    place,
                    f"a softmax over axis {axis} of the answers {shape}",
                    f"over the last axis: the {shape[-1]} ids of each token",
                    "it runs over the tokens (or the rows), so that every answer depends on later ones",
                    "log_softmax(dim=-1)",
                    "log_probs.exp().sum(-1)  # must be 1 at every token",
                    explains=frozenset("causality batch cached loss shift overfit".split()) | {"label padding"},
                )
            ]
    return []


def _heads(e: Exam) -> list[Finding]:
    p = e.p
    ids = e.ids[:1]
    for t in (1, p.tokens - 2):
        for one, two in zip(*(e.traced(p.model, x).heads for x in (ids, p.other(ids, t))), strict=False):
            if p.tokens not in one.q.shape[:-1] or p.tokens not in one.k.shape[:-1]:
                continue  # of the source
            pairs = {"q": (one.q, two.q), "k": (one.k, two.k)}
            if one.v is not None and two.v is not None and one.v.shape == one.q.shape == one.k.shape:
                pairs["v"] = (one.v, two.v)
            found = {name: _moved(a, b, p.tokens, p.allowed) for name, (a, b) in pairs.items()}
            if None in found.values() or sum(x[1] for x in found.values() if x) > len(found) * _rows(one.q, p.tokens):
                found = {n: x for n, x in found.items() if x and x[1] <= _rows(pairs[n][0], p.tokens)}
            for name, moved in found.items():
                if moved is not None and len(moved[0]) > 1:
                    return [_split(one.place, name, t, moved[0])]
            break
    return _merged(e) or _silent_heads(e)


def _moved(a: Tensor, b: Tensor, tokens: int, allowed: float) -> tuple[list[int], int] | None:
    """The tokens at which a projection moved, and how many (head, token) pairs; None where that is not to be told.

    A wrong split moves as many pairs as a right one; more of them are another matter.
    """
    if a.shape != b.shape or a.ndim < 3:
        return None
    moved = ((a - b).abs() > allowed).any(-1)
    axes = [i for i in range(moved.ndim) if moved.shape[i] == tokens]
    if len(axes) != 1:
        return None
    at = moved.transpose(0, axes[0]).reshape(tokens, -1).any(1)
    return at.nonzero().flatten().tolist(), int(moved.sum())


def _rows(x: Tensor, tokens: int) -> int:
    """How many (head, token) pairs belong to one token."""
    return x[..., 0].numel() // tokens


def _split(place: str, name: str, t: int, at: list[int]) -> Finding:
    return Finding(
        "heads",
        "error",
        place,
        f"changing token {t} moved {name} at tokens {at}",
        f"at token {t} alone",
        "the heads are split by view alone, which deals out tokens as if they were heads",
        "x.view(B, T, H, K).transpose(1, 2), not x.view(B, H, T, K)",
        "permute the tokens, without positions: the output must be permuted alike",
        explains=frozenset({"causality", "padding", "positions", "batch", "cached", "scale", "length", "overfit"}),
    )


def _merged(e: Exam) -> list[Finding]:
    """The context of token t reaches the attention's output at t alone."""
    p = e.p
    outs: list[tuple[int, Tensor]] = []  # how many attentions ran before, and what a module said then

    def keep(m: object, a: object, out: object) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if isinstance(out, Tensor) and out.ndim == 3 and out.shape[1] == p.tokens and out.requires_grad:
            outs.append((len(trace.heads), out))

    handles = [m.register_forward_hook(keep) for m in p.model.modules()]
    try:
        with torch.enable_grad(), traced(p.model) as trace:
            final = p(e.ids[:1], grad=True)
    finally:
        for handle in handles:
            handle.remove()
    if not trace.heads:
        return []
    for i, h in enumerate(trace.heads):
        context = h.context
        if context is None or not context.requires_grad:
            continue
        axes = [n for n in range(context.ndim - 1) if context.shape[n] == p.tokens]
        if len(axes) != 1:
            continue
        t = 2
        g: Tensor | None = None
        after = [out for n, out in outs if n == i + 1][:4]  # before the next attention
        for out in [*after, *([final] if final.shape[1] == p.tokens and i + 1 == len(trace.heads) else [])]:
            (g,) = grads(out[:, t].double().pow(2).sum() + out[:, t].sum(), [context], keep=True)
            if g is not None:
                break  # the first that has read the context
        if g is None:
            continue
        others = tuple(i for i in range(g.ndim) if i != axes[0])
        at = (g.abs().amax(others) > 1e-12).nonzero().flatten().tolist()
        if at and at != [t]:
            return [
                Finding(
                    "heads",
                    "error",
                    h.place,
                    f"the attention's output at token {t} is made of what tokens {at} gathered",
                    f"of token {t} alone",
                    "the heads are merged without moving them back beside their token",
                    "context.transpose(1, 2).reshape(B, T, H * K), not context.reshape(B, T, H * K)",
                    explains=frozenset({"causality", "padding", "positions", "batch", "cached", "overfit"}),
                )
            ]
    return []


def _silent_heads(e: Exam) -> list[Finding]:
    """Every head's context moves the output."""
    p = e.p
    with torch.enable_grad(), traced(p.model) as trace:
        final = p(e.ids[:1], grad=True)
    contexts = [h for h in trace.heads if h.context is not None and h.context.requires_grad and h.context.ndim == 4]
    if not contexts:
        return []
    weight = torch.randn(final.shape, generator=torch.Generator().manual_seed(3)).to(final)
    for h, g in zip(contexts, grads((final * weight).sum(), [h.context for h in contexts]), strict=True):  # type: ignore[misc]
        if g is None or h.context is None:
            continue
        axis = next((i for i in (1, 2) if h.context.shape[i] != p.tokens), None)
        if axis is None or h.context.shape[axis] < 2 or h.context.shape[3 - axis] != p.tokens:
            continue
        size = g.abs().amax(tuple(i for i in range(4) if i != axis))
        if bool((size == 0).any()) and bool((size > 0).any()):
            dead = (size == 0).nonzero().flatten().tolist()
            return [
                Finding(
                    "heads",
                    "error",
                    h.place,
                    f"heads {dead} of {len(size)} have no influence on the output",
                    "every head has some",
                    "not all heads are written back after attention",
                    "merge all heads: context.transpose(1, 2).reshape(B, T, H * K)",
                )
            ]
    return []


SCALE = Probe("scale", "scores are divided by √K", _scale, seen)
SOFTMAX = Probe("softmax axis", "weights sum to 1 over the keys", _softmax, seen)
HEADS = Probe("heads", "heads are split and merged beside their token", _heads, seen)
