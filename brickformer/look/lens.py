"""Logit lens: what each layer would answer, were it the last one (nostalgebraist 2020; arXiv 2303.08112).

    answer of layer l = softmax(head(norm(h_l)))          h_0 is the embedding, h_L what the model answers with

norm is the model's last one. kl: Σ p_L ln(p_L / p_l), how far a layer still is from the answer, nats.
Shapes: T tokens shown, k answers a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from brickformer.errors import DataError
from brickformer.layers import Stack
from brickformer.models import AnyModel, DecoderModel, EncoderDecoderModel, EncoderModel


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer would answer. ids, p: the k most probable of each token shown. kl: of each token."""

    name: str
    ids: list[list[int]]
    p: list[list[float]]
    kl: list[float]


@torch.no_grad()
def lens(model: AnyModel, run: Callable[[], Any], rows: tuple[int, int] | None = None, *, best: int = 3) -> list[Layer]:
    """Every layer's answers while `run` calls the model once on one text. rows: tokens shown, half open.

    Errors: DataError for a model that gives no logits.
    """
    stack, logits, path = answering(model)
    heard: list[tuple[str, Tensor]] = []
    loops = stack.loops

    def heard_by(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: object, out: Tensor) -> None:
            turn = sum(n.split(" (")[0] == name for n, _ in heard) + 1
            heard.append((f"{name} ({turn} of {loops})" if loops > 1 else name, out[0]))

        return hook

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        heard.insert(0, (f"{path}embed", args[0][0]))

    handles = [stack.register_forward_pre_hook(before)]
    handles += [
        layer.register_forward_hook(heard_by(f"{path}stack.layers.{i}")) for i, layer in enumerate(stack.layers)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    cut = slice(*rows) if rows else slice(None)
    answers = [(name, logits(stack.norm(h[None, cut]))[0].float().log_softmax(-1)) for name, h in heard]
    last = answers[-1][1]
    out = []
    for name, logp in answers:
        top = logp.topk(min(best, logp.shape[-1]))
        kl = (last.exp() * (last - logp)).nansum(-1).clamp_min(0.0)
        out.append(Layer(name, top.indices.tolist(), top.values.exp().tolist(), kl.tolist()))
    return out


def answering(model: AnyModel) -> tuple[Stack, Callable[[Tensor], Tensor], str]:
    """The stack whose layers answer, what makes logits of them, and the path before both."""
    match model:
        case DecoderModel():
            return model.stack, model.logits, ""
        case EncoderDecoderModel():
            return model.decoder.stack, model.decoder.logits, "decoder."
        case EncoderModel():
            if model.head is None:
                raise DataError("look: this encoder has no head, so its layers have no answers. Build it with Head().")
            return model.stack, model.logits, ""
