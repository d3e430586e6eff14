"""Kernels: which one each attention takes in training, with padding and in decoding; and why it is not the fused one.

The twin is run and every call is watched where it reaches torch, so what is said is what happens: with windows that
are shorter than the row, as they are meant to be. `flash` and `math` are torch's own names for its CPU kernels; on a
GPU its FlashAttention takes no dense mask, and the memory-efficient kernel does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from brickformer import kernels
from brickformer.attend import Attend
from brickformer.mask import Span
from brickformer.models import AnyModel, EncoderDecoderModel, EncoderModel
from brickformer.proof.subject import Subject
from brickformer.proof.twin import Twin

CASES: Final = ("training", "padded", "decoding")


@dataclass(frozen=True)
class Used:
    """An attention and what it takes. where: its path; alike: layers like this one. kernels: case -> kernel and why."""

    where: str
    alike: int
    kernels: dict[str, str]


@dataclass
class _Watch(TorchFunctionMode):
    """Notes what reaches `scaled_dot_product_attention` while an attention runs."""

    now: Attend | None = None
    said: dict[Attend, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and self.now is not None:
            self.said[self.now] = _kernel(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """What torch takes for these arguments, how the mask is told, and what keeps it from the fused kernel."""
    choice: Any = torch._fused_sdp_choice  # torch's own decision
    fused = choice(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa) != 0
    if attn_mask is None:
        told = "is_causal" if is_causal else "no mask"
    else:
        told = "a dense mask" if attn_mask.dtype is torch.bool else "a bias on the scores"
        told += " (on a GPU: not FlashAttention)"
    reasons = [
        (dropout_p > 0.0, "weights are dropped"),
        (attn_mask is not None and attn_mask.requires_grad, "the bias is learned"),
        (k.shape[-1] != v.shape[-1], "keys and values differ in width"),
    ]
    why = " and ".join(text for holds, text in reasons if holds) or "torch has no fused kernel for this case"
    return f"sdpa, flash, {told}" if fused else f"sdpa, math (not fused: {why}), {told}"


def kernels_of(twin: Twin) -> list[Used]:
    """Every attention of the twin, in order."""
    subject = Subject(twin.spec, twin.tokens)
    model = subject.model.float()
    cases = {name: _noted(subject, model, run) for name, run in _runs(subject, model).items()}
    names = iter(zip(twin.layers, twin.alike, strict=True))
    found = []
    for stack in subject.stacks.values():
        for layer in list(stack.layers):
            name, alike = next(names)
            for inside, attend in layer.named_modules():
                if isinstance(attend, Attend):
                    took = {case: said[attend] for case, said in cases.items() if attend in said}
                    found.append(Used(f"{name}.{inside.removesuffix('.attend')}", alike, took))
    return found


def _runs(s: Subject, model: AnyModel) -> dict[str, Callable[[], object]]:
    ids, src = s.ids(2), s.source(2)[0]
    valid, src_valid = torch.ones_like(ids, dtype=torch.bool), torch.ones_like(src, dtype=torch.bool)
    valid[1, : max(1, s.tokens // 3)] = src_valid[1, : max(1, src.shape[1] // 3)] = False

    def train() -> None:
        model.train()
        try:
            memory = model.encode(src) if isinstance(model, EncoderDecoderModel) else None
            s.say(ids, memory=memory, model=model)
        finally:
            model.eval()

    def pad() -> None:
        with torch.no_grad():
            memory = model.encode(src, src_valid) if isinstance(model, EncoderDecoderModel) else None
            s.say(ids, Span.of(ids, valid=valid), memory=memory, model=model)

    cases: dict[str, Callable[[], object]] = {"training": train, "padded": pad}
    if not isinstance(model, EncoderModel):
        with torch.no_grad():
            memory = model.encode(src) if isinstance(model, EncoderDecoderModel) else None
            state = model.init_state(2, s.tokens)

        def decode() -> None:
            with torch.no_grad():
                for t in range(s.tokens):
                    s.say(ids[:, t : t + 1], state=state, memory=memory if t == 0 else None, model=model)

        cases["decoding"] = decode
    return cases


def _noted(s: Subject, model: AnyModel, run: Callable[[], object]) -> dict[Attend, str]:
    with _watched(model, s.flex) as watch, _as_if_long():
        run()
    return watch.said


@contextmanager
def _as_if_long() -> Iterator[None]:
    """The rows of a twin are short, those of its model are not: what is quicker for short ones is left out."""
    kept = kernels.SHORT, kernels.SHORT_CAUSAL
    kernels.SHORT = kernels.SHORT_CAUSAL = 0
    try:
        yield
    finally:
        kernels.SHORT, kernels.SHORT_CAUSAL = kept


@contextmanager
def _watched(model: AnyModel, flex: frozenset[Attend]) -> Iterator[_Watch]:
    watch = _Watch()

    def enter(attend: Attend, args: Any) -> None:
        watch.now = attend
        if attend.softcap is not None:
            watch.said[attend] = "reference (not fused: scores are capped, which sdpa cannot do; on a GPU: flex)"
        elif attend.backend == "reference":
            watch.said[attend] = "reference (not fused: backend='reference' asks for it)"

    def leave(attend: Attend, args: Any, out: Any) -> None:
        watch.now = None
        if attend in flex:
            watch.said[attend] = "flex, a block mask (backend='flex' asks for it)"

    hooks: list[Any] = []
    for m in model.modules():
        if isinstance(m, Attend):
            hooks += [m.register_forward_pre_hook(enter), m.register_forward_hook(leave)]
    try:
        with watch:
            yield watch
    finally:
        for hook in hooks:
            hook.remove()
