"""What stands in the weights before training: rows of padding, last projections of branches, promised sizes.

GPT-2: the last matrix of each residual branch begins √(2·layers) times smaller (Radford et al. 2019)
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.report import Finding


def _run(e: Exam) -> list[Finding]:
    return _sizes(e) or _pad_row(e) or _branches(e)


def _sizes(e: Exam) -> list[Finding]:
    """A table has as many rows as its module says: another table was put in its place."""
    for path, m in e.p.subject.model.named_modules():
        said: Any = None
        if type(m) is nn.Embedding:
            said = (m.num_embeddings, m.embedding_dim)
        elif type(m) is nn.Linear:
            said = (m.out_features, m.in_features)
        if said is not None and tuple(m.weight.shape) != said and m.weight.ndim == 2:
            twin = [
                n for n, o in e.p.subject.model.named_modules() if o is not m and getattr(o, "weight", 0) is m.weight
            ]
            return [
                Finding(
                    "initial weights",
                    "error",
                    path,
                    f"{path} was built as {said[0]} x {said[1]}, and its weight is "
                    f"{m.weight.shape[0]} x {m.weight.shape[1]}" + (f", the weight of {twin[0]}" if twin else ""),
                    "the weight has the size that was asked for",
                    "a tie or a copy put another table in its place: ids beyond it raise, the others get a foreign row",
                    "tie only where both vocabularies are one; check the shapes before you assign",
                    f"model.{path}.weight.shape",
                    explains=frozenset({"sharing", "tying"}),
                )
            ]
    return []


def _pad_row(e: Exam) -> list[Finding]:
    model = e.p.subject.model
    for path, m in model.named_modules():
        if not isinstance(m, nn.Embedding) or m.padding_idx is None or m.weight.device.type == "meta":
            continue
        size = float(m.weight.detach()[m.padding_idx].float().norm())
        if size > 0:
            return [
                Finding(
                    "initial weights",
                    "note" if hasattr(model, "config") else "warning",
                    path,
                    f"row {m.padding_idx} of {path}, its padding_idx, has the norm {number(size)}",
                    "0, and it will never be trained: its gradient is thrown away",
                    "initial values were drawn (or the table was replaced) after padding_idx had set the row to 0",
                    "with torch.no_grad(): table.weight[pad].zero_(), at the end of the initialisation",
                    f"model.{path}.weight[{m.padding_idx}].norm()",
                )
            ]
    return []


def _branches(e: Exam) -> list[Finding]:
    """Where some matrices begin smaller by √(2·layers), they are those that write into the stream."""
    model = e.p.fresh
    blocks = blocks_of(model)
    if len(blocks) < 2:
        return []
    order: list[str] = []
    handles = [
        m.register_forward_hook(lambda m, a, o, path=path: order.append(path))
        for path, m in model.named_modules()
        if isinstance(m, nn.Linear)
    ]
    try:
        e.p(e.ids, model=model)
    finally:
        for handle in handles:
            handle.remove()
    path, block = blocks[-1]
    own = [n for n in dict.fromkeys(order) if n.startswith(path + ".")]
    std = {n: float(model.get_submodule(n).weight.detach().std()) for n in own}  # type: ignore[operator]
    large = max(std.values(), default=0.0)
    small = [n for n in own if _ratio(std[n], large, len(blocks))]
    two = all(n in small or std[n] > 0.9 * large for n in own)  # else sizes follow the widths: no rule to break
    if not small or large == 0 or not two:
        return []
    groups: dict[str, list[str]] = {}
    for n in own:
        groups.setdefault(_branch(n, path, block), []).append(n)
    for names in groups.values():
        last = names[-1]
        wrong = [n for n in names[:-1] if n in small]
        if wrong and last not in small and len(names) > 1:
            return [
                Finding(
                    "initial weights",
                    "warning",
                    wrong[0],
                    f"{wrong[0]} begins with deviation {number(std[wrong[0]])}, {last} with {number(std[last])}",
                    f"the smaller one (by about √{2 * len(blocks)}) in {last}, which writes into the residual stream",
                    "the scaled initial value went to another matrix: a name that no longer fits",
                    "scale the last projection of each branch (attention output, feed-forward down)",
                    "the variance of the stream should stay the same from layer to layer",
                    "likely",
                )
            ]
    return []


def _ratio(small: float, large: float, layers: int) -> bool:
    return any(math.isclose(small * math.sqrt(k), large, rel_tol=0.12) for k in (layers, 2 * layers))


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The longest run of layers of one class."""
    best: list[tuple[str, nn.Module]] = []
    for path, m in model.named_modules():
        if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > len(best):
            kinds = {type(x) for x in m}
            if len(kinds) == 1 and any(isinstance(y, nn.Linear) for y in next(iter(m)).modules()):
                best = [(f"{path}.{i}".lstrip("."), x) for i, x in enumerate(m)]
    return best


def _branch(name: str, path: str, block: nn.Module) -> str:
    """The part of a layer that a matrix belongs to; matrices that hang on the layer itself go by their shapes."""
    inside = name[len(path) + 1 :]
    if "." in inside:
        return inside.rpartition(".")[0] if inside.count(".") == 1 else inside.split(".")[0]
    return "."


PROBE = Probe("initial weights", "padding rows, branches and sizes are what was meant", _run)
