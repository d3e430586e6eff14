"""Properties of what a model answers: the same thing asked another way gives the same numbers.

    causal    later tokens changed: earlier outputs stay           batch    a row among others and alone
    cached    token by token, in chunks, copied, rows picked       fused    each kernel and the formula
    padded    padding left, right, in the middle                   bf16     near the same in lower precision
    eval      the same call twice

Each returns what it tried and how far off the worst number was, and raises `Broken` with the numbers otherwise.
Shapes: ids (B, T); logits (B, T, V).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from brickformer.attend import Attend, Backend
from brickformer.errors import StateError
from brickformer.mask import Span
from brickformer.models import EncoderDecoderModel
from brickformer.proof.subject import Broken, Subject, number, short, worst
from brickformer.state import StackState

ROUNDING: Final[dict[torch.dtype, float]] = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Off by so much of the size of an output, at half of the tokens (the others may meet a close call of a router)."""


@torch.no_grad()
def causal(s: Subject) -> str:
    """Tokens after t changed: the outputs up to t stay."""
    ids = s.ids(1)
    calm, most = s.say(ids), 0.0
    other = (ids + 3).remainder(s.side.spec.vocab)
    for t in range(s.tokens - 1):
        shaken = s.say(torch.cat([ids[:, : t + 1], other[:, t + 1 :]], 1))
        off, at = worst(shaken[:, : t + 1], calm[:, : t + 1], f"outputs up to {t} after a change of later tokens")
        if off > s.allowed:
            raise Broken(_leak(s, ids, other, at, t))
        most = max(most, off)
    return f"later tokens changed at {s.tokens - 1} places: off by {number(most)}"


def _leak(s: Subject, ids: Tensor, other: Tensor, at: int, t: int) -> str:
    """Which single token does it."""
    calm = s.say(ids)
    for later in range(t + 1, s.tokens):
        one = ids.clone()
        one[:, later] = other[:, later]
        off, at_one = worst(s.say(one)[:, : t + 1], calm[:, : t + 1], f"outputs after a change of token {later}")
        if off > s.allowed:
            return f"changing token {later} changed the output at token {at_one} by {number(off)}, {_allowed(s)}"
    return f"changing the tokens after {t} changed the output at token {at}, {_allowed(s)}"


def _allowed(s: Subject) -> str:
    return f"allowed {s.allowed:g}"


@torch.no_grad()
def cached(s: Subject) -> str:
    """Fed to a state token by token, in chunks, copied, its rows picked: the outputs of one full call."""
    tokens, most = s.tokens, 0.0
    half = max(1, tokens // 2)
    ids = s.ids(2)
    whole = s.say(ids)
    ways = {"token by token": [1] * tokens, "a prompt, then token by token": [half] + [1] * (tokens - half)}
    if tokens > 3:
        ways["in chunks"] = [2, 1, tokens - 3]
    for name, sizes in ways.items():
        state = s.empty(2)
        most = max(most, _fed(s, ids, state, sizes, whole, name))
    if tokens > half:
        most = max(most, *_copied(s, ids, whole, half))
    return f"{', '.join(ways)}, copied, rows picked, rewound: off by {number(most)}"


def _copied(s: Subject, ids: Tensor, whole: Tensor, half: int) -> Iterator[float]:
    """States that part ways: a copy goes another way, rows are picked, the last tokens are taken back."""
    one = [1] * (s.tokens - half)
    state, rows = s.empty(2), [1, 0, 1]
    s.say(ids[:, :half], state=state)
    other, picked = state.clone(), state.clone()
    turned = torch.cat([ids[:, :half], s.ids(2, seed=4)[:, half:]], 1)
    picked.select(torch.tensor(rows))
    yield _fed(s, ids[rows], picked, one, whole[rows], f"rows {rows} picked")
    said = s.say(turned)
    for sizes in ([1], one[1:]):  # in turns: whatever they share, one of them finds overwritten
        yield _fed(s, turned, other, sizes, said, "a copy that goes another way")
        yield _fed(s, ids, state, sizes, whole, "the state that was copied")
    try:
        other.rewind(half)
    except StateError:  # a summary of the tokens cannot; it says so
        return
    yield _fed(s, ids, other, one, whole, f"rewound to token {half}")


def _fed(s: Subject, ids: Tensor, state: StackState, sizes: list[int], whole: Tensor, what: str) -> float:
    most = 0.0
    for size in sizes:
        begin = state.length
        end = begin + size
        got = s.say(ids[:, begin:end], state=state)
        off, at = worst(got, whole[:, begin:end], f"{what}: tokens {begin} to {end - 1}")
        if off > s.allowed:
            raise Broken(
                f"{what}: with a state the output at token {begin + at} is off by {number(off)} from that of one full "
                f"call, {_allowed(s)}"
            )
        most = max(most, off)
    return most


@torch.no_grad()
def padded(s: Subject) -> str:
    """Padding left, right and in the middle changes no real token; nor does it before tokens that are decoded."""
    tokens, most = s.tokens, 0.0
    cut = max(1, tokens // 3)
    kinds = {"left": slice(0, cut), "right": slice(tokens - cut, tokens), "in the middle": slice(cut, 2 * cut)}
    ids = s.ids(1)
    for name, where in kinds.items():
        valid = torch.ones(1, tokens, dtype=torch.bool)
        valid[:, where] = False
        if not bool(valid.any()):
            continue
        alone = s.say(ids[valid][None])
        off, at = worst(s.say(ids, Span.of(ids, valid=valid))[valid], alone[0], f"padding {name}")
        if off > s.allowed:
            raise Broken(f"{cut} padded {name}: real token {at} is off by {number(off)}, {_allowed(s)}")
        most = max(most, off)
    if s.decodes and tokens > 5:
        most = max(most, *(_decoded_after(s, ids, name) for name in kinds))
    if isinstance(s.model, EncoderDecoderModel):
        most = max(most, _source_padded(s, s.model, ids))
    return f"{cut} of {tokens} tokens, {', '.join(kinds)}: off by {number(most)}"


def _decoded_after(s: Subject, ids: Tensor, name: str) -> float:
    """A prompt with padding, then one token at a time: as after the prompt without it."""
    prompt, most = s.tokens // 2, 0.0
    begin = {"left": 0, "in the middle": 1, "right": prompt - 2}[name]
    valid = torch.ones(1, s.tokens, dtype=torch.bool)
    valid[:, begin : begin + 2] = False
    alone = s.say(ids[valid][None])
    state = s.empty(1)
    s.say(ids[:, :prompt], Span.of(ids[:, :prompt], valid=valid[:, :prompt]), state)
    for t in range(prompt, s.tokens):
        got = s.say(ids[:, t : t + 1], state=state)
        off, _ = worst(got, alone[:, t - 2 : t - 1], f"decoded after a prompt padded {name}")
        if off > s.allowed:
            raise Broken(f"decoded after a prompt padded {name}: token {t} is off by {number(off)}, {_allowed(s)}")
        most = max(most, off)
    return most


def _source_padded(s: Subject, model: EncoderDecoderModel, ids: Tensor) -> float:
    src, _ = s.source(1)
    valid = torch.ones_like(src, dtype=torch.bool)
    valid[:, : src.shape[1] // 3] = False
    if not bool(valid.all()) and bool(valid.any()):
        short = model.encode(src[valid][None])
        off, at = worst(model.decode(ids, model.encode(src, valid)), model.decode(ids, short), "source padded left")
        if off > s.allowed:
            raise Broken(f"source padded left: target token {at} is off by {number(off)}, {_allowed(s)}")
        return off
    return 0.0


@torch.no_grad()
def batch(s: Subject) -> str:
    """A row says the same among others and alone."""
    ids, most = s.ids(3), 0.0
    memory = s.memory(3)
    together = s.say(ids, memory=memory)
    for r in range(3):
        own = None if memory is None else memory.select(torch.tensor([r]))
        off, at = worst(together[r], s.say(ids[r : r + 1], memory=own)[0], f"row {r} alone")
        if off > s.allowed:
            raise Broken(f"row {r} of 3 and alone: token {at} is off by {number(off)}, {_allowed(s)}")
        most = max(most, off)
    return f"3 rows together and alone: off by {number(most)}"


def attends(s: Subject) -> list[Attend]:
    """Every place where queries meet keys."""
    return [m for m in s.model.modules() if isinstance(m, Attend)]


@torch.no_grad()
def fused(s: Subject) -> str:
    """The kernel that each attention takes says what the formula written out says; full and padded."""
    found = attends(s)
    own: list[Backend] = [a.backend for a in found]
    others: list[Backend] = [_other(s, a) for a in found]
    ids = s.ids(2)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[1, : s.tokens // 3] = False
    spans = {"full": None, "padded": Span.of(ids, valid=valid)}
    expected = [s.say(ids, at)[valid] for at in spans.values()]
    most = 0.0
    for a, b in zip(found, others, strict=True):
        a.backend = b
    try:
        for name, at, one in zip(spans, spans.values(), expected, strict=True):
            off, _ = worst(s.say(ids, at)[valid], one, f"another kernel, {name}")
            if off > s.allowed:
                kernels = f"{', '.join(sorted(set(own)))} against {', '.join(sorted(set(others)))}"
                raise Broken(f"{kernels}, {name}: off by {number(off)}, {_allowed(s)}")
            most = max(most, off)
    finally:
        for a, b in zip(found, own, strict=True):
            a.backend = b
    return f"attentions: {len(found)}, full and padded: off by {number(most)}"


def _other(s: Subject, attend: Attend) -> Backend:
    if attend in s.flex:
        return "flex"
    return "sdpa" if attend.backend == "reference" and attend.softcap is None else "reference"


@torch.no_grad()
def low_precision(s: Subject) -> str:
    """In float32 and bfloat16 the model answers in its own type, finitely, and near what it says in float64."""
    ids, said = s.ids(2), []
    expected = s.say(ids)
    size = expected.norm(dim=-1).clamp_min(float(expected.norm(dim=-1).median()))
    for dtype, allowed in ROUNDING.items():
        low = s.again().to(dtype)
        name = str(dtype).removeprefix("torch.")
        got = s.say(ids, model=low)
        if got.dtype is not dtype:
            raise Broken(f"a model in {name} answers in {str(got.dtype).removeprefix('torch.')}")
        if not bool(got.isfinite().all()):
            raise Broken(f"{name}: {int((~got.isfinite()).sum())} of {got.numel()} numbers are not finite")
        off = float(((got.to(expected.dtype) - expected).norm(dim=-1) / size).median())
        if off > allowed:
            raise Broken(f"{name}: off by {number(off)} of the size of an output, allowed {allowed:g}")
        said.append(f"{name} off by {number(off)}")
    return f"of the size of an output: {', '.join(said)}"


@torch.no_grad()
def eval_mode(s: Subject) -> str:
    """In eval mode the same call gives the same bits and leaves parameters and buffers alone."""
    ids = s.ids(2)
    held = {name: x.clone() for name, x in [*s.model.named_parameters(), *s.model.named_buffers()]}
    one, two = s.say(ids), s.say(ids)
    off, at = worst(two, one, "the same call again")
    if off > 0.0 or not torch.equal(one, two):
        raise Broken(f"the same call twice: token {at} is off by {number(off)}, allowed 0")
    for name, x in [*s.model.named_parameters(), *s.model.named_buffers()]:
        if not torch.equal(x, held[name]):
            raise Broken(f"a call in eval mode changed {short(name)}")
    return "two calls: the same bits"
