"""A trained or imported decoder as a GGUF file: what joins the hf tables, the writer, and tokenizers.

The model is first said as the published family that computes the same, which llama.cpp's own names are made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from brickformer.errors import RunError, SpecError
from brickformer.export.gguf import Kind, Written, write_gguf
from brickformer.export.gguf_back import ReadBack
from brickformer.export.llama_check import installed, logits_there
from brickformer.export.llamacpp import ARCHITECTURES
from brickformer.export.vocabulary import vocabulary
from brickformer.hf.family import Family
from brickformer.hf.fit import settled
from brickformer.hf.folder import Tensors
from brickformer.hf.load import fill
from brickformer.hf.save import configuration, theirs
from brickformer.models import DecoderModel
from brickformer.recipes.published import exported, files_of, ids, lengths
from brickformer.recipes.standard import advising
from brickformer.recipes.trained import Trained
from brickformer.shapes import unfilled

NEAR: Final = {"f32": 2e-2, "f16": 5e-2, "q8_0": 0.1, "q4_0": 0.1}
"""Of the largest logit: llama.cpp rounds inside some functions, and its vectors to 8 bits where matrices are in blocks.
More than this, of what the numbers in the file say, is another computation."""
ROUNDED: Final = {"f32": 1e-6, "f16": 2**-10, "q8_0": 1 / 200, "q4_0": 1 / 7}
"""How far off a number may be, of the largest of its tensor, and a millionth (of what is stored as 1 + g)."""


@final
@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and how far logits are off: of the file read back, and llama.cpp's (None: not installed); the
    largest logit."""

    written: Written
    back: float
    off: float | None
    largest: float
    note: str = ""

    def __str__(self) -> str:
        size = f"{self.written.nbytes / 2**20:.1f} MiB of {self.written.kind}"
        kept = f", {len(self.written.kept)} matrices in f16 (rows no multiple of 32)" if self.written.kept else ""
        there = "; llama.cpp is not installed" if self.off is None else f", {self.off:.2g} by llama.cpp"
        note = f"\nvocabulary: {self.note}" if self.note else ""
        gap = f"largest gap of logits up to {self.largest:.3g}: {self.back:.2g} read back{there}"
        return f"{size}{kept}; {gap}{note}"


def export_gguf(trained: Trained, path: Path, kind: Kind = "f16", *, tokenizer: bool = True) -> Exported:
    """Write a run as one GGUF file, read it back, and ask llama.cpp, where it is installed.

    tokenizer: False leaves the vocabulary out. Errors: SpecError, DataError for what llama.cpp does not have; RunError:
    the file is taken, the disk full, numbers or logits that are off. Nothing is left then.
    """
    model, files = trained.model, files_of(trained.target)
    if not isinstance(model, DecoderModel):
        raise SpecError("gguf: got a model that is no decoder; llama.cpp's families that are written here all are.")
    texts, like = exported(trained)
    with advising(trained.run):
        family, config = configuration(model, like, ids(trained) | lengths(trained))
    if family.model_type not in ARCHITECTURES:
        raise SpecError(f"gguf: as a {family.model_type} it has no family of llama.cpp's: {', '.join(ARCHITECTURES)}.")
    vocab = model.spec.vocab
    eos = files.ends[0] if files.ends else None
    text = texts.get("tokenizer.json") if tokenizer else None
    assert not isinstance(text, bytes)
    words = vocabulary(text, vocab, bos=files.bos, eos=eos)
    found: list[tuple[float, float | None, float]] = []
    written = write_gguf(
        path,
        config,
        theirs(model, family),
        words,
        vocab=vocab,
        kind=kind,
        name=trained.run.name,
        check=lambda part: found.append(_compared(model, family, config, part, kind)),
    )
    return Exported(written, *found[0], words.note)


@torch.no_grad()
def _compared(
    model: DecoderModel, family: Family, config: Mapping[str, Any], path: Path, kind: Kind
) -> tuple[float, float | None, float]:
    """How far logits are off: read back, by llama.cpp; the largest. Errors: RunError: more than rounding explains."""
    wanted = dict(theirs(model, family))
    tensors = Numbers(path, ReadBack(path, config, wanted, model.spec.vocab), wanted, kind)
    again = unfilled(model.spec)
    fill(again, list(family.table(settled(model.spec))), dict.fromkeys(wanted, tensors), family, None)
    tokens = torch.randint(model.spec.vocab, (1, 16), generator=torch.Generator().manual_seed(0))
    here, back = _logits(model, tokens), _logits(again.eval(), tokens)
    off_back, largest = float((back - here).abs().max()), float(here.abs().max())
    exact = next(model.parameters()).dtype == torch.float32
    if kind in ("f32", "f16") and exact and not off_back <= NEAR[kind] * max(1.0, largest):
        raise RunError(f"{path}: read back, its logits are off by {off_back:.2g}. Please report this.")
    if not installed():
        return off_back, None, largest
    there = logits_there(path, tokens[0])
    apart = float((there - back).abs().max())
    if not apart <= NEAR[kind] * max(1.0, float(back.abs().max())):
        raise RunError(f"{path}: llama.cpp reads logits that are off by {apart:.2g}. Please report this.")
    return off_back, float((there - here).abs().max()), largest


def _logits(model: Any, tokens: Tensor) -> Tensor:
    out: Tensor = model(tokens.to(model.embed.tokens.weight.device))[0]
    return out.float().cpu()


@final
class Numbers(Tensors):
    """The file's tensors as a checkpoint's, each compared with the one that was meant. Errors: RunError: it is off."""

    def __init__(self, path: Path, back: ReadBack, wanted: Mapping[str, Tensor], kind: Kind) -> None:
        self.path, self.names, self._back, self._wanted, self._kind = path, list(wanted), back, wanted, kind

    def shape(self, name: str) -> tuple[int, ...]:
        """As it should be: what is read is compared."""
        return tuple(self._wanted[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """What blocks are taken apart into."""
        return torch.float32

    def read(self, name: str) -> Tensor:
        """From the file, its blocks taken apart."""
        got, meant = self._back.read(name), self._wanted[name].detach().cpu().float()
        far = float((got - meant).abs().max()) if got.shape == meant.shape else math.inf
        if not far <= ROUNDED[self._kind] * float(meant.abs().max()) + 1e-6:
            raise RunError(f"{self.path}: read back, {name} is off by {far:.2g}. Please report this.")
        return got
