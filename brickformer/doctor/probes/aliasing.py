"""What a module returned is not written into before another one reads it beside its own input.

    decoding = encoding; decoding.add_(x); layer(decoding, encoding)      the memory has changed as well

Writing into a tensor that nobody else holds is harmless (x += y), so only what is passed on as a second input counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.report import Finding


def _run(e: Exam) -> list[Finding]:
    p = e.p
    kept: dict[int, tuple[str, Tensor, Tensor]] = {}
    found: list[Finding] = []
    handles = []
    for path, module in p.model.named_modules():

        def keep(m: Any, a: Any, out: Any, path: str = path) -> None:
            if isinstance(out, Tensor) and not out.is_nested and out.ndim == 3 and out.is_floating_point():
                kept[id(out)] = (path, out, out.detach().clone())

        def read(m: Any, a: Any, k: Any, path: str = path) -> None:
            given = [x for x in (*a, *k.values()) if isinstance(x, Tensor) and not x.is_nested and x.ndim == 3]
            for x in given[1:]:
                if x is given[0]:
                    continue
                said = kept.get(id(x))
                if said is None or found or said[1].shape != said[2].shape:
                    continue
                moved = float((x - said[2]).abs().max())
                if moved > p.allowed:
                    found.append(_finding(path, said[0], moved))

        handles.append(module.register_forward_hook(keep))
        handles.append(module.register_forward_pre_hook(read, with_kwargs=True))
    try:
        with torch.no_grad():
            p(e.ids)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _finding(reader: str, by: str, moved: float) -> Finding:
    return Finding(
        "aliasing",
        "error",
        reader,
        f"{reader} reads what {by} said, changed by {number(moved)} since",
        "0: the memory is what the encoder said",
        "two names for one tensor, and an operation in place (add_, +=, *=) on one of them",
        "x = x + y instead of x.add_(y), or clone first",
        explains=frozenset({"memory"}),
    )


PROBE = Probe("aliasing", "what one part said reaches another unchanged", _run)
