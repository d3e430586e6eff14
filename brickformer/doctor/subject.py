"""What a user may say about a model. Everything but the model can be left out: the adapter works it out.

    def make():
        return Subject(MyTransformer(), kind="decoder", pad=0)

Shapes: ids, src, tgt (B, T); valid True at real tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

Kind = Literal["decoder", "encoder", "encoder_decoder"]


@dataclass
class Subject:
    """A model under examination.

    kind: decoder (must not see the future), encoder or encoder_decoder. vocab, target_vocab: how many ids each side
    knows. pad: the id of padding. batch_first: whether ids are (B, T); tried when not said.
    call: ``call(model, ids, valid)``, or ``call(model, src, tgt, src_valid)``, -> logits or hidden vectors (B, T, F).
    loss: ``loss(model, ids)``, or ``loss(model, src, tgt)``, -> scalar of one training step, shift included.
    decode: ``decode(model, ids, new)``, or ``decode(model, src, new)``, -> ids, greedily, prompt included or not.
    max_len: the longest sequence it reads. eos: the id that ends a sequence. bos: the id that begins a target.
    """

    model: nn.Module
    kind: Kind | None = None
    vocab: int | None = None
    target_vocab: int | None = None
    pad: int | None = None
    batch_first: bool | None = None
    call: Callable[..., Any] | None = None
    loss: Callable[..., Tensor] | None = None
    decode: Callable[..., Tensor] | None = None
    max_len: int | None = None
    eos: int | None = None
    bos: int | None = None
    name: str | None = None
