"""Which kind of model it is: said, else shown by what moves, else by its parts, else by its name.

A causal model lets no output see a later token; one that keeps a triangle means to be causal, whatever it does.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from brickformer.doctor.outputs import differ
from brickformer.doctor.patient import Patient

_DECODERS = re.compile(r"gpt|decoder|causal|lm|language|llama|autoreg|generat", re.IGNORECASE)
_ENCODERS = re.compile(r"bert|encoder|classif|vit|mlm|masked|tagger|regress", re.IGNORECASE)


def find_kind(p: Patient) -> None:
    """Two-way or causal: said, else shown by what moves, else by its parts, else by its name."""
    s = p.subject
    if s.kind is not None or p.kind == "encoder_decoder":
        return
    if p.shape == "pooled":
        p.kind = "encoder"
        return
    if _causal(p) is not False or _triangular(p.model):
        p.kind = "decoder"
        return
    name = type(s.model).__name__
    encodes, decodes = bool(_ENCODERS.search(name)), bool(_DECODERS.search(name))
    given = config_of(p.model, "is_decoder")
    if of_library(s.model) and (given == 0 or (not given and not re.search(r"CausalLM|GPT|Decoder", name))):
        p.kind = "encoder"  # it sees both ways unless it is told otherwise, as BERT and XLNet
        return
    if encodes and not re.search(r"decoder|causal", name, re.IGNORECASE):
        p.kind = "encoder"
    elif decodes or given or hasattr(s.model, "generate"):
        p.kind = "decoder"
    elif p.features in (p.vocab, p.vocab + 1) and not p.width and not p.signature.named("mask"):
        p.kind, p.surely_causal = "decoder", False
    else:
        p.kind = "encoder"


def _causal(p: Patient) -> bool | None:
    """Whether no output sees a later token; None where it sees a part of them only."""
    ids = p.draw(1)
    with torch.no_grad():
        base = p(ids)
        seen = [bool((differ(base, p(p.other(ids, t)))[:, :t] > p.allowed).any()) for t in range(1, p.tokens)]
        early = any(bool((differ(base, p(p.other(ids, t)))[:, t:] > p.allowed).any()) for t in (1, p.tokens - 1))
    if not early:
        return False
    return True if not any(seen) else (False if all(seen) else None)


def _triangular(model: nn.Module) -> bool:
    """A kept triangle is a promise to be causal."""
    for module in model.modules():
        for value in (*vars(module).values(), *module._buffers.values()):
            if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[-1] == value.shape[-2] > 2:
                x = value.detach().reshape(-1, *value.shape[-2:])[0].double().nan_to_num(neginf=-9.0)
                n = len(x)
                up = x[torch.ones(n, n).triu(1).bool()].unique()
                down = x[torch.ones(n, n).tril().bool()].unique()
                if len(up) == 1 and len(down) == 1 and up[0] != down[0]:
                    return True
    return False


def of_library(model: nn.Module) -> bool:
    """Whether the class is one of the transformers library: what it leaves out it may leave out on purpose."""
    return type(model).__module__.startswith("transformers.")


def config_of(model: nn.Module, name: str) -> int | None:
    """A number of the configuration that models of the transformers library carry."""
    value = getattr(getattr(model, "config", None), name, None)
    return value if isinstance(value, int) else None
