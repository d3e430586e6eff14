"""Tune: rounding and scales of all coded matrices at once, until the model predicts what the full one predicts.

    min over u, s of  KL(full model ‖ coded model)         ŵ = s · [u],    ∂ŵ/∂u = s,    ∂ŵ/∂s = [u]

[u]: the number of the grid next to u, its slope taken for 1 (straight through: arXiv 1308.3432; scales with it:
1902.08153). GPTQ and polish know what an error does to the outputs of one matrix; what those do to the answer only the
whole model knows. u begins beside the full weight, inside the code that was chosen for it, and moves less than half a
code in all (as in arXiv 2309.05516): what is learned is which way to round.

It takes the memory of training: u, s, their slopes and two means of each (Adam, arXiv 1412.6980). The first reading is
not learned from: where that one is not predicted better afterwards, codes and scales stay as they were.

Shapes: w, u (O, G, N), s (O, G, 1): O outputs, G groups of N inputs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from brickformer.errors import BrickError
from brickformer.quant.codes import Coded, assemble, grouped, unpack
from brickformer.quant.conditions import evaluating
from brickformer.quant.hessian import Reading
from brickformer.quant.linear import QuantLinear
from brickformer.surgery import get

TRAVEL: Final = 0.32
"""Codes that u can move at most: the sum of all steps is half of it."""
EDGE: Final = 0.45
"""Codes from the middle of one to where u may begin."""
PACE: Final = 0.04
"""Codes by which the first step of a scale moves the outermost weight, of a mean group; like u's it falls to 0."""
LEAST: Final = 1e-15
"""Slope that still counts: of one of many million weights, and of 8 bits, they are below Adam's usual 1e-8."""


def tune(
    model: nn.Module,
    full: nn.Module,
    names: Sequence[str],
    readings: Sequence[Reading],
    *,
    steps: int,
    tell: Callable[[], None] = lambda: None,
) -> list[str]:
    """Change codes and scales of these coded maps, in place; which are others now: none, if that was no better.

    full: a model with maps of the same names in full. readings: each returns logits (..., V); one a step. tell: called
    at each step. Errors: BrickError: a reading returns something else, predictions are not finite; nothing changes.
    """
    latents = [_Latent(get(model, name), get(full, name)) for name in names]
    tensors = [t for latent in latents for t in (latent.units, latent.scale)]
    with evaluating(model, full), torch.inference_mode(False), torch.no_grad():
        before = float(_apart(model, full, readings[0]))
        rates = (rate for latent in latents for rate in latent.rates(steps))
        optimizer = torch.optim.Adam(rates, betas=(0.9, 0.99), eps=LEAST)
        falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / steps)
        with torch.enable_grad(), _learning(latents):
            for reading in islice(_in_turn(readings[1:] or readings), steps):
                slopes = torch.autograd.grad(_apart(model, full, reading), tensors, allow_unused=True)
                for tensor, slope in zip(tensors, slopes, strict=True):
                    tensor.grad = slope
                optimizer.step()
                falling.step()
                tell()
        old, better = {latent: latent.module.coded for latent in latents}, False
        try:
            for latent in latents:
                latent.module.put(latent.coded())
            better = float(_apart(model, full, readings[0])) < before
        finally:
            if not better:
                for latent, coded in old.items():
                    latent.module.put(coded)
    return [n for n, latent in zip(names, latents, strict=True) if not latent.module.coded.same(old[latent])]


def _in_turn(readings: Sequence[Reading]) -> Iterator[Reading]:
    """All of them, in another order each time, without end."""
    draw = random.Random(0)
    while True:
        yield from draw.sample(readings, len(readings))


@final
class _Latent:
    """One matrix whose rounding can be learned."""

    def __init__(self, module: nn.Module, full: nn.Module) -> None:
        assert isinstance(module, QuantLinear) and isinstance(full.weight, Tensor)
        self.module, self.scheme, coded = module, module.scheme, module.coded
        weight = full.weight.detach().float()
        w = grouped(weight if module.divide is None else weight * module.divide, self.scheme)
        codes = (coded.codes if self.scheme.bits == 8 else unpack(coded.codes)).view(w.shape)
        self.start = coded.scales[..., None]
        self.zero = None if coded.zeros is None else unpack(coded.zeros)[:, : w.shape[1], None]
        wide = self.start.float()
        with torch.inference_mode(False):
            self.units = (self.near(w, codes) / torch.where(wide == 0.0, 1.0, wide)).clone().requires_grad_()
            self.scale = wide.clone().requires_grad_()

    def near(self, w: Float[Tensor, "O G N"], codes: Tensor) -> Float[Tensor, "O G N"]:
        """What is next to each weight and still has its code."""
        middle = self.scheme.value(codes, self.start, self.zero)
        far = EDGE * self.scheme.step * self.start.float().abs()
        near = middle + (w - middle).clamp(-far, far)
        return torch.where(self.scheme.code(near, self.start, self.zero) == codes, near, middle)

    def rates(self, steps: int) -> Iterator[dict[str, object]]:
        """The first steps of u and of s."""
        yield {"params": [self.units], "lr": TRAVEL * self.scheme.step / steps}
        mean = float(self.start.float().abs().mean()) if self.start.numel() else 0.0
        yield {"params": [self.scale], "lr": PACE * mean / 2 ** (self.scheme.bits - 1)}

    def codes(self) -> Tensor:
        """The codes nearest to u."""
        return self.scheme.code(self.units.detach() * self.start, self.start, self.zero)

    def weight(self) -> Float[Tensor, "O I"]:
        """What the codes stand for, with slopes for u and s."""
        unit = self.scheme.value(self.codes(), torch.ones_like(self.start), self.zero)
        w = unit * self.scale + self.scale.detach() * (self.units - self.units.detach())
        return w.flatten(1)[:, : self.module.in_features]

    def forward(self, input: Float[Tensor, "*N I"]) -> Float[Tensor, "*N O"]:
        """In the place of the module's own."""
        module = self.module
        x = input if module.divide is None else input / module.divide.to(input.dtype)
        return F.linear(x, self.weight().to(x.dtype), module.bias)

    def coded(self) -> Coded:
        """As it is stored."""
        codes, zero = self.codes().flatten(1), None if self.zero is None else self.zero[..., 0]
        scale = self.scale.detach()[..., 0].to(self.start.dtype)
        return assemble(self.scheme, self.module.in_features, [(codes, scale, zero)])


def _apart(model: nn.Module, full: nn.Module, reading: Reading) -> Tensor:
    """The mean divergence of what the two predict."""
    with torch.no_grad():
        wanted = logits(reading(full)).float().log_softmax(-1)
    found = _learned_from(reading, model).float().log_softmax(-1)
    loss = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1).mean()
    if not math.isfinite(loss.item()):
        raise BrickError("tune: predictions are not finite on the calibration data. Quantize without tuning.")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise BrickError("tune: a reading computes without gradients, which learning takes. Quantize without tuning.")
    return loss


def _learned_from(reading: Reading, model: nn.Module) -> Tensor:
    """What it predicts. Errors: BrickError: torch cannot learn through tensors that were made for inference alone."""
    try:
        return logits(reading(model))
    except RuntimeError as e:
        if "Inference tensors" not in str(e):
            raise
        raise BrickError(
            "tune: a reading meets tensors made in torch.inference_mode(), through which nothing can be learned. "
            "Make model and data outside of it."
        ) from None


def logits(found: object) -> Tensor:
    """What a reading returned. Errors: BrickError: no logits."""
    if not isinstance(found, Tensor) or not found.ndim or not found.is_floating_point():
        what = type(found).__name__
        if isinstance(found, Tensor):
            what = f"a tensor {tuple(found.shape)} of {found.dtype}"
        raise BrickError(
            f"tune: a reading returned {what}, expected logits (..., V): "
            "Calibration([lambda m: m(ids).logits], tune=100)."
        )
    return found


@contextmanager
def _learning(latents: Sequence[_Latent]) -> Iterator[None]:
    """Modules multiply by what is being learned."""
    try:
        for latent in latents:
            latent.module.__dict__["forward"] = latent.forward
        yield
    finally:
        for latent in latents:
            latent.module.__dict__.pop("forward", None)
