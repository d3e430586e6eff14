"""The patient: a copy of the model in float64 with shaken weights, and one way to ask it whatever its kind.

    out = patient(ids)                      decoder, encoder      (B, T) -> (B, T, F)
    out = patient(tgt, src=src)             encoder-decoder

Shapes: ids (B, T), or (B, T, D) where the model reads vectors; valid (B, T) True at real tokens; F features, often V.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from brickformer.doctor.forms import Form
from brickformer.doctor.guard import Budget
from brickformer.doctor.outputs import loss_of, main_of
from brickformer.doctor.signature import Signature
from brickformer.doctor.subject import Kind, Subject, wants


class NotAsked(RuntimeError):  # noqa: N818  (an answer, not an error)
    """The model cannot be asked this; the message says why."""


@dataclass
class Patient:
    """One model and how to call it. allowed: how far two ways to the same number may differ."""

    subject: Subject
    model: nn.Module
    fresh: nn.Module
    signature: Signature
    budget: Budget = field(default_factory=Budget)
    kind: Kind = "decoder"
    vocab: int = 0
    target_vocab: int = 0
    tokens: int = 7
    width: int = 0  # of input vectors; 0: it reads ids
    pad: int | None = None
    target_pad: int | None = None
    source_pad: int | None = None
    seq_first: bool = False
    labels: str | None = None  # the argument of the labels, when it must be given
    forms: dict[str, Form] = field(default_factory=dict)  # how each mask is given
    always: set[str] = field(default_factory=set)  # masks given in every call
    shape: str = "tokens"  # tokens, last, pooled
    features: int = 0
    allowed: float = 1e-9
    facts: list[str] = field(default_factory=list)
    dtype: torch.dtype = torch.float64
    ours: bool = False
    surely_causal: bool = True
    mask_failed: str | None = None
    counted: bool = True  # whether a table showed how many ids there are

    def draw(self, rows: int, tokens: int | None = None, seed: int = 0, side: str = "tgt") -> Tensor:
        """Random input without padding; a smaller batch has the first rows of a larger one."""
        g = torch.Generator().manual_seed(seed + 17)
        tokens = tokens or self.tokens
        if self.width:
            return torch.randn(64, max(tokens, 64), self.width, generator=g)[:rows, :tokens].to(self.dtype)
        pool = self.pool(side)
        return pool[torch.randint(0, len(pool), (64, max(tokens, 64)), generator=g)][:rows, :tokens].contiguous()

    def pool(self, side: str = "tgt") -> Tensor:
        """The ids to draw from: no padding, no beginning and end."""
        vocab = self.vocab if side == "src" or self.kind != "encoder_decoder" else self.target_vocab
        never = {self.pad, self.target_pad, self.source_pad, self.subject.bos, self.subject.eos}
        return torch.tensor([i for i in range(vocab) if i not in never] or [0])

    def source(self, rows: int, seed: int = 0) -> Tensor | None:
        """A source, where the model reads one; one token shorter than the target, so that sides cannot be mixed up."""
        return self.draw(rows, max(2, self.tokens - 1), seed + 5, "src") if self.kind == "encoder_decoder" else None

    def other(self, x: Tensor, t: int, side: str = "tgt") -> Tensor:
        """The same input with another token at t, in every row."""
        y = x.clone()
        if self.width:
            y[:, t] = -1.7 * y[:, t] + 0.9
            return y
        pool = self.pool(side)
        place = (pool[None, :] == x[:, t, None]).float().argmax(1)
        y[:, t] = pool[(place + 1 + max(1, len(pool) // 3)) % len(pool)]
        return y

    def __call__(
        self,
        ids: Tensor,
        *,
        src: Tensor | None = None,
        valid: Tensor | None = None,
        src_valid: Tensor | None = None,
        model: nn.Module | None = None,
        grad: bool = False,
    ) -> Tensor:
        """(B, T, F), by the model's own call. Errors: NotAsked for a shape that nobody understands."""
        if src is None and self.kind == "encoder_decoder":
            src = self.source(len(ids))
        with torch.set_grad_enabled(grad):
            value = self.raw(ids, src, valid, src_valid, model or self.model)
        return self.arranged(value, len(ids), ids.shape[1])

    def arranged(self, value: Any, rows: int, tokens: int) -> Tensor:
        """The main part of a result as (B, T, F)."""
        out = main_of(value, rows, tokens)
        if out is None:
            raise NotAsked(f"the model returned nothing of shape ({rows}, {tokens}, F)")
        if out.ndim == 2:
            return out.view(rows, tokens, -1) if out.shape[0] == rows * tokens and tokens > 1 else out[:, None]
        if self.seq_first and out.shape[:2] == (tokens, rows):
            return out.transpose(0, 1)
        return out

    def _flip(self, x: Any) -> Any:
        return x.transpose(0, 1) if self.seq_first else x.contiguous() if isinstance(x, Tensor) else x

    def raw(
        self, ids: Tensor, src: Tensor | None, valid: Tensor | None, src_valid: Tensor | None, model: nn.Module
    ) -> Any:
        """What the model's own call returns."""
        self.budget.tick()
        if self.subject.call is not None:
            if self.kind == "encoder_decoder":
                return self.subject.call(model, src, ids, src_valid)
            return self.subject.call(model, ids, valid)
        sig, kwargs = self.signature, {}
        flip = self._flip
        if self.kind == "encoder_decoder":
            kwargs[sig.first("src") or "src"] = flip(src)
            kwargs[sig.first("tgt") or "tgt"] = flip(ids)
        else:
            kwargs[sig.first("ids") or "ids"] = flip(ids)
        if self.labels:
            kwargs[self.labels] = flip(ids)
        for name, form in self.forms.items():
            side = sig.roles[name]
            of, queries = (src_valid, src) if side in ("src_mask", "memory_mask") else (valid, ids)
            if self.kind != "encoder_decoder":
                of, queries = valid, ids
            if of is None and name not in self.always:
                continue
            assert queries is not None
            if of is None:
                of = torch.ones(queries.shape[:2], dtype=torch.bool)
            kwargs[name] = form.make(of, queries.shape[1])
        return sig.given(model, kwargs)

    def loss(self, ids: Tensor, src: Tensor | None, model: nn.Module, labels: Tensor | None = None) -> Tensor | None:
        """The loss of one training step, as the user or the model computes it; None: there is none."""
        self.budget.tick()
        if self.subject.loss is not None:
            if self.kind == "encoder_decoder":
                return self.subject.loss(model, src, ids)
            if wants(self.subject.loss, 3):
                labels = torch.arange(len(ids)) % max(self.features, 1) if labels is None else labels
                return self.subject.loss(model, ids, labels)
            return self.subject.loss(model, ids)
        name = self.signature.first("labels")
        if name is None or self.subject.call is not None or self.ours:
            return None
        kept, self.labels = self.labels, None
        try:
            sig = self.signature
            labels = ids if labels is None else labels
            flip = self._flip
            if self.kind == "encoder_decoder":
                kwargs = {sig.first("src") or "src": flip(src), name: flip(labels)}
                if (tgt := sig.first("tgt")) in sig.required and tgt is not None:
                    kwargs[tgt] = flip(ids)
            else:
                kwargs = {sig.first("ids") or "ids": flip(ids), name: flip(labels)}
            for n in self.always:
                kwargs[n] = self.forms[n].make(torch.ones(ids.shape[:2], dtype=torch.bool), ids.shape[1])
            return loss_of(sig.given(model, kwargs))
        finally:
            self.labels = kept
