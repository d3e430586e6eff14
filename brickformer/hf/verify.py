"""Is what was written what was meant? The largest difference between logits, ours and those of the folder.

    ours     the model against the folder read back: equal to the last bit, where both run by the same kernels
    theirs   the model against the `transformers` library reading the folder, where it is installed

On some random tokens, more than attention's windows hold, in evaluation mode. Ours with the type the parameters have,
theirs in float32 at least: in half types rounding would hide what is wrong.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from brickformer.errors import RunError
from brickformer.mask import Mask
from brickformer.mixers.attention import Attention
from brickformer.mixers.cross import Cross
from brickformer.mixers.latent import LatentAttention
from brickformer.models import AnyModel, DecoderModel, EncoderDecoderModel, EncoderModel
from brickformer.positions import AbsolutePositionSpec, Learned, RopeScaling

TOKENS: Final = 24
MOST: Final = 256
NEAR: Final = 1e-3
"""Of the largest logit: what another order of operations may change in float32, in which both compute here."""


@final
@dataclass(frozen=True, slots=True)
class Check:
    """Largest differences of logits. theirs: None where `transformers` is not installed. largest: of the logits."""

    ours: float
    theirs: float | None
    largest: float

    def __str__(self) -> str:
        there = "; transformers is not installed" if self.theirs is None else f", {self.theirs:.2g} by transformers"
        return f"largest gap of logits up to {self.largest:.3g}: {self.ours:.2g} read back{there}"


@torch.no_grad()
def compare(model: AnyModel, again: AnyModel, folder: Path) -> Check:
    """Run the model, what was read back, and theirs. Errors: RunError: a difference that rounding does not explain."""
    training, model_device = model.training, next(model.parameters()).device
    model.eval()
    try:
        ids = _ids(model)
        expected = _outputs(model, ids.to(model_device)).float().cpu()
        read = _outputs(again, ids).float()
    finally:
        model.train(training)
    ours = float((read - expected).abs().max())
    exact = model_device.type == "cpu" and _by_itself(model)
    if not ours <= (0.0 if exact else 16 * _precision(model) * _size(expected)):
        raise RunError(
            f"{folder}: read back, its logits are off by {ours:.2g}; expected equal ones. Please report this."
        )
    theirs = None
    if importlib.util.find_spec("transformers") is not None:
        half = _precision(model) > torch.finfo(torch.float32).eps
        there = _asked(folder, model, ids, torch.float32 if half else next(model.parameters()).dtype)
        here = _outputs(again.float(), ids) if half else expected
        theirs = float((there - here).abs().max())
        if not theirs <= NEAR * _size(here):
            raise RunError(f"{folder}: transformers reads logits that are off by {theirs:.2g}. Please report this.")
    return Check(ours, theirs, float(expected.abs().max()))


def _precision(model: AnyModel) -> float:
    """The step between numbers near 1 of the type of its parameters."""
    return float(torch.finfo(next(p.dtype for p in model.parameters() if p.is_floating_point())).eps)


def _size(logits: Tensor) -> float:
    return max(1.0, float(logits.abs().max()))


def _ids(model: AnyModel) -> Tensor:
    spec = model.spec
    made = torch.Generator().manual_seed(0)
    vocab = spec.encoder.vocab if isinstance(model, EncoderDecoderModel) else spec.vocab  # type: ignore[union-attr]
    if isinstance(model, EncoderDecoderModel):
        vocab = min(vocab, model.spec.decoder.vocab)
    first = max((p.skip for p in spec.parts() if isinstance(p, Learned)), default=0)  # an id below may mean padding
    return torch.randint(min(first, vocab - 1), vocab, (2, _count(model)), generator=made)


def _count(model: AnyModel) -> int:
    """How many tokens: past every window that is not too wide, and no more than the smallest table holds."""
    windows = [p.window for p in model.spec.parts() if isinstance(p, Mask) and p.window is not None]
    limits = [p.limit() for p in model.spec.parts() if isinstance(p, AbsolutePositionSpec | RopeScaling)]
    wanted = min(max((w for w in windows if w <= MOST), default=0) + TOKENS, MOST)
    return min([limit for limit in limits if limit is not None] + [wanted])


def _by_itself(model: AnyModel) -> bool:
    """Whether its attention chooses its kernels by itself, as what is read back does."""
    return all(p.backend == "auto" for p in model.spec.parts() if isinstance(p, Attention | Cross | LatentAttention))


def _outputs(model: AnyModel, ids: Tensor) -> Tensor:
    """Logits; vectors of an encoder without a head."""
    match model:
        case DecoderModel():
            out: Tensor = model(ids)
        case EncoderDecoderModel():
            out = model(ids, ids)
        case EncoderModel():
            out = model(ids)
            out = out if model.head is None else model.logits(out)
    return out


def _asked(folder: Path, model: AnyModel, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """What transformers computes from the folder. Errors: RunError: weights it misses or does not know."""
    import transformers as hf

    kinds: dict[type, Any] = {DecoderModel: hf.AutoModelForCausalLM, EncoderDecoderModel: hf.AutoModelForSeq2SeqLM}
    kind = kinds.get(type(model), hf.AutoModelForMaskedLM)
    if isinstance(model, EncoderModel) and model.head is None:
        kind = hf.AutoModel
    verbosity = hf.logging.get_verbosity()
    hf.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hf.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs, info = kind.from_pretrained(
                folder,
                output_loading_info=True,
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
            )
    except Exception as e:  # whatever it raises
        reason = " ".join(str(e).split())[-160:] or type(e).__name__
        raise RunError(f"{folder}: transformers does not read it: {reason} Please report this.") from None
    finally:
        hf.logging.set_verbosity(verbosity)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            raise RunError(
                f"{folder}: transformers finds {what}: {sorted(map(str, info[what]))[:3]}. Please report this."
            )
    theirs.eval()
    if isinstance(model, EncoderDecoderModel):
        out = theirs(input_ids=ids, decoder_input_ids=ids)
    else:
        out = theirs(input_ids=ids)
    logits: Tensor = out.last_hidden_state if kind is hf.AutoModel else out.logits
    return logits.float()
