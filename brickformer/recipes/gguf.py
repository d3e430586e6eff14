"""A trained or imported decoder as a GGUF file: what joins the hf tables, the writer, and tokenizers.

The model is first said as the published family that computes the same, which llama.cpp's own names are made of.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from brickformer.errors import RunError, SpecError
from brickformer.export.gguf import Kind, Written, write_gguf
from brickformer.export.llama_check import installed, logits_there
from brickformer.export.llamacpp import ARCHITECTURES
from brickformer.export.vocabulary import vocabulary
from brickformer.hf.save import configuration, theirs
from brickformer.models import DecoderModel
from brickformer.recipes.published import CONFIG, files_of
from brickformer.recipes.standard import advising
from brickformer.recipes.trained import Trained

NEAR = {"f32": 2e-2, "f16": 5e-2}
"""Of the largest logit: llama.cpp rounds inside some functions, more than this is another computation."""


@final
@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and how far llama.cpp's logits are off; None where it is not installed."""

    written: Written
    off: float | None
    note: str = ""

    def __str__(self) -> str:
        size = f"{self.written.nbytes / 2**20:.1f} MiB of {self.written.kind}"
        kept = f", {len(self.written.kept)} matrices in f16 (rows no multiple of 32)" if self.written.kept else ""
        there = "llama-cpp-python is not installed, so not asked" if self.off is None else f"{self.off:.2g}"
        note = f"\nvocabulary: {self.note}" if self.note else ""
        return f"{size}{kept}; largest difference of logits by llama.cpp: {there}{note}"


def export_gguf(trained: Trained, path: Path, kind: Kind = "f16", *, tokenizer: bool = True) -> Exported:
    """Write a run as one GGUF file and ask llama.cpp, where it is installed.

    tokenizer: False leaves the vocabulary out. Errors: SpecError, DataError for what llama.cpp does not have; RunError:
    the file is taken, the disk full, logits that are off. Nothing is left then.
    """
    model, files = trained.model, files_of(trained.target)
    if not isinstance(model, DecoderModel):
        raise SpecError("gguf: got a model that is no decoder; llama.cpp's families that are written here all are.")
    texts = dict(files.files)
    like = json.loads(texts.pop(CONFIG)) if CONFIG in texts else None
    with advising(trained.run):
        family, config = configuration(model, like, {})
    if family.model_type not in ARCHITECTURES:
        raise SpecError(f"gguf: as a {family.model_type} it has no family of llama.cpp's: {', '.join(ARCHITECTURES)}.")
    vocab = model.spec.vocab
    eos = files.ends[0] if files.ends else None
    words = vocabulary(texts.get("tokenizer.json") if tokenizer else None, vocab, bos=files.bos, eos=eos)
    written = write_gguf(path, config, theirs(model, family), words, vocab=vocab, kind=kind, name=trained.run.name)
    return Exported(written, _asked(model, path, kind) if installed() else None, words.note)


@torch.no_grad()
def _asked(model: DecoderModel, path: Path, kind: Kind) -> float:
    ids = torch.randint(model.spec.vocab, (1, 16), generator=torch.Generator().manual_seed(0))
    weight: Any = model.embed.tokens.weight
    ours = model(ids.to(weight.device))[0].float().cpu()
    off = float((logits_there(path, ids[0]) - ours).abs().max())
    allowed = NEAR.get(kind, float("inf")) * max(1.0, float(ours.abs().max()))
    if not off <= allowed:
        path.unlink()
        raise RunError(f"{path}: llama.cpp reads logits that are off by {off:.2g}. Please report this.")
    return off
