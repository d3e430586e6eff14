"""Read a checkpoint folder: config.json -> spec, tensors -> parameters, one at a time.

The model is first built without numbers (`shapes.unfilled`): what bricks compute for themselves is there, each
parameter waits. Names, shapes and types of all tensors are compared with the table before one is read; then every
parameter of ours is made of its parts and put in its place. At any moment there is the model and at most one tensor
more. Every tensor of the folder is used, or is a tied one stored twice and equal, or holds nothing (`Family.ignored`);
else it is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from brickformer.errors import RunError, SpecError, nearest
from brickformer.files import read_json
from brickformer.hf.config import Config
from brickformer.hf.families import FAMILIES
from brickformer.hf.family import Family
from brickformer.hf.folder import FLOATS, Tensors, open_folder
from brickformer.hf.table import Line, Rule, Tie
from brickformer.linear import FusedLinear
from brickformer.models import AnyModel
from brickformer.shapes import unfilled

ROWS: Final = 1024


@final
@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint that was read. model: in evaluation mode. config: config.json as it stands. family: its table."""

    model: AnyModel
    config: Mapping[str, Any]
    family: Family
    path: Path


def load(path: Path | str, *, dtype: torch.dtype | None = None) -> Checkpoint:
    """The checkpoint in a folder. dtype: of the parameters, default as they are stored, the widest of several types.

    Errors: SpecError for a configuration, RunError for files, that cannot be used; nothing is left half read.
    """
    folder = Path(path).expanduser()
    family, data = family_of(folder)
    files = open_folder(folder)
    where = str(folder / "config.json")
    spec = family.spec(data, where, files)
    try:
        model, table = unfilled(spec), list(family.table(spec))
    except (RuntimeError, MemoryError, OverflowError):  # torch cannot even count its numbers
        raise SpecError(f"{where}: no model of these sizes can be built: one of them is absurd. Correct it.") from None
    fill(model, table, files, family, dtype)
    return Checkpoint(model.eval(), data, family, folder)


def family_of(folder: Path) -> tuple[Family, dict[str, Any]]:
    """The family of a folder, and its configuration. Errors: RunError, SpecError: no folder, no config, not known."""
    if not folder.is_dir():
        near = [str(p) for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        raise RunError(f"{folder}: no such folder; {nearest(str(folder), near)}")
    if not (folder / "config.json").is_file():
        raise RunError(f"{folder}: no config.json in it. Name the folder of a checkpoint.")
    data = read_json(folder / "config.json")
    kind = Config(data, str(folder / "config.json")).get("model_type", str)
    if kind not in FAMILIES:
        raise SpecError(f"{folder / 'config.json'}: model_type: no table for {kind!r}; {nearest(kind, FAMILIES)}")
    return FAMILIES[kind], data


def fill(
    model: nn.Module, table: Iterable[Line], files: Mapping[str, Tensors], family: Family, dtype: torch.dtype | None
) -> None:
    """Give every parameter of `model` its numbers; dtype None: of the widest type among them.

    Errors: RunError naming the tensor: missing, extra, shape, type, NaN, a tie that is none.
    """
    lines = list(table)
    if not any(name.startswith(family.body) for name in files):
        # saved from the body alone
        lines = [line.renamed(lambda name: name.removeprefix(family.body)) for line in lines]
    ties = [line for line in lines if isinstance(line, Tie)]
    other = {tie.of: tie.name for tie in ties if tie.of not in files and tie.name in files}  # kept under its other name
    ties = [tie for tie in ties if tie.of not in other]
    rules = [line.renamed(lambda name: other.get(name, name)) for line in lines if isinstance(line, Rule)]
    own = model.state_dict(keep_vars=True)
    where = next(iter(files.values())).path.parent
    plan = [(rule, *_layout(rule, own[rule.ours], model)) for rule in rules]
    stored = _compare(plan, ties, files, family, where)
    for tie in ties:
        if tie.name in files and not _alike(files[tie.name].read(tie.name), files[tie.of].read(tie.of)):
            raise RunError(
                f"{files[tie.name].path}: {tie.name!r} and {tie.of!r} are tied, but their values differ. Remove the "
                "one that is wrong, or set tie_word_embeddings to false in config.json."
            )
    dtype = dtype or reduce(torch.promote_types, stored)
    places = _places(model)
    for rule, sizes, shapes in plan:
        made = _made(rule, own[rule.ours], sizes, shapes, files, dtype)
        _put(places[id(own[rule.ours])], made)
    left = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    assert not left, f"the table of {family.model_type} forgets {left}"


Plan = list[tuple[Rule, tuple[int, ...], list[tuple[int, ...]]]]


def _layout(rule: Rule, own: Tensor, model: nn.Module) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """How many of our rows each of theirs makes, and the shape it has to have."""
    sizes = parts(rule, own, model)
    shapes = [(size, *own.shape[1:]) for size in sizes] if own.ndim else [()]
    if rule.row:
        return sizes, [(1, *shape) for shape in shapes]
    return sizes, [shape[::-1] if rule.turned else shape for shape in shapes]


def parts(rule: Rule, own: Tensor, model: nn.Module) -> tuple[int, ...]:
    """The rows of `own` that each of theirs makes, in their order."""
    if len(rule.theirs) == 1:
        return (own.shape[0] if own.ndim else 1,)
    owner = model.get_submodule(rule.ours.rpartition(".")[0])
    assert isinstance(owner, FusedLinear) and len(owner.parts) == len(rule.theirs), rule
    return owner.parts


def _alike(a: Tensor, b: Tensor) -> bool:
    """Equal, in whatever type each is stored; what is no number equals itself, and is refused later."""
    if a.dtype != b.dtype:
        a, b = (t.to(torch.promote_types(a.dtype, b.dtype)) for t in (a, b))
    return torch.equal(a, b) or (a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def _compare(
    plan: Plan, ties: list[Tie], files: Mapping[str, Tensors], family: Family, where: Path
) -> set[torch.dtype]:
    """Names, shapes and types against the model's. The types that are there."""
    stored: set[torch.dtype] = set()
    wanted = {name: shape for rule, _, shapes in plan for name, shape in zip(rule.theirs, shapes, strict=True)}
    extra = [name for name in files if name not in wanted and name not in {tie.name for tie in ties}]
    extra = [name for name in extra if not any(re.fullmatch(pattern, name) for pattern in family.ignored)]
    for name, shape in wanted.items():
        if name not in files:
            raise RunError(f"{where}: no tensor {name!r}, which a {family.model_type} of this config.json has.")
        got = files[name].shape(name)
        if got != shape:
            raise RunError(f"{files[name].path}: {name!r} has shape {got}, expected {shape} by config.json.")
    for name in [*wanted, *(tie.name for tie in ties if tie.name in files)]:
        dtype = files[name].dtype(name)
        if isinstance(dtype, str):
            raise RunError(
                f"{files[name].path}: {name!r} is of type {dtype}, expected one of {', '.join(FLOATS)}: its numbers "
                "are packed. Take the checkpoint they were made from."
            )
        stored.add(dtype)
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        raise RunError(
            f"{files[extra[0]].path}: {extra[0]!r}{more} belongs to no part of a {family.model_type} of this "
            f"config.json; {nearest(extra[0], wanted)}"
        )
    return stored


def _made(
    rule: Rule,
    own: Tensor,
    sizes: tuple[int, ...],
    shapes: list[tuple[int, ...]],
    files: Mapping[str, Tensors],
    dtype: torch.dtype,
) -> Tensor:
    """One parameter of ours, part by part. Errors: RunError, as `_numbers`."""
    out: Tensor | None = None
    start = 0
    for name, size in zip(rule.theirs, sizes, strict=True):
        part = _numbers(files[name], name, dtype)
        if rule.turned:
            part = part.T
        if rule.row:
            part = part[0]
        if out is None:
            out = torch.empty(own.shape, dtype=dtype)
        if rule.to is not None:
            for rows in torch.arange(size).split(ROWS):  # a few at a time: another type makes a copy of them
                out[rule.to[start + rows]] = part[rows].to(dtype)
        elif own.ndim:
            out[start : start + size].copy_(part)
        else:
            out.copy_(part)
        start += size
    assert out is not None
    return out


def _numbers(file: Tensors, name: str, dtype: torch.dtype) -> Tensor:
    """One of theirs. Errors: RunError: numbers that are none, or that `dtype` cannot hold."""
    part = file.read(name)
    if part.numel():
        low, high = map(float, torch.aminmax(part))  # unlike isfinite, it makes no copy
        if not (math.isfinite(low) and math.isfinite(high)):
            bad = int((~torch.isfinite(part)).sum())
            raise RunError(f"{file.path}: {name!r} holds {bad} values that are NaN or infinite. Copy it again.")
        if max(-low, high) > torch.finfo(dtype).max:
            raise RunError(
                f"{file.path}: {name!r} holds {max(-low, high):.3g}, too much for {dtype}. Take a wider type."
            )
    return part


def _places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter and buffer stands: more than once where it is tied."""
    out: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, own in (*module._parameters.items(), *module._buffers.items()):
            if own is not None:
                out.setdefault(id(own), []).append((module, name))
    return out


def _put(places: list[tuple[nn.Module, str]], made: Tensor) -> None:
    """One tensor in all its places, as the one parameter (or buffer) that they share."""
    module, name = places[0]
    held = nn.Parameter(made, requires_grad=made.is_floating_point()) if name in module._parameters else made
    for module, name in places:
        setattr(module, name, held)
