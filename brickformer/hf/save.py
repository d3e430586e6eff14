"""Write a model as a checkpoint folder of the family that computes the same.

The folder is written beside its place, read back, compared logit by logit, and only then gets its name: it is whole and
right, or not there. Where the `transformers` library is installed its own reading is compared too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import safetensors.torch
import torch
from torch import Tensor

from brickformer.errors import RunError
from brickformer.files import flush, write_json, write_whole, writing
from brickformer.hf.families import FAMILIES
from brickformer.hf.family import Family
from brickformer.hf.fit import differences, fit, settled
from brickformer.hf.load import load, parts
from brickformer.hf.table import Rule
from brickformer.hf.verify import Check, compare
from brickformer.linear import CodedMap
from brickformer.models import AnyModel

SHARD: Final = 4 * 10**9
"""Bytes in one file; more go into shards with an index."""
_OF_TOKENIZER: Final = ("bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id")
"""Ids that the tokenizer decides; where padding is, some families count positions from."""
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}


@final
@dataclass(frozen=True, slots=True)
class Saved:
    """What was written: the folder, its family, and how far the logits of what was read back are off."""

    path: Path
    family: Family
    check: Check


def save(
    model: AnyModel,
    path: Path | str,
    *,
    like: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    files: Mapping[str, str | bytes] | None = None,
    family: str | None = None,
    shard: int = SHARD,
) -> Saved:
    """Write `model` to a new folder.

    like: the configuration it came from, kept word for word where it still describes the model. extra: fields for the
    configuration that change nothing (special ids, the longest input). files: more files by name, a tokenizer's.
    family: this one or none. shard: bytes in one file. Errors: SpecError where no family fits, naming the brick;
    RunError: a folder that holds something, a disk that is full, logits that are off. Nothing is left then.
    """
    target = Path(path).expanduser()
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise RunError(f"{target}: is there already. Name a new folder.")
    chosen, config = configuration(model, like, extra or {}, family)
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with writing(target):
            part.mkdir(parents=True)
        write_json(part / "config.json", config)
        for name, content in (files or {}).items():
            (part / name).parent.mkdir(exist_ok=True)
            write_whole(part / name, content.encode() if isinstance(content, str) else content)
        _write_tensors(part, theirs(model, chosen), shard)
        check = compare(model, load(part).model, part)
        with writing(target):
            if target.is_dir():
                target.rmdir()
            flush(part)
            part.rename(target)
            flush(target.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return Saved(target, chosen, check)


def configuration(
    model: AnyModel, like: Mapping[str, Any] | None, extra: Mapping[str, Any], only: str | None = None
) -> tuple[Family, dict[str, Any]]:
    """The family and the configuration to write. Errors: SpecError where none computes the same; RunError: codes."""
    if any(isinstance(module, CodedMap) for module in model.modules()):
        raise RunError("the model is quantized, and its codes have no names there. Save the one that it was made from.")
    spec = model.spec
    if like is not None and like.get("model_type") in FAMILIES and only in (None, like["model_type"]):
        family = FAMILIES[like["model_type"]]
        if _says(family, like, model):
            config = dict(like)
            for name in ("torch_dtype", "dtype"):
                if name in config:
                    config[name] = _dtype(model)
            return family, config
    found = fit(spec, only)
    config = {
        "architectures": [found.family.architecture],
        "model_type": found.family.model_type,
        "torch_dtype": _dtype(model),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    own = {name: id for name, id in extra.items() if name in _OF_TOKENIZER and id is not None}
    return found.family, config | dict(extra) | found.config | own


def _says(family: Family, like: Mapping[str, Any], model: AnyModel) -> bool:
    """Whether a configuration describes the model; some of it only together with the names of the tensors."""
    if not isinstance(model.spec, family.kind):
        return False
    apart = list(differences(settled(family.spec(like)), settled(model.spec)))
    if apart and all("layers" not in path for path, _, _ in apart):  # the table below needs layers of its kind
        lines = family.table(settled(model.spec))
        names = {name for rule in lines if isinstance(rule, Rule) for name in rule.theirs}
        apart = list(differences(settled(family.spec(like, tensors=names)), settled(model.spec)))
    return not apart


def _dtype(model: AnyModel) -> str:
    """The type of its parameters, as a configuration says it."""
    return _DTYPES[next(p.dtype for p in model.parameters() if p.is_floating_point())]


def theirs(model: AnyModel, family: Family) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the checkpoint, name by name; views of ours where no row moves.

    Errors: RunError: a tensor that is kept otherwise.
    """
    own = model.state_dict()
    for rule in family.table(settled(model.spec)):
        if not isinstance(rule, Rule):
            continue  # a tied tensor is written once
        if rule.ours not in own:
            raise RunError(
                f"{rule.ours}: no such tensor in the model. Is it quantized? Export the run that it was made from; "
                "--to gguf has --dtype q8_0 and q4_0."
            )
        whole = own[rule.ours].detach()
        start = 0
        for name, size in zip(rule.theirs, parts(rule, whole, model), strict=True):
            rows = slice(start, start + size) if rule.to is None else rule.to[start : start + size].to(whole.device)
            part = whole[rows] if whole.ndim else whole
            yield name, part[None] if rule.row else part.T if rule.turned else part
            start += size


def _write_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]], limit: int) -> None:
    """One file, or shards of at most `limit` bytes (or one tensor), of which no more than one is held at a time."""
    written: list[tuple[Path, list[str]]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def put() -> None:
        temporary = folder / f"part-{len(written)}"
        with writing(temporary):
            safetensors.torch.save_file(held, temporary, metadata={"format": "pt"})
            temporary.chmod((folder / "config.json").stat().st_mode)  # it is made for its owner alone
            flush(temporary)
        written.append((temporary, list(held)))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > limit:
            put()
            size = 0
        held[name] = tensor.cpu().contiguous().clone() if tensor.numel() else tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    put()
    if len(written) == 1:
        written[0][0].rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for i, (temporary, names) in enumerate(written, 1):
        final_name = f"model-{i:05d}-of-{len(written):05d}.safetensors"
        temporary.rename(folder / final_name)
        places |= dict.fromkeys(names, final_name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_whole(folder / "model.safetensors.index.json", (json.dumps(index, indent=2) + "\n").encode())
