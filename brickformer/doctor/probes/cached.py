"""What is decoded step by step is what reading the whole says: by a cache, by the model's own generate().

A cache is found by its argument (past_key_values, cache, ...) and asked at every step; generate() must choose the
tokens that the forward chooses on the same prefix.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.outputs import differ
from brickformer.doctor.report import Finding
from brickformer.doctor.subject import wants
from brickformer.models import EncoderModel


def _why_not(e: Exam) -> str | None:
    p = e.p
    if p.kind == "encoder" or p.width or p.shape == "pooled":
        return "nothing is decoded"
    if p.ours or _argument(e) or p.subject.decode is not None or own_generate(e) is not None:
        return None
    return "no cache and no decode function known (Subject(decode=...))"


def _argument(e: Exam) -> str | None:
    names = [
        n for n in e.p.signature.named("cache") if not any(w in n for w in ("use", "position", "hidden", "output"))
    ]
    return names[0] if names and e.p.kind == "decoder" else None


def _run(e: Exam) -> list[Finding]:
    if e.p.ours:
        return _ours(e)
    found: list[Finding] = []
    if _argument(e):
        found = _steps(e, _argument(e) or "")
    if not found and (e.p.subject.decode is not None or own_generate(e) is not None):
        found = _decoded(e)
    return found


def _ours(e: Exam) -> list[Finding]:
    p = e.p
    model: Any = p.model
    if isinstance(model, EncoderModel):
        return []
    full = p(e.ids)
    with torch.no_grad():
        state = model.init_state(2, p.tokens)
        steps = []
        memory = model.encode(p.source(2)) if p.kind == "encoder_decoder" else None
        for t in range(p.tokens):
            one = e.ids[:, t : t + 1]
            steps.append(model.decode(one, memory, None, state) if memory is not None else model(one, None, state))
    return _compare(e, torch.cat(steps, 1), full, "state")


def _steps(e: Exam, name: str) -> list[Finding]:
    p = e.p
    flags = {n: True for n in p.signature.named("cache") if n.startswith("use")}
    full = p(e.ids)
    past: Any = None
    steps = []
    before: list[dict[str, Any]] = []
    with torch.no_grad():
        for t in range(p.tokens):
            given = {name: past} if past is not None or name in p.signature.required else {}
            kwargs: dict[str, Any] = {p.signature.first("ids") or "ids": e.ids[:, t : t + 1], **given, **flags}
            p.budget.tick()
            before.append(kwargs)
            value = p.signature.given(p.model, kwargs)
            steps.append(p.arranged(value, 2, 1))
            past = getattr(value, name, None)
            if past is None and isinstance(value, tuple | list) and len(value) > 1:
                past = value[1]
            if past is None:
                raise LookupError(f"no new {name} in what the model returned (Subject(decode=...))")
    return _compare(e, torch.cat(steps, 1), full, name, before)


def _begins(e: Exam, before: list[dict[str, Any]], t: int) -> str:
    """The module that says something else at step t than it said of token t before."""

    def cut(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x[:, t : t + 1], y) if x.ndim == 3 and x.shape[1] == e.p.tokens else (x, y)

    def step() -> None:
        with torch.no_grad():
            e.p.signature.given(e.p.model, before[t])

    def wrong(x: Tensor, y: Tensor) -> bool:
        return x.ndim == 3 and bool((differ(x, y) > e.p.allowed * 10).any())

    return e.begins(lambda: e.p(e.ids), step, wrong, cut)


def _compare(
    e: Exam, steps: Tensor, full: Tensor, name: str, before: list[dict[str, Any]] | None = None
) -> list[Finding]:
    moved = differ(full, steps).amax(0)
    if float(moved.max()) <= max(e.p.allowed, 1e-8) * 10:
        return []
    t = int((moved > e.p.allowed * 10).nonzero()[0])
    return [
        Finding(
            "cached",
            "error",
            "" if not before else _begins(e, before, t),
            f"token by token with {name}, step {t} is off by {number(moved[t])} (worst {number(moved.max())})",
            "0: the same as reading all tokens at once",
            "positions start again at 0, keys are kept wrongly, or is_causal=True hides the past from one query"
            if t
            else "the first step differs already: another path is taken with a cache",
            "with a cache of n tokens the next one sits at position n and sees all n + 1 keys",
            "compare model(x[:, :t+1])[:, -1] with the step t",
        )
    ]


def own_generate(e: Exam) -> Any:
    """The model's own generate(ids, new, ...), told to be greedy."""
    model = e.p.subject.model
    function = getattr(type(model), "generate", None)
    if function is None or e.p.kind != "decoder" or e.p.subject.call is not None:
        return None
    try:
        names = [p.name for p in inspect.signature(function).parameters.values()][1:]
    except (TypeError, ValueError):
        return None
    if "kwargs" in names or len(names) < 2:
        return None  # the machinery of a library
    count = next((n for n in names if "new" in n or n in ("n", "steps", "max_tokens", "length")), None)
    if count is None:
        return None
    greedy: dict[str, Any] = {}
    if "do_sample" in names:
        greedy["do_sample"] = False
    elif "top_k" in names:
        greedy["top_k"] = 1
    elif "temperature" in names:
        greedy["temperature"] = 1e-6
    elif "sample" in names:
        greedy["sample"] = False
    return lambda m, ids, new: m.generate(ids, **{count: new}, **greedy)


def _given(e: Exam) -> Any:
    """The user's decode; one that takes a mask of padding is told that there is none."""
    decode = e.p.subject.decode
    if decode is None or e.p.kind == "encoder_decoder" or not wants(decode, 4):
        return decode
    return lambda m, ids, new: decode(m, ids, new, torch.ones_like(ids).bool())


def generating(e: Exam) -> Any:
    """How the model decodes, greedily: decode(model, ids, new); None where nobody knows."""
    return _given(e) or own_generate(e)


def _decoded(e: Exam) -> list[Finding]:
    p = e.p
    decode = generating(e)
    sure = p.subject.decode is not None
    new = p.tokens - 2
    both = p.kind == "encoder_decoder"
    src = p.source(6)
    prompt = p.draw(6, 2)
    said: list[Tensor] = []
    with torch.no_grad(), heard(e, said):
        first = decode(p.model, src if both else prompt, new)
    with torch.no_grad():
        again = decode(p.model, src if both else prompt, new)
    p.model.eval()
    if isinstance(first, tuple):
        first, told = first[0], first[1]
        again = again[0]
        if bool((first == again).all()) and (found := _told(e, first, told, None if both else prompt, src, new)):
            return found
    if not isinstance(first, Tensor):
        return []
    if first.shape != again.shape or bool((first != again).any()):
        if not sure:
            return []  # it samples
        return [_path("two greedy runs on one prompt gave different tokens", "dropout is on, or a cache is left over")]
    got = first
    again_said = said if len(said) == new else []
    if both:
        start = got
    else:
        start = got if got.shape[1] > new else torch.cat([prompt, got], 1)
        if bool((start[:, :2] != prompt).any()):
            return []
    low = 1 if both else 2
    for t in range(low, start.shape[1]):
        prefix = start[:, :t]
        ended = prefix.eq(-1 if p.target_pad is None else p.target_pad).any(1)  # what comes after is nobody's business
        if bool(ended.all()):
            break
        heard_now: list[Tensor] = []
        with torch.no_grad(), heard(e, heard_now):
            logits = p(prefix, src=src)[:, -1]
        if t - low < len(again_said) and heard_now and heard_now[-1].shape == again_said[t - low].shape:
            moved = float(differ(heard_now[-1], again_said[t - low])[~ended].max())
            if moved > max(p.allowed, 1e-8) * 10:
                return [
                    _path(f"at step {t - low} the logits differ from those of the forward by {number(moved)}", _OTHER)
                ]
        chosen = start[:, t]
        best = logits.amax(-1)
        short = (best - logits.gather(1, chosen[:, None])[:, 0]).where(~ended, 0.0)
        if float(short.max()) > max(1e-6, p.allowed * 100) * max(1.0, float(best.abs().max())):
            row = int(short.argmax())
            return [
                _path(
                    f"step {t - low} chose id {int(chosen[row])}, which the forward puts {number(short[row])} below "
                    f"id {int(logits[row].argmax())}",
                    _OTHER,
                )
            ]
    return []


def _told(e: Exam, ids: Tensor, told: Tensor, prompt: Tensor | None, src: Tensor | None, new: int) -> list[Finding]:
    """What decode says of each step (B, new, V), probabilities or logits, is what the forward says."""
    p = e.p
    sums = told.sum(-1)
    shares = told if bool(((sums - 1).abs() < 1e-4).all()) and float(told.min()) >= 0 else told.softmax(-1)
    whole = ids if prompt is None or ids.shape[1] > new else torch.cat([prompt, ids], 1)
    begin = whole.shape[1] - shares.shape[1]
    for t in range(shares.shape[1]):
        with torch.no_grad():
            own = p(whole[:, : begin + t], src=src)[:, -1].softmax(-1)
        moved = float((own - shares[:, t]).abs().max())
        if moved > 1e-6:
            return [_path(f"at step {t} the probabilities differ from those of the forward by {number(moved)}", _OTHER)]
    return []


_OTHER = "decoding takes another way than training: another mask, scale, position, head, or the cache"


@contextmanager
def heard(e: Exam, into: list[Tensor]) -> Iterator[None]:
    """The last token's logits, each time the last module that gives V features speaks."""
    p = e.p
    last: list[nn.Module] = []

    def see(m: nn.Module, a: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.ndim >= 2 and out.shape[-1] == p.features:
            last.append(m)

    handles = [m.register_forward_hook(see) for m in p.model.modules() if not list(m.children())]
    try:
        p(e.ids)
    finally:
        for handle in handles:
            handle.remove()
    if not last or p.features not in (p.vocab, p.target_vocab):
        yield
        return

    def keep(m: nn.Module, a: Any, out: Any) -> None:
        into.append((out[:, -1] if out.ndim == 3 else out).detach().clone())

    handle = last[-1].register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def _path(measured: str, cause: str) -> Finding:
    return Finding(
        "cached",
        "error",
        "",
        measured,
        "greedy decoding chooses the argmax of the forward on the same prefix",
        cause,
        "decode by the same function that training calls; compare logits at every step",
        "model(prefix)[:, -1].argmax()  # must be the next id",
        "likely",
    )


PROBE = Probe("cached", "decoding says what reading says", _run, _why_not)
