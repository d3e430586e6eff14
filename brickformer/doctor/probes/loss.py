"""The loss: which token each position is trained on, what padding adds, where it starts.

    ∂loss/∂logits[t] = p - onehot(target of t):   negative at the target alone, so it reads off the shift

The offset counts from the ids that were given to the outermost call. Shapes: ids (B, T); logits (B, T, V).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.outputs import parts
from brickformer.doctor.patient import NotAsked
from brickformer.doctor.report import Finding
from brickformer.doctor.trace import Trace, traced


def _has(e: Exam) -> str | None:
    p = e.p
    if p.width:
        return "it reads vectors, not ids"
    if p.subject.loss is None and (p.signature.first("labels") is None or p.ours or p.subject.call is not None):
        return "no loss given: Subject(loss=lambda model, ids: ...)"
    if p.shape == "pooled":
        return "one answer a row"
    return None


def _pair(e: Exam, rows: int, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    """ids whose tokens differ from each other where the vocabulary allows."""
    p = e.p
    pool = p.pool()
    g = torch.Generator().manual_seed(seed)
    many = [pool[torch.randperm(len(pool), generator=g)][: p.tokens] for _ in range(rows)]
    short = p.tokens > len(pool)
    return (p.draw(rows, seed=seed) if short else torch.stack(many)), p.source(rows, seed)


@dataclass
class Read:
    """A loss, its gradient at the logits (B, T', V), what the model read there (B, T'), and the trace of the run."""

    loss: Tensor
    gradient: Tensor | None
    read: Tensor | None
    trace: Trace


def _gradient(e: Exam, ids: Tensor, src: Tensor | None, model: nn.Module) -> Read:
    """The logits are those of the last module that gave V features; what it read is what a table was asked for."""
    p, rows = e.p, len(ids)
    vocab = (p.target_vocab,) if p.kind == "encoder_decoder" else (p.vocab,)
    kept: list[Tensor] = []
    asked: list[Tensor] = []

    def keep(m: nn.Module, a: object, out: object) -> None:
        for _, x in parts(out):
            if not x.is_floating_point() or not x.requires_grad or x.ndim < 2 or x.shape[-1] not in vocab:
                continue
            if x[..., 0].numel() % rows == 0 and x[..., 0].numel() <= ids.numel():
                kept.append(x)

    def look(m: nn.Module, a: tuple[object, ...]) -> None:
        if a and isinstance(a[0], Tensor) and a[0].ndim == 2 and rows in a[0].shape:
            x = a[0] if a[0].shape[0] == rows and not p.seq_first else a[0].transpose(0, 1)
            if bool((x[:, -1:] == ids).any(1).all()):
                asked.append(x.detach())

    handles = [m.register_forward_hook(keep) for m in model.modules()]
    handles += [m.register_forward_pre_hook(look) for m in model.modules() if isinstance(m, nn.Embedding)]
    try:
        with torch.enable_grad(), traced(model) as trace:
            loss = p.loss(ids, src, model)
            if loss is None or not loss.requires_grad:
                raise NotAsked("the loss has no gradient")
            for x in reversed(kept):
                (g,) = torch.autograd.grad(loss, [x], allow_unused=True, retain_graph=True)
                if g is not None:
                    first = p.seq_first and g.ndim == 3 and g.shape[1] == rows
                    g = (g.transpose(0, 1) if first else g).reshape(rows, -1, g.shape[-1])
                    read = next((r for r in asked if r.shape == g.shape[:2]), None)
                    return Read(loss.detach(), g, read, trace)
    finally:
        for handle in handles:
            handle.remove()
    return Read(loss.detach(), None, None, trace)


def _shift(e: Exam) -> list[Finding]:
    p = e.p
    ids, src = _pair(e, 2)
    run = _gradient(e, ids, src, p.fresh)
    loss, g, trace = run.loss, run.gradient, run.trace
    double = [name for name, stage in trace.losses if stage == "distribution"]
    if double and trace.losses[-1][0] == "cross_entropy":
        return [_double_softmax(loss, p.vocab)]
    if double:
        return [_nll("nll_loss is given probabilities, not log-probabilities", "log_softmax(-1)")]
    if any(name == "nll_loss" and stage in ("", "value") for name, stage in trace.losses):
        return [_nll("nll_loss is given raw scores, not log-probabilities", "F.cross_entropy on the scores")]
    if g is None or p.kind == "encoder":
        return []
    offsets = _offsets(g, ids, run.read)
    given = p.subject.loss is not None
    if not offsets:
        return []
    common = max(set(offsets), key=offsets.count)
    if common == 1 or (common == 0 and not given):
        return [_crossing()] if common == 1 and _rows_touch(e, g, ids, src) else []
    if common < 0 or common > 1 or common == 0:
        return [_offset(common, given)]
    return []


def _offsets(g: Tensor, ids: Tensor, read: Tensor | None) -> list[int]:
    """How far ahead of the token that was read the target of each position is."""
    found = []
    for b in range(len(ids)):
        for t in range(min(g.shape[1], ids.shape[1])):
            row = g[b, t]
            if float(row.abs().max()) == 0 or float(row.min()) >= 0:
                continue
            at = (ids[b] == int(row.argmin())).nonzero().flatten().tolist()
            here = [t] if read is None else (ids[b] == int(read[b, t])).nonzero().flatten().tolist()
            if len(at) == 1 and len(here) == 1:
                found.append(at[0] - here[0])
    return found


def _rows_touch(e: Exam, g: Tensor, ids: Tensor, src: Tensor | None) -> bool:
    """Whether a row is trained on a label of another row."""
    row = g[0, -1] if g.shape[1] == ids.shape[1] else g[0, 0]
    return bool((row < 0).any()) and int(row.argmin()) == int(ids[1, 0]) != int(ids[0, -1])


def _crossing() -> Finding:
    return Finding(
        "shift",
        "error",
        "",
        "the last position of row 0 is trained on the first token of row 1",
        "no target comes from another row",
        "the labels were shifted after they had been flattened",
        "shift first, along time: logits[:, :-1], labels[:, 1:]; then flatten",
    )


def _offset(common: int, given: bool) -> Finding:
    what = {
        0: ("each position is trained on its own token, which it has just read", "the targets are not shifted"),
        2: ("each position is trained on the token after the next", "the targets are shifted twice"),
    }.get(common, (f"each position is trained on the token {common:+d} away", "the shift goes the wrong way"))
    return Finding(
        "shift",
        "error",
        "",
        f"offset {common:+d}: {what[0]}",
        "offset +1: the next token",
        what[1],
        "shift once: loss(logits[:, :-1], ids[:, 1:]), in the data, in the loss or in the model",
        "g = grad(loss, logits); g[0, t].argmin()  # must be ids[0, t + 1]",
        "certain" if given else "likely",
        explains=frozenset({"overfit"}),
    )


def _double_softmax(loss: Tensor, vocab: int) -> Finding:
    floor = math.log(1 + (vocab - 1) / math.e)
    return Finding(
        "loss",
        "error",
        "",
        f"cross_entropy is given probabilities: with {vocab} classes it cannot fall below {floor:.3g}",
        "raw scores (logits): F.cross_entropy takes their softmax itself",
        "softmax before CrossEntropyLoss",
        "remove the softmax at the end of the model; apply it when you sample",
        explains=frozenset({"overfit", "first loss"}),
    )


def _nll(measured: str, fix: str) -> Finding:
    return Finding(
        "loss",
        "error",
        "",
        measured,
        "log-probabilities",
        "the wrong input for this loss",
        fix,
        explains=frozenset({"overfit", "first loss"}),
    )


def _no_pad(e: Exam) -> str | None:
    p = e.p
    pad = p.target_pad if p.kind == "encoder_decoder" else p.pad
    if _has(e):
        return _has(e)
    if p.kind == "encoder":
        return "what its labels are is not known"
    if pad is None:
        return "it was never told which id is padding (Subject(pad=...))"
    return "labels are given by the caller" if p.subject.loss is None else None


def _padding(e: Exam) -> list[Finding]:
    p = e.p
    pad = p.target_pad if p.kind == "encoder_decoder" else p.pad
    assert pad is not None
    ids, src = _pair(e, 2)
    tail = torch.full((2, 2), pad)
    short, long = ids[:, :-2], torch.cat([ids[:, :-2], tail], 1)
    a, b = p.loss(short, src, p.fresh), p.loss(long, src, p.fresh)
    if a is None or b is None:
        return []
    moved = abs(float(a) - float(b)) / max(abs(float(a)), 1e-9)
    if moved > 1e-4:
        return [
            Finding(
                "label padding",
                "error",
                "",
                f"two paddings (id {pad}) at the end changed the loss from {number(a)} to {number(b)}",
                "no change: padding is no target",
                "padding is counted in the loss (or in the mean, or in the label smoothing)",
                f"F.cross_entropy(..., ignore_index={pad}); smooth and average over real targets alone",
                "loss(x) - loss(x + [PAD, PAD])  # must be 0",
                explains=frozenset({"first loss"}),
            )
        ]
    return _end(e, ids, src, pad)


def _end(e: Exam, ids: Tensor, src: Tensor | None, pad: int) -> list[Finding]:
    if e.p.subject.eos is None or e.p.subject.eos != pad:
        return []
    return [
        Finding(
            "label padding",
            "error",
            "",
            f"the end of a sequence and padding are one id ({pad}), which the loss ignores",
            "the end is a target",
            "pad == eos: the model never learns to stop",
            "give padding an id of its own",
        )
    ]


def _first(e: Exam) -> list[Finding]:
    p = e.p
    vocab = p.target_vocab if p.kind == "encoder_decoder" else p.vocab
    ids = p.draw(8)
    loss = p.loss(ids, p.source(8), p.fresh)
    if loss is None:
        return []
    value, uniform = float(loss), math.log(vocab)
    if not math.isfinite(value):
        return [_start(value, uniform, "error", "something is not finite at the start")]
    if value > 1.8 * uniform + 1:
        return [
            _start(
                value,
                uniform,
                "warning" if p.subject.loss else "note",
                "logits are far too large at the start (initial values of the table?)",
            )
        ]
    return []


def _trained(e: Exam) -> str | None:
    if _has(e):
        return _has(e)
    return "a head of another size" if e.p.features not in (e.p.vocab, e.p.target_vocab) else None


def _start(value: float, uniform: float, severity: str, cause: str) -> Finding:
    return Finding(
        "first loss",
        severity,  # type: ignore[arg-type]
        "",
        f"the first loss is {value:.3g}",
        f"about ln V = {uniform:.3g}, what guessing costs",
        cause,
        "smaller initial values: std 0.02, or 1/√D for a table that is also the head",
        confidence="likely",
    )


Loss = Callable[[Exam], list[Finding]]
SHIFT = Probe("shift", "each position is trained on the next token", _shift, _has)
PADDING = Probe("label padding", "padding is no target", _padding, _no_pad)
FIRST = Probe("first loss", "the first loss is near ln V", _first, _trained)
