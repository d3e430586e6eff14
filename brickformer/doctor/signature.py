"""The roles of a stranger's arguments, read from their names: ids, source, target, labels, masks, caches."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["ids", "src", "tgt", "labels", "mask", "src_mask", "tgt_mask", "memory_mask", "cache", "flag", "other"]

_SRC = set(
    "src source src_ids src_seq src_tokens encoder_input enc_input enc_inputs encoder_inputs encoder_ids".split()
)
_TGT = set(
    "tgt trg target tgt_ids trg_seq tgt_seq tgt_tokens prev_output_tokens decoder_input dec_input dec_inputs "
    "decoder_inputs decoder_ids decoder_input_ids tgt_in target_in trg_ids tgt_input trg_input y".split()
)
_IDS = set("ids idx x input inputs input_ids tokens in_idx token_ids seq sequence text input_seq inp".split())
_LABELS = set("targets labels label target_ids lm_labels target y labels_ids gold".split())
_CACHE = ("cache", "past", "state", "kv")
_LENGTHS = re.compile(r"(^|_)(lengths|lens)$|^(src|source|tgt|trg|target|input|text|x|seq|sequence)_len(gth)?$")


@dataclass
class Signature:
    """The arguments of a forward by role; required: those without a default; placed: those that have no name."""

    roles: dict[str, Role] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)
    placed: list[str] = field(default_factory=list)

    def named(self, *roles: Role) -> list[str]:
        """The arguments of these roles, in order."""
        return [name for name, role in self.roles.items() if role in roles]

    def first(self, role: Role) -> str | None:
        """The first argument of a role."""
        return next(iter(self.named(role)), None)

    def given(self, call: Callable[..., Any], values: dict[str, Any]) -> Any:
        """What a call returns; arguments before a / and of *args go by their place."""
        places = [values[n] for n in self.placed if n in values] if self.roles else list(values.values())
        return call(*places, **{n: x for n, x in values.items() if self.roles and n not in self.placed})


def read_signature(function: Callable[..., Any]) -> Signature:
    """Roles of the arguments of a forward."""
    parameters = [
        p for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    names = [p.name.lower() for p in parameters]
    both = any(n in _TGT and n not in ("y", "target") for n in names) or (
        len(names) > 1 and names[0] in (_SRC | {"x"}) and names[1] in _TGT
    )
    out = Signature()
    for i, (p, name) in enumerate(zip(parameters, names, strict=True)):
        out.roles[p.name] = _role(name, i, both)
        if p.default is p.empty:
            out.required.append(p.name)
        if p.kind is p.POSITIONAL_ONLY:
            out.placed.append(p.name)
    if both and out.first("src") is None and (ids := out.first("ids")) is not None:
        out.roles[ids] = "src"
    if out.first("ids") is None and out.first("src") is None and parameters:
        out.roles[parameters[0].name] = "ids"
    if not both and out.first("ids") is None and (src := out.first("src")) is not None:
        out.roles[src] = "ids"
    return out


def _role(name: str, place: int, both: bool) -> Role:
    if name.endswith(("_labels", "_label")):
        return "labels" if name in _LABELS and place > 0 else "other"
    if _LENGTHS.search(name) and place > 0:
        return ("tgt_mask" if name[0] == "t" else "src_mask") if both else "mask"
    if "mask" in name or "valid" in name or name in ("pad", "padding"):
        if any(w in name for w in ("memory", "cross", "encoder_attention")):
            return "memory_mask"
        if any(w in name for w in ("tgt", "trg", "target", "decoder", "dec_", "causal", "look", "future", "self")):
            return "tgt_mask" if both or "pad" not in name else "mask"
        if any(w in name for w in ("src", "source", "enc")):
            return "src_mask" if both else "mask"
        if any(w in name for w in ("head", "token_type", "cache")):
            return "other"
        return "src_mask" if both else "mask"
    if any(w in name for w in _CACHE):
        return "cache"
    if name in _SRC:
        return "src"
    if name in _TGT and both and (place > 0 or name not in ("y", "target")):
        return "tgt"
    if name in _LABELS and (place > 0 or name not in ("y", "target")):
        return "labels"
    if name in _IDS:
        return ("src" if place == 0 else "other") if both else ("ids" if place == 0 else "other")
    return "other"
