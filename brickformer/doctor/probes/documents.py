"""Who may see whom, where the user says it: documents packed into a row, a table of allowed looks.

    doc(i) != doc(j)  ⟹  ∂y_i/∂x_j = 0;      allowed is a table (T, T): y_i depends on x_j only along its paths

Shapes: doc (B, T); allowed (T, T), True where i may look at j in one layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.outputs import differ
from brickformer.doctor.report import Finding

_NAMES = ("doc", "document", "packed", "seq_ids", "sequence_ids", "seqlen_ids", "pack")


def _argument(e: Exam) -> str:
    if e.p.subject.call is not None:
        return ""
    return next((n for n in e.p.signature.roles if any(n.lower().startswith(w) for w in _NAMES)), "")


def _why_not(e: Exam) -> str | None:
    s = e.p.subject
    if s.allowed is not None or s.packed is not None or (e.p.ours and e.p.kind != "encoder") or _argument(e):
        return None if e.p.kind != "encoder_decoder" else "a source beside the target"
    return "no documents in a row (Subject(packed=...)), no table of who sees whom (Subject(allowed=...))"


def _run(e: Exam) -> list[Finding]:
    return _table(e) if e.p.subject.allowed is not None else _packed(e)


def _packed(e: Exam) -> list[Finding]:
    p = e.p
    cut = p.tokens // 2
    doc = torch.zeros(2, p.tokens, dtype=torch.long)
    doc[:, cut:] = 1
    ids = e.ids
    for masked in (False, True) if e.p.forms or _masks(e) else (False,):
        base = _ask(e, ids, doc, masked)
        for j in (0, cut - 1, p.tokens - 1):
            moved = differ(base, _ask(e, p.other(ids, j), doc, masked))
            foreign = moved[:, cut:] if j < cut else moved[:, :cut]
            if float(foreign.max()) > p.allowed:
                return [
                    _finding(
                        f"changing token {j} of document {int(j >= cut)} moved document {int(j < cut)} by "
                        f"{number(foreign.max())}" + (", where a mask of padding is given as well" if masked else ""),
                        "0: documents in one row do not see each other",
                        "the mask of the documents is dropped"
                        + (" as soon as another mask is given" if masked else ""),
                        "allowed = causal & (doc[:, :, None] == doc[:, None, :]) & padding",
                    )
                ]
    return []


def _masks(e: Exam) -> list[str]:
    return [n for n in e.p.signature.named("mask", "src_mask") if "mask" in n.lower()]


def _ask(e: Exam, ids: Tensor, doc: Tensor, masked: bool) -> Tensor:
    p = e.p
    p.budget.tick()
    with torch.no_grad():
        if p.subject.packed is not None:
            return p.arranged(p.subject.packed(p.model, ids, doc), *ids.shape)
        if p.ours:
            from brickformer.mask import Span
            from brickformer.models import DecoderModel

            if isinstance(p.model, DecoderModel):
                return p.model(ids, Span.of(ids, doc=doc))
            raise LookupError("an encoder of ours takes no documents")
        kwargs: dict[str, Any] = {p.signature.first("ids") or "ids": ids, _argument(e): doc}
        if masked:
            for n in _masks(e):
                kwargs[n] = torch.ones_like(ids) if n not in p.forms else p.forms[n].make(ids >= 0, ids.shape[1])
        return p.arranged(p.signature.given(p.model, kwargs), *ids.shape)


def _table(e: Exam) -> list[Finding]:
    p = e.p
    assert p.subject.allowed is not None
    allowed = p.subject.allowed.bool().cpu()
    n = len(allowed)
    ids = p.draw(1, n)
    reach = allowed | torch.eye(n, dtype=torch.bool)
    for _ in range(n.bit_length() + 1):
        reach = (reach.float() @ reach.float()) > 0
    base = p(ids)
    seen = torch.stack([differ(base, p(p.other(ids, j)))[0] > p.allowed for j in range(n)], 1)
    extra = (seen & ~reach).nonzero().tolist()
    missing = (allowed & ~seen).nonzero().tolist()
    if extra:
        i, j = extra[0]

        def wrong(x: Tensor, y: Tensor) -> bool:
            return x.ndim == 3 and x.shape[1] == n and bool(differ(x, y)[0, i] > p.allowed)

        where = e.begins(lambda: p(ids), lambda: p(p.other(ids, j)), wrong)
        return [
            _finding(
                f"output {i} depends on input {j}, which nothing it may look at can tell it ({len(extra)} such pairs)",
                "only along the allowed looks",
                "the mask was built from other groups of tokens than was meant, or transposed",
                "print the mask beside the table of who may see whom",
                where,
            )
        ]
    if missing:
        i, j = missing[0]
        return [
            _finding(
                f"output {i} does not depend on input {j}, which it may look at ({len(missing)} such pairs)",
                "every allowed look is used",
                "the mask hides more than was meant",
                "print the mask beside the table of who may see whom",
            )
        ]
    return []


def _finding(measured: str, expected: str, cause: str, fix: str, where: str = "") -> Finding:
    return Finding(
        "documents",
        "error",
        where,
        measured,
        expected,
        cause,
        fix,
        "change one token and look at the outputs of the other group",
        explains=frozenset({"causality", "padding"}),
    )


PROBE = Probe("documents", "who may not be seen is not seen", _run, _why_not)
