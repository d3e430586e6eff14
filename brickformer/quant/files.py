"""A quantized model as data: what its `spec.json` says of it, and back to modules without full precision on the way.

    {"format": 1, "digest": "...", "modules": {"stack.layers.0.mixer.qkv": {"kind": "int4", ...}, ...}}

The tensors themselves lie in safetensors like any others. The digest covers every name, shape and byte of the file's
tensors, so that one that was altered is refused and does not answer wrongly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from brickformer.embed import TokenEmbedding
from brickformer.errors import RunError, SpecError
from brickformer.linear import FusedLinear
from brickformer.quant.grid import Scheme
from brickformer.quant.linear import QuantEmbedding, QuantLinear
from brickformer.spec import read
from brickformer.surgery import get, places, replace, tie

FORMAT: Final = 1


def entry(model: nn.Module) -> dict[str, Any]:
    """What is coded in a model, and how, with the digest of its tensors."""
    modules = {}
    for place in places(model, QuantLinear, QuantEmbedding):
        match place.module:
            case QuantLinear() as m:
                modules[place.name] = {**m.scheme.to_dict(), "divides": m.divide is not None}
            case QuantEmbedding() as e:
                modules[place.name] = e.scheme.to_dict()
    return {"format": FORMAT, "digest": digest(model.state_dict()), "modules": modules}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """32 hexadecimal digits of names, types, shapes and bytes."""
    seen = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        seen.update(f"{name} {t.dtype} {tuple(t.shape)} ".encode())
        if t.numel():
            seen.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return seen.hexdigest()


def restore(model: nn.Module, data: Any, tensors: Mapping[str, Tensor], where: str) -> None:
    """Put coded modules where `data` says and give the model its tensors, as they are: nothing is unpacked.

    model: built without numbers. where: the file of the tensors, for messages. Errors: RunError: data that is no such
    entry, tensors that do not fit it or were altered.
    """
    broken = f"{where}: broken or altered"
    if not isinstance(data, dict) or not isinstance(data.get("modules"), dict):
        raise RunError(
            f"{where}: the 'quantized' entry of spec.json is broken. Restore spec.json from a copy, or quantize again."
        )
    if data.get("format") != FORMAT:
        raise RunError(
            f"{where}: quantized in format {data.get('format')!r}; this version reads {FORMAT}. Quantize again."
        )
    if digest(tensors) != data.get("digest"):
        raise RunError(f"{broken}: its numbers are not those that were quantized. Restore it, or quantize again.")
    try:
        for name, said in data["modules"].items():
            _empty(model, name, said)
    except (SpecError, KeyError, AttributeError, TypeError) as e:
        raise RunError(f"{where}: the 'quantized' entry of spec.json is broken ({e}). Quantize again.") from None
    own = model.state_dict()
    wrong = sorted(own.keys() ^ tensors.keys())
    wrong += [n for n in own if n in tensors and (own[n].shape, own[n].dtype) != (tensors[n].shape, tensors[n].dtype)]
    if wrong:
        raise RunError(f"{broken}: {wrong[0]!r} does not fit spec.json. Restore both, or quantize again.")
    model.load_state_dict(dict(tensors), assign=True)
    tie(model)


def _empty(model: nn.Module, name: str, said: dict[str, Any]) -> None:
    """A coded module without numbers in the place of a plain one."""
    if name not in dict(model.named_modules()):
        raise RunError(f"{name}: the model has no such module; spec.json was altered. Restore it, or quantize again.")
    fields = {key: value for key, value in said.items() if key != "divides"}
    scheme: Scheme = read(Scheme, fields, name)
    old = get(model, name)
    match old:
        case nn.Linear():
            parts = old.parts if isinstance(old, FusedLinear) else (old.out_features,)
            divide = torch.empty(old.in_features, device="meta") if said.get("divides") else None
            replace(model, name, QuantLinear(scheme, parts, old.in_features, bias=old.bias, divide=divide))
        case TokenEmbedding():
            replace(model, name, QuantEmbedding(scheme, old.num_embeddings, old.embedding_dim))
        case _:
            raise RunError(f"{name}: a {type(old).__name__} is never quantized; spec.json was altered.")
