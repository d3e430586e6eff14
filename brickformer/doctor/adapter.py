"""The adapter: works out by signature and experiment how a stranger's model is called. What it cannot work out it asks.

Experiments: which table reads the ids (so: the vocabulary); which outputs move when one token changes (so: batch or
sequence first, causal or two-way); which form of a mask hides what it should.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from brickformer.doctor.forms import CAUSAL, OPEN, SQUARE, Form, by_name
from brickformer.doctor.guard import Budget, copied, shake
from brickformer.doctor.kinds import config_of, find_kind
from brickformer.doctor.masks import find_masks
from brickformer.doctor.outputs import differ, main_of
from brickformer.doctor.patient import Patient
from brickformer.doctor.signature import Signature, read_signature
from brickformer.doctor.subject import Subject
from brickformer.doctor.vocabulary import find_vocab, settle_vocab
from brickformer.errors import BrickError
from brickformer.models import DecoderModel, EncoderDecoderModel, EncoderModel

MOST = 300_000_000


class CannotCall(BrickError):  # noqa: N818  (an answer)
    """The adapter could not call the model; the message names the argument to give."""


def admit(subject: Subject, budget: Budget) -> Patient:
    """A patient of a subject. Errors: CannotCall; OutOfTime."""
    if any(is_lazy(x) for x in subject.model.parameters()):
        raise CannotCall(
            f"{type(subject.model).__name__} has lazy parameters, of no shape yet. Call it once in make()."
        )
    count = sum(x.numel() for x in subject.model.parameters())
    if count > MOST:
        raise CannotCall(
            f"{type(subject.model).__name__} has {count:,} parameters; it would be copied twice, in float64. Give the "
            f"doctor a narrow one of the same code (width 64, two layers): what is wrong is wrong there too."
        )
    try:
        model, fresh = copied(subject.model), copied(subject.model)
    except Exception as e:
        raise CannotCall(
            f"the model cannot be copied ({type(e).__name__}: {e}). Return a fresh one from make()."
        ) from e
    p = Patient(subject, model, fresh, Signature(), budget)
    if isinstance(subject.model, DecoderModel | EncoderModel | EncoderDecoderModel):
        _ours(p, subject.model)
    elif subject.call is None and type(model).forward is nn.Module.forward:
        _without_forward(p)
    elif subject.call is None:
        p.signature = read_signature(model.forward)
    shake(model)
    model.eval()
    fresh.eval()
    _first_guess(p)
    _precision(p)
    _find_call(p)
    if not settle_vocab(p):
        raise CannotCall(
            f"{type(p.model).__name__}: how many ids it knows could not be worked out, no table was asked for them. "
            f"Give it: Subject(model, vocab=...)"
        )
    _find_layout(p)
    find_kind(p)
    find_masks(p)
    _facts(p)
    return p


def _ours(p: Patient, model: DecoderModel | EncoderModel | EncoderDecoderModel) -> None:
    """Models of ours say what they are."""
    from brickformer.mask import Span

    def call(m: Any, *args: Any) -> Tensor:
        match m:
            case DecoderModel():
                ids, valid = args
                return m(ids, None if valid is None else Span.of(ids, valid=valid))
            case EncoderModel():
                h = m(*args)
                return h if m.head is None else m.logits(h)
            case _:
                src, tgt, valid = args
                return m(src, tgt, valid)

    p.ours = True
    s = p.subject
    kind: Any = {DecoderModel: "decoder", EncoderModel: "encoder", EncoderDecoderModel: "encoder_decoder"}[type(model)]
    both = isinstance(model, EncoderDecoderModel)
    spec: Any = model.spec
    p.subject = Subject(
        **{
            **vars(s),
            "kind": s.kind or kind,
            "vocab": s.vocab or (spec.encoder.vocab if both else spec.vocab),
            "target_vocab": s.target_vocab or (spec.decoder.vocab if both else None),
            "call": s.call or call,
        }
    )


def _without_forward(p: Patient) -> None:
    """encode() and decode() in place of a forward. Errors: CannotCall when they are not there, or want more."""
    model, name = p.subject.model, type(p.subject.model).__name__
    say = "Give it: Subject(model, kind=..., call=lambda model, ids, valid: ...)"
    encode, decode = getattr(model, "encode", None), getattr(model, "decode", None)
    if not callable(encode) or not callable(decode):
        raise CannotCall(f"{name} has no forward, and not both encode and decode. {say}")
    names = read_signature(decode).required
    memory = [n for n in names if re.search("mem|enc|ctx|context", n.lower())]
    if len(names) != 2 or len(memory) != 1 or len(read_signature(encode).required) != 1:
        raise CannotCall(f"{name} has no forward, and it is not clear how encode and decode are called. {say}")
    (target,) = set(names) - set(memory)

    def call(m: Any, src: Tensor, tgt: Tensor, valid: Tensor | None) -> Any:
        return m.decode(**{target: tgt, memory[0]: m.encode(src)})

    p.subject = Subject(**{**vars(p.subject), "kind": "encoder_decoder", "call": call})


def _first_guess(p: Patient) -> None:
    s, sig = p.subject, p.signature
    if s.kind is not None:
        p.kind = s.kind
    elif sig.first("tgt") and (sig.first("src")):
        p.kind = "encoder_decoder"
    p.tokens = 7 if s.max_len is None else min(7, s.max_len)
    p.vocab = s.vocab or config_of(p.model, "vocab_size") or 2
    p.target_vocab = s.target_vocab or s.vocab or config_of(p.model, "vocab_size") or 2
    pads = dict(_pads(p.model))
    first = next(iter(pads.values()), None)
    p.pad = first if s.pad is None else s.pad
    p.source_pad = s.pad if s.pad is not None else next((v for k, v in pads.items() if "src" in k or "enc" in k), first)
    targets = [v for k, v in pads.items() if any(w in k for w in ("trg", "tgt", "target", "dec"))]
    p.target_pad = s.pad if s.pad is not None else next(iter(targets), p.pad)


def _pads(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Where the model itself says which id is padding."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            low = name.lower()
            if type(value) is int and re.search(r"(^|_)pad(ding)?(_|$)|pad_?i(d|dx|ndex)", low) and "num" not in low:
                if not isinstance(module, nn.Embedding) and isinstance(module, nn.Conv1d | nn.Conv2d | nn.MaxPool1d):
                    continue
                yield f"{path}.{name}".lower(), value
    config = config_of(model, "pad_token_id")
    if config is not None:
        yield "config.pad_token_id", config


def _precision(p: Patient) -> None:
    p.model.double()
    p.fresh.double()


def _single(p: Patient) -> None:
    p.model.float()
    p.fresh.float()
    p.dtype, p.allowed = torch.float32, 2e-4


def _find_call(p: Patient) -> None:
    """Try until an answer comes: the number of ids, vectors instead of ids, required labels and masks, lengths."""
    errors: list[str] = []
    sig = p.signature
    required = [n for n in sig.required if sig.roles[n] in ("mask", "src_mask", "tgt_mask", "memory_mask")]
    unknown = [n for n in sig.required if sig.roles[n] in ("other", "cache")]
    if unknown and p.subject.call is None:
        name = type(p.model).__name__
        raise CannotCall(
            f"{name}.forward needs {', '.join(unknown)}, and it is not clear what that is. "
            f"Give it: Subject(model, call=lambda model, ids, valid: model(ids, ...))"
        )
    if "labels" in (sig.roles[n] for n in sig.required):
        p.labels = sig.first("labels")
    p.always, begin = set(required), p.tokens
    for double in (True, False):
        for width in (0, *_widths(p.model)):
            p.width = width
            for tokens in dict.fromkeys((begin, 8, 16, 4, 32, 12, 64, 128)):
                p.tokens = tokens
                runs: tuple[dict[str, Form], bool] | None = None
                for forms, first in product(_combinations(p, required), _layouts(p)):
                    p.forms, p.seq_first = forms, first
                    try:
                        if _answers(p, bool(required)):
                            return
                        runs = runs or (forms, first)
                    except (Exception, SystemExit) as e:
                        errors.append(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
                if runs is not None:  # no form of the masks gave finite numbers
                    p.forms, p.seq_first = runs
                    _answers(p, False)
                    return
                if width == 0 and errors and re.search("Long.*(Float|Double)|(Float|Double).*Long", errors[-1]):
                    break
        if double:
            _single(p)
    name = type(p.model).__name__
    raise CannotCall(
        f"{name} could not be called ({errors[0]}). "
        f"Give it: Subject(model, kind=..., vocab=..., call=lambda model, ids, valid: ...)"
    )


def _answers(p: Patient, masked: bool) -> bool:
    """Whether the call works; where masks must be given, with finite numbers. Errors: whatever the model raises."""
    if not p.width and p.subject.vocab is None:
        find_vocab(p)
    out = p(p.draw(3))
    if masked and not bool(out.isfinite().all()):
        return False
    p.features = out.shape[-1]
    if out.shape[1] == 1 and p.tokens > 1:
        _only_last(p)
    return True


def _layouts(p: Patient) -> tuple[bool, ...]:
    """Whether to try the sequence first: as said, or both."""
    if p.subject.call is not None:
        return (False,)
    return (False, True) if p.subject.batch_first is None else (not p.subject.batch_first,)


def _widths(model: nn.Module) -> list[int]:
    """What layers read, the outermost first, where ids are no input."""
    named = sorted(model.named_modules(), key=lambda pair: pair[0].count("."))
    found = [m.in_features for _, m in named if isinstance(m, nn.Linear)]
    found += [m.in_channels for _, m in named if isinstance(m, nn.Conv1d)]
    return list(dict.fromkeys(found))[:6]


def _combinations(p: Patient, required: list[str]) -> Iterator[dict[str, Form]]:
    if not required:
        yield {}
        return
    options = [_forms(p, name) for name in required]
    for i in range(max(map(len, options))):
        for j in range(max(map(len, options)) if len(options) > 1 else 1):
            picks = [o[min(i if n == 0 else j, len(o) - 1)] for n, o in enumerate(options)]
            yield dict(zip(required, picks, strict=True))


def _forms(p: Patient, name: str) -> tuple[Form, ...]:
    role = p.signature.roles[name]
    padding = "pad" in name.lower()
    if role == "tgt_mask" and not padding:
        return CAUSAL
    if role == "src_mask" and not padding and _told_otherwise(p, name):
        return OPEN
    if role in ("mask", "src_mask") and p.kind == "decoder" and not padding:
        return (*CAUSAL, *by_name(name)) if p.subject.kind == "decoder" else (*by_name(name), *CAUSAL)
    return by_name(name)


def _told_otherwise(p: Patient, name: str) -> bool:
    """Whether another argument speaks of the padding of the source."""
    return any("pad" in n.lower() for n in p.signature.named("src_mask") if n != name)


def _only_last(p: Patient) -> None:
    """One vector for many tokens: only the last position, unless labels are given; or a pooled answer."""
    name = p.signature.first("labels")
    if name is not None and p.subject.call is None and not p.labels:
        p.labels = name
        try:
            out = p(p.draw(3))
            if out.shape[1] > 1:
                p.features = out.shape[-1]
                return
        except (Exception, SystemExit):
            pass
        p.labels = None
    p.shape = "pooled"


def _find_layout(p: Patient) -> None:
    """Which outputs move when one token changes: those of its row, or those of its column."""
    if p.subject.call is not None or p.shape == "pooled":
        return
    if p.subject.batch_first is not None:
        p.seq_first = not p.subject.batch_first
        return
    rows = 3
    ids = p.draw(rows)
    changed = ids.clone()
    changed[0] = p.other(ids, p.tokens - 1)[0]
    src = p.source(rows)
    with torch.no_grad():
        a, b = (main_of(p.raw(x, src, None, None, p.model), rows, p.tokens) for x in (ids, changed))
    if a is None or b is None or a.ndim != 3:
        return
    moved = differ(a, b) > p.allowed
    if a.shape[:2] == (p.tokens, rows):
        moved = moved.T
    row, column = moved[0].clone(), moved[:, -1].clone()
    others = moved.clone()
    others[0] = False
    outside = moved.clone()
    outside[:, -1] = False
    if bool(others.any()) and not bool(outside.any()) and column.sum() > row.sum():
        p.seq_first = True


def _facts(p: Patient) -> None:
    facts = [p.kind.replace("_", "-")]
    facts.append(f"reads vectors of {p.width}" if p.width else f"{p.vocab} ids")
    if p.kind == "encoder_decoder" and p.target_vocab != p.vocab:
        facts.append(f"{p.target_vocab} target ids")
    if p.seq_first:
        facts.append("sequence first")
    if p.pad is not None:
        facts.append(f"padding {p.pad}")
    if p.shape == "pooled":
        facts.append("one answer a row")
    facts += [f"{name}: {form.name}" for name, form in p.forms.items() if form not in SQUARE]
    p.facts = [*facts, *p.facts]
