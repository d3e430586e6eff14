"""The properties every model owes, each tried on a small `Subject`.

    causal       later tokens changed: earlier outputs stay             window     tokens out of reach changed: likewise
    cached       token by token and in chunks, from a state             fused      every kernel says what the formula says
    padded       padding left, right, in the middle                     bf16       near the same in lower precision
    batch        a row among others                                     gradients  every parameter gets one
    eval         the same call twice                                    saved      through a file, into another model
    first loss   of a fresh model: ln V

A property returns what it tried and how far off the worst number was; it raises `Broken` with the numbers otherwise.
`why_not` says when it does not apply.

Shapes: ids (B, T); logits (B, T, V); x (B, T, D).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from brickformer.attend import Attend, Backend
from brickformer.linear import FusedLinear
from brickformer.mask import Span
from brickformer.mixers.cross import Memory
from brickformer.models import EncoderDecoderModel
from brickformer.moe import Routing, TopKRouter
from brickformer.proof.subject import Broken, Subject, number, off_flex, worst
from brickformer.proof.windows import has_window, window
from brickformer.state import StackState

CHANCE: Final = 0.1
"""How far the first loss may be from ln V, as a part of it: 0.02 nat by design, the rest for a few hundred tokens."""
ROUNDING: Final[dict[torch.dtype, float]] = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Off by so much of the size of an output, at half of the tokens (the others may meet a close call of a router)."""

CHOSEN: Final = 8
"""Tokens that have to choose an expert before it owes a gradient."""


@torch.no_grad()
def causal(s: Subject) -> str:
    """Tokens after t changed: the outputs up to t stay."""
    ids = s.ids(1)
    calm, other, most = s.say(ids), (ids + 3) % s.side.spec.vocab, 0.0
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
        state = s.model.init_state(2, tokens)
        most = max(most, _fed(s, ids, state, sizes, whole, name))
    state = s.model.init_state(2, tokens)
    s.say(ids[:, :half], state=state)
    twin = state.clone()
    twin.select(torch.tensor([1, 0, 1]))
    picked = ids[[1, 0, 1]]
    if tokens > half:
        most = max(most, _fed(s, picked, twin, [1] * (tokens - half), whole[[1, 0, 1]], "a copy, rows 1, 0, 1"))
        most = max(most, _fed(s, ids, state, [tokens - half], whole, "what a copy was taken of"))
    return f"{', '.join(ways)}, copied, rows picked: off by {number(most)}"


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
        if s.decodes and name == "left" and tokens > cut + 1:
            most = max(most, _decoded_after_padding(s, ids, valid, alone))
    if isinstance(s.model, EncoderDecoderModel):
        most = max(most, _source_padded(s, s.model, ids))
    return f"{cut} of {tokens} tokens, {', '.join(kinds)}: off by {number(most)}"


def _decoded_after_padding(s: Subject, ids: Tensor, valid: Tensor, alone: Tensor) -> float:
    prompt = s.tokens - 2 if s.tokens > 3 else s.tokens - 1
    state, most = s.model.init_state(1, s.tokens), 0.0
    s.say(ids[:, :prompt], Span.of(ids[:, :prompt], valid=valid[:, :prompt]), state)
    for t in range(prompt, s.tokens):
        got = s.say(ids[:, t : t + 1], state=state)
        real = t - int((~valid).sum())
        off, _ = worst(got, alone[:, real : real + 1], "decoded after a prompt padded left")
        if off > s.allowed:
            raise Broken(f"decoded after a prompt padded left: token {t} is off by {number(off)}, {_allowed(s)}")
        most = max(most, off)
    return most


def _source_padded(s: Subject, model: EncoderDecoderModel, ids: Tensor) -> float:
    src, _ = s.source(1)
    valid = torch.ones_like(src, dtype=torch.bool)
    valid[:, : src.shape[1] // 3] = False
    if not bool(valid.all()) and bool(valid.any()):
        short: Memory = model.encode(src[valid][None])
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


def _attends(s: Subject) -> list[Attend]:
    return [m for m in s.model.modules() if isinstance(m, Attend)]


@torch.no_grad()
def fused(s: Subject) -> str:
    """The kernel that each attention takes says what the formula written out says; full and padded."""
    attends = _attends(s)
    own: list[Backend] = [a.backend for a in attends]
    others: list[Backend] = [_other(s, a) for a in attends]
    ids = s.ids(2)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[1, : s.tokens // 3] = False
    spans = {"full": None, "padded": Span.of(ids, valid=valid)}
    expected = [s.say(ids, at)[valid] for at in spans.values()]
    most = 0.0
    for a, b in zip(attends, others, strict=True):
        a.backend = b
    try:
        for name, at, one in zip(spans, spans.values(), expected, strict=True):
            off, _ = worst(s.say(ids, at)[valid], one, f"another kernel, {name}")
            if off > s.allowed:
                kernels = f"{', '.join(sorted(set(own)))} against {', '.join(sorted(set(others)))}"
                raise Broken(f"{kernels}, {name}: off by {number(off)}, {_allowed(s)}")
            most = max(most, off)
    finally:
        for a, b in zip(attends, own, strict=True):
            a.backend = b
    return f"{len(attends)} attentions, full and padded: off by {number(most)}"


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


def gradients(s: Subject) -> str:
    """Every parameter, and each projection inside a fused one, gets a finite gradient that is not all zero."""
    named = [(name, p) for name, p in s.model.named_parameters() if p.requires_grad]
    reached: dict[str, bool] = {name: False for name, _ in named}
    with _choices(s.model) as choices, torch.enable_grad():
        for seed in range(4):  # what one draw of tokens does not reach, another may
            out = s.say(s.ids(8, seed=seed))
            weight = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(9), dtype=torch.float64)
            got = torch.autograd.grad((out * weight.to(out)).sum(), [p for _, p in named], allow_unused=True)
            for (name, _), grad in zip(named, got, strict=True):
                if grad is not None and not bool(grad.isfinite().all()):
                    raise Broken(f"the gradient of {_short(name)} is not finite")
                reached[name] = reached[name] or (grad is not None and _all_parts(s.model, name, grad))
            if all(reached.values()):
                break
    idle = tuple(name for name, count in choices.items() if count < CHOSEN)
    dead = [name for name, ok in reached.items() if not ok and not name.startswith(idle)]
    if dead:
        more = f" (and {len(dead) - 1} more)" if len(dead) > 1 else ""
        raise Broken(f"{_short(dead[0])}{more} gets no gradient, or one of zeros only")
    return f"{len(named)} parameters, {sum(p.numel() for _, p in named):,} numbers"


def _all_parts(model: nn.Module, name: str, grad: Tensor) -> bool:
    owner = model.get_submodule(name.rpartition(".")[0])
    pieces = grad.split(owner.parts) if isinstance(owner, FusedLinear) and grad.ndim == 2 else (grad,)
    return all(bool(piece.any()) for piece in pieces)


@contextmanager
def _choices(model: nn.Module) -> Iterator[dict[str, int]]:
    """How many tokens chose each expert while this was open, by the beginning of its parameters' names."""
    chosen: dict[str, int] = {}

    def note(name: str, routing: Routing) -> None:
        for e, load in enumerate(routing.load.tolist()):
            chosen[f"{name}.experts.{e}."] = chosen.get(f"{name}.experts.{e}.", 0) + load

    hooks = [
        m.register_forward_hook(lambda router, args, out, name=name: note(name.removesuffix(".router"), out))
        for name, m in model.named_modules()
        if isinstance(m, TopKRouter)
    ]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def _short(name: str) -> str:
    """The end of a parameter's name, inside its layer."""
    return name.partition("stack.layers.")[2].partition(".")[2] or name


@torch.no_grad()
def saved(s: Subject) -> str:
    """Written to safetensors and read into another model, built from the text of the spec: the same bits."""
    read = type(s.spec).from_json(s.spec.to_json())
    if read != s.spec:
        raise Broken("the spec comes back from JSON as another one")
    torch.manual_seed(4)  # not the seed of the model: what is not in the file must not come back by chance
    other = read.build().to(next(s.model.parameters()).dtype).eval()
    off_flex(other)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_model(s.model, str(path))
        size = path.stat().st_size
        missing, unexpected = load_model(other, path, strict=False)
    if missing or unexpected:
        raise Broken(f"in the model but not in the file: {sorted(missing)}, in the file only: {sorted(unexpected)}")
    ids = s.ids(2)
    off, at = worst(s.say(ids, model=other), s.say(ids), "the loaded model")
    if off > 0.0:
        raise Broken(
            f"the loaded model is off by {number(off)} at token {at}, allowed 0: a tensor is not in the file. Register it "
            "as a parameter or a buffer"
        )
    return f"{size:,} bytes of safetensors into another model: the same bits"


@torch.no_grad()
def first_loss(s: Subject) -> str:
    """Fresh from its spec, the loss on random targets is near ln V: nothing is preferred before anything is learnt."""
    model = s.fresh()
    ids, targets = s.ids(8), s.ids(8, seed=7)
    loss = float(F.cross_entropy(s.say(ids, model=model).flatten(0, 1), targets.flatten()))
    chance = math.log(s.side.spec.vocab)
    if not abs(loss / chance - 1.0) <= CHANCE:
        raise Broken(f"the first loss is {loss:.4g}, ln {s.side.spec.vocab} is {chance:.4f}, allowed {CHANCE:.0%} apart")
    return f"{loss:.3f}, ln {s.side.spec.vocab} is {chance:.3f}"


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
            raise Broken(f"a call in eval mode changed {_short(name)}")
    return "two calls: the same bits"


# ---- the table ------------------------------------------------------------------------------------------------------


def _not_causal(s: Subject) -> str | None:
    return None if s.causal else f"{s.side.spec.kind}: it sees the future"


def _keeps_no_state(s: Subject) -> str | None:
    return None if s.decodes else f"{s.side.spec.kind}: it keeps no state"


def _no_attention(s: Subject) -> str | None:
    return None if _attends(s) else "no attention"


def _no_head(s: Subject) -> str | None:
    return None if s.side.head is not None else "no head, so no loss of its own"


def _no_window(s: Subject) -> str | None:
    return None if has_window(s) else "no mask has a window"


@dataclass(frozen=True)
class Property:
    """name: in one or two words. says: the sentence. why_not: the reason when a subject does not owe it."""

    name: str
    says: str
    run: Callable[[Subject], str]
    why_not: Callable[[Subject], str | None] = lambda s: None


PROPERTIES: Final = (
    Property("eval", "eval is deterministic", eval_mode),
    Property("batch", "batch == single", batch),
    Property("causal", "causal", causal, _not_causal),
    Property("window", "unseen beyond a window", window, _no_window),
    Property("cached", "cached == full", cached, _keeps_no_state),
    Property("padded", "padded == unpadded", padded),
    Property("fused", "fused == reference", fused, _no_attention),
    Property("bf16", "bf16 close to fp32", low_precision),
    Property("gradients", "gradients reach everything", gradients),
    Property("saved", "save → load equal", saved),
    Property("first loss", "first loss near ln V", first_loss, _no_head),
)
