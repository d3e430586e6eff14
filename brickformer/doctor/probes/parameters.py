"""Weights: registered, alive, not shared by accident, tied for good, and the copy's own.

Everything that `.to()`, `state_dict()`, `copy.deepcopy` and the optimizer should see, they see.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from brickformer.doctor.exam import Exam, Probe
from brickformer.doctor.guard import duplicate, held
from brickformer.doctor.outputs import parts
from brickformer.doctor.probes.routing import routers
from brickformer.doctor.report import Finding

_INNER = frozenset("_parameters _buffers _modules _non_persistent_buffers_set training".split())


def _registered(e: Exam) -> list[Finding]:
    model = e.p.subject.model
    known_modules = {id(m) for m in model.modules()}
    known = {id(t) for t in (*model.parameters(), *model.buffers())}
    found: list[Finding] = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _INNER or "hook" in name:
                continue
            place = f"{path}.{name}".lstrip(".")
            for x in held(value):
                if isinstance(x, nn.Module) and id(x) not in known_modules and any(True for _ in x.parameters()):
                    if isinstance(value, nn.Module):
                        continue
                    return [_list(place, sum(q.numel() for y in held(value) for q in _params(y)))]
                if isinstance(x, Tensor) and id(x) not in known and x.requires_grad and x.is_leaf:
                    return [
                        _tensor(place, x, "a tensor that asks for a gradient is no nn.Parameter", "nn.Parameter(x)")
                    ]
                if isinstance(x, Tensor) and id(x) not in known and x.numel() > 1 and x.device.type == "cpu":
                    found += [_tensor(place, x, "", "self.register_buffer(name, x, persistent=False)")]
    if not found:
        return []
    stays = _stays(e)
    return [f for f in found[:1] if stays]


def _params(x: Any) -> Iterator[nn.Parameter]:
    if isinstance(x, nn.Module):
        yield from x.parameters()


def _stays(e: Exam) -> bool:
    """Whether a plain tensor stays behind when the model moves: tried on torch's device without data."""
    try:
        model = duplicate(e.p.model).to("meta")
        src = e.p.source(1)
        with torch.no_grad():
            e.p.raw(e.ids[:1].to("meta"), None if src is None else src.to("meta"), None, None, model)
    except Exception as error:
        said = str(error).lower()
        return "device" in said and "meta" in said and "cpu" in said
    return False


_ALL = frozenset(  # it stays in train() and in its own precision, so all that is measured may be off
    "overfit copies eval precision causality padding batch heads scale positions cached length shift".split()
) | {"dead parameters", "softmax axis", "label padding", "left padding", "first loss", "random labels"}


def _list(place: str, count: int) -> Finding:
    return Finding(
        "registration",
        "error",
        place,
        f"{count:,} parameters in a plain list or dict: not in parameters(), not in state_dict()",
        "every module with weights is registered",
        "a Python list hides modules from the optimizer, from .to() and from saving",
        "nn.ModuleList([...]) or nn.ModuleDict({...})",
        "sum(p.numel() for p in model.parameters())",
        explains=_ALL,
    )


def _tensor(place: str, x: Tensor, cause: str, fix: str) -> Finding:
    return Finding(
        "registration",
        "error" if cause else "warning",
        place,
        f"a tensor {tuple(x.shape)} that is neither parameter nor buffer"
        + ("" if cause else " stays behind when the model moves to another device"),
        "what .to(), .double() and state_dict() should see is registered",
        cause or "a plain attribute",
        fix,
    )


def _shared(e: Exam) -> list[Finding]:
    """One module that stands for several layers: [block] * n, or one feed-forward given to every layer."""
    model = e.p.subject.model
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        items = list(module._modules.values())
        for i, a in enumerate(items):
            for j in range(i + 1, len(items)):
                b = items[j]
                if a is None or b is None:
                    continue
                if a is b and any(True for _ in a.parameters()):
                    return [_same(path, i, j, "", len(list(a.parameters())))]
                common = {id(m): n for n, m in a.named_modules() if n and _own(m)}
                for name, m in b.named_modules():
                    if id(m) in common and not isinstance(m, nn.Embedding):
                        return [_same(path, i, j, name, len(list(m.parameters())))]
    return []


def _own(m: nn.Module) -> bool:
    return any(True for _ in m.parameters())


def _same(path: str, i: int, j: int, name: str, count: int) -> Finding:
    what = f"{path}.{i} and {path}.{j}" if not name else f"{path}.{i}.{name} and {path}.{j}.{name}"
    return Finding(
        "sharing",
        "warning",
        f"{path}.{j}.{name}".rstrip("."),
        f"{what} are one module ({count} tensors): the layers share their weights",
        "a module of its own in each layer, unless sharing is meant",
        "[block] * n repeats a reference, or one instance was given to every layer",
        "nn.ModuleList(Block(...) for _ in range(n))",
        "len({id(m) for m in model.modules()})",
        "likely",
    )


def _dead(e: Exam) -> list[Finding]:
    p = e.p
    model = p.model
    named = [(n, x) for n, x in model.named_parameters() if x.requires_grad and x.numel()]
    called: set[str] = set()
    handles = [
        m.register_forward_hook(lambda m, a, o, path=path: called.add(path)) for path, m in model.named_modules()
    ]
    ids = p.draw(4)
    src = p.source(4)
    try:
        with torch.enable_grad():
            value = p.raw(ids, src, None, None, model)
            g = torch.Generator().manual_seed(2)
            total: Any = 0.0
            for _, x in parts(value):
                if x.is_floating_point() and x.requires_grad:
                    total = total + (x * torch.randn(x.shape, generator=g).to(x)).sum()
            if not isinstance(total, Tensor):
                return [
                    Finding(
                        "dead parameters",
                        "error",
                        "",
                        "no output depends on any parameter",
                        "a gradient",
                        "the output is detached: .detach(), .data, .item() or no_grad inside forward",
                        "remove it",
                    )
                ]
            found = torch.autograd.grad(total, [x for _, x in named], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    dead = [n for (n, _), gradient in zip(named, found, strict=True) if gradient is None]
    hidden = p.kind != "encoder" and p.features not in (p.vocab, p.target_vocab)
    mixtures = [path for path, *_ in routers(model)]  # an expert that no token of this batch has chosen
    dead = [
        n
        for n in dead
        if n.rpartition(".")[0] in called or not any(n.startswith(f"{m}.".lstrip(".")) for m in mixtures)
    ]
    dead = [n for n in dead if not _elsewhere(n, called, hidden or p.kind == "encoder", model)]
    if not dead:
        return []
    return [
        Finding(
            "dead parameters",
            "warning",
            dead[0].rpartition(".")[0] or dead[0],
            f"{len(dead)} of {len(named)} tensors get no gradient: {', '.join(dead[:4])}{', ...' if dead[4:] else ''}",
            "every parameter that is trained has influence on the output",
            "built and never used in forward, or cut off by detach()",
            "use it or delete it; a distributed run waits for its gradient",
        )
    ]


_SIDE = re.compile(r"pooler|head|classif|contact|predict", re.IGNORECASE)


def _elsewhere(name: str, called: set[str], hidden: bool, model: nn.Module) -> bool:
    """A head that is called outside of forward: at the top, never called, in a model that gives hidden vectors."""
    module = name.rpartition(".")[0]
    if _SIDE.search(module) and (module not in called or "pooler" in module):
        return True  # a head for another task
    top = name.split(".")[0]
    if not hidden or any(c == top or c.startswith(top + ".") for c in called):
        return False
    return isinstance(getattr(model, top, None), nn.Module)


def _tied(e: Exam) -> list[Finding]:
    """Two parameters on one memory fall apart at the next .to(); two equal tables are a copy, not a tie."""
    model: Any = e.p.subject.model
    by_place: dict[int, tuple[str, nn.Parameter]] = {}
    named = [(n, x) for n, x in model.named_parameters() if x.numel() > 1 and x.device.type != "meta"]
    for name, x in named:
        before = by_place.setdefault(x.data_ptr(), (name, x))
        if before[1] is not x and before[1].shape == x.shape:
            return [
                _untied(
                    name,
                    f"{before[0]} and {name} are two parameters on one memory",
                    "nn.Parameter(other.weight) makes a new parameter: .double(), .to() and the optimizer see two",
                )
            ]
    tables = {n.rpartition(".")[0]: m.weight for n, m in _tables(model)}
    for n, m in model.named_modules():
        if isinstance(m, nn.Linear):
            for table, weight in tables.items():
                if m.weight is not weight and m.weight.shape == weight.shape and bool((m.weight == weight).all()):
                    if float(weight.detach().abs().max()) == 0.0:
                        continue
                    return [
                        _untied(
                            f"{n}.weight",
                            f"{n}.weight equals {table}.weight number by number, and is another tensor",
                            "copied instead of tied: they part at the first step",
                        )
                    ]
    config = getattr(model, "config", None)
    if getattr(config, "tie_word_embeddings", False) and hasattr(model, "get_output_embeddings"):
        a, b = model.get_input_embeddings(), model.get_output_embeddings()
        if b is not None and a is not None and a.weight.shape == b.weight.shape and a.weight is not b.weight:
            return [_untied("", "config.tie_word_embeddings is true, and the head is another tensor", "it was untied")]
    return []


def _tables(model: nn.Module) -> Iterator[tuple[str, nn.Embedding]]:
    for n, m in model.named_modules():
        if isinstance(m, nn.Embedding):
            yield f"{n}.weight", m


def _untied(where: str, measured: str, cause: str) -> Finding:
    return Finding(
        "tying",
        "error",
        where,
        measured,
        "one parameter: head.weight is table.weight",
        cause,
        "head.weight = embedding.weight",
        "model.head.weight is model.embed.weight  # after .double() too",
    )


def _copies(e: Exam) -> list[Finding]:
    """A deep copy has parts of its own: no function kept on it means parts of the original."""
    copied = e.p.fresh
    own = {id(m) for m in copied.modules()}
    for path, module in copied.named_modules():
        for name, value in vars(module).items():
            meant = [getattr(value, "__self__", None)]
            meant += [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if _filled(cell)]
            strange = [x for x in meant if isinstance(x, nn.Module) and id(x) not in own and _own(x)]
            if strange:
                return [_closure(f"{path}.{name}".lstrip("."), type(strange[0]).__name__)]
    return []


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _closure(place: str, kind: str) -> Finding:
    return Finding(
        "copies",
        "warning",
        place,
        f"after copy.deepcopy, {place} of the copy still calls the {kind} of the original",
        "a copy uses its own weights",
        "a lambda or a bound method kept on the module closes over the original's parts",
        "write a method instead of a lambda that closes over self",
        "copy.deepcopy(model), change the weights of model, ask the copy",
        explains=frozenset({"eval", "dead parameters", "overfit", "precision"}),
    )


REGISTERED = Probe("registration", "modules and tensors are registered", _registered)
SHARED = Probe("sharing", "every layer has weights of its own", _shared)
DEAD = Probe("dead parameters", "every parameter gets a gradient", _dead)
TIED = Probe("tying", "tied is one parameter", _tied)
COPIES = Probe("copies", "a deep copy is independent", _copies)
