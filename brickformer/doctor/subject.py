"""What a user may say about a model. Everything but the model can be left out: the adapter works it out.

    def make():
        return Subject(MyTransformer(), kind="decoder", pad=0)

Shapes: ids, src, tgt, doc (B, T); valid True at real tokens. Where a model has a source, functions get (src, tgt) or
(src) in place of (ids).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

Kind = Literal["decoder", "encoder", "encoder_decoder"]


@dataclass
class Subject:
    """A model under examination.

    kind: decoder (must not see the future), encoder or encoder_decoder. vocab, target_vocab: how many ids each side
    knows. pad: the id of padding. batch_first: whether ids are (B, T); tried when not said.
    call: ``call(model, ids, valid)``, or ``call(model, src, tgt, src_valid)``, -> logits or hidden vectors (B, T, F).
    loss: ``loss(model, ids)``, or ``loss(model, src, tgt)``, -> scalar of one training step, shift included;
    ``loss(model, ids, labels)`` for a classifier (labels (B,) below the number of classes).
    decode: ``decode(model, ids, new)``, or ``decode(model, src, new)``, -> ids, greedily, prompt included or not, or
    (ids, logits or probabilities (B, new, V) of each step); with a fourth argument `valid` also asked about a batch
    that is padded on the left.
    beam: ``beam(model, ids, new, width)`` -> ids of the best hypothesis of each row.
    max_len: the longest sequence it reads. eos: the id that ends a sequence. bos: the id that begins a target.
    batch: ids, (src, tgt) or a dict of arguments, as training sees them: outputs and gradients on it must be finite.
    training: ``training(model)`` -> step, where ``step(ids)`` makes one update as your loop does. A step with
    state_dict() and load_state_dict() is also resumed.
    schedule: ``schedule(step)`` -> learning rate, over `steps` steps.
    filters: name -> (``filter(logits, value)`` -> logits (B, V), value) for "top_k", "top_p", "min_p", others.
    twins: name -> another model (quantised, converted), or ``twin(model, ids)`` -> logits or loss, that must agree.
    packed: ``packed(model, ids, doc)`` -> logits of rows in which several documents lie, doc[b, t] their number.
    allowed: (T, T) True where output i may depend on input j directly. build: ``build(width)`` -> the model that wide.
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
    beam: Callable[..., Any] | None = None
    max_len: int | None = None
    eos: int | None = None
    bos: int | None = None
    batch: Any = None
    training: Callable[[Any], Callable[..., Any]] | None = None
    schedule: Callable[[int], float] | None = None
    steps: int | None = None
    filters: Mapping[str, tuple[Callable[..., Tensor], float]] = field(default_factory=dict)
    twins: Mapping[str, Any] = field(default_factory=dict)
    packed: Callable[..., Any] | None = None
    allowed: Tensor | None = None
    build: Callable[[int], nn.Module] | None = None
    name: str | None = None


_ASKED = frozenset({"labels", "valid", "mask", "attention_mask"})


def wants(function: Callable[..., Any], count: int) -> bool:
    """Whether a function is to be given so many arguments: the last has no default, or a name that says what it is."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(plain) >= count and (
        plain[count - 1].default is inspect.Parameter.empty or plain[count - 1].name in _ASKED
    )
