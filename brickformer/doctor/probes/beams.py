"""Beam search finds at least what it promises: as good as a plain beam of its width that recomputes everything.

    score(y | x) = Σ_t log p(y_t | x, y_<t)      width 1 is greedy; a reordered cache changes nothing

Where the length of the prompt is counted into the length of an answer, longer prompts get shorter answers: shown by
logits that are the same everywhere.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from brickformer.doctor.exam import Exam, Probe, number
from brickformer.doctor.guard import duplicate
from brickformer.doctor.report import Finding

ROWS, NEW = 4, 4


def _why_not(e: Exam) -> str | None:
    p = e.p
    if p.subject.beam is None:
        return "no beam search given: Subject(beam=lambda model, ids, new, width: ...)"
    return "it gives no logits" if p.features not in (p.vocab, p.target_vocab) else None


def _run(e: Exam) -> list[Finding]:
    return _quality(e) or _lengths(e)


def _quality(e: Exam) -> list[Finding]:
    p = e.p
    both = p.kind == "encoder_decoder"
    for width in (1, 3):
        worse, most, told = 0, 0.0, ""
        for row in range(ROWS):
            src = p.source(row + 1)
            given = p.draw(ROWS, 2)[row : row + 1] if src is None else src[row : row + 1]
            got = _ask(e, p.model, given, width)
            start = given if not both else got[:, :1]
            got = got if both or got.shape[1] > NEW else torch.cat([given, got], 1)
            if not both and not torch.equal(got[:, : start.shape[1]], start):
                return []  # what it returns is not known
            tail = got[:, start.shape[1] :]
            if tail.shape[1] < 1 or (p.subject.eos is not None and bool((tail == p.subject.eos).any())):
                continue
            mine = _score(e, start, tail, given if both else None)
            best = _reference(e, start, tail.shape[1], width, given if both else None)
            if best - mine > 1e-6 * max(1.0, abs(best)):
                worse += 1
                if best - mine > most:
                    most, told = best - mine, f"log p = {number(mine)} where {number(best)} was to be had"
        if worse:
            what = "width 1 is not greedy search" if width == 1 else f"width {width}"
            return [
                _finding(
                    f"{what}: {worse} of {ROWS} prompts got a worse answer than a plain beam finds ({told})",
                    "the cache is not reordered with the beams, scores are sorted the wrong way round, or hypotheses "
                    "are mixed up",
                )
            ]
    return []


def _ask(e: Exam, model: nn.Module, given: Tensor, width: int, new: int = NEW) -> Tensor:
    e.p.budget.tick()
    assert e.p.subject.beam is not None
    with torch.no_grad():
        got: Any = e.p.subject.beam(model, given, new, width)
    got = got[0] if isinstance(got, tuple) else got
    got = torch.as_tensor(got)
    got = got.reshape(1, -1) if got.ndim == 1 else got
    return got.flatten(0, -2)[:1]


def _logp(e: Exam, ids: Tensor, src: Tensor | None) -> Tensor:
    source = None if src is None else src.expand(len(ids), -1)
    return e.p(ids, src=source)[:, -1].log_softmax(-1)


def _score(e: Exam, start: Tensor, tail: Tensor, src: Tensor | None) -> float:
    total, ids = 0.0, start
    for t in range(tail.shape[1]):
        total += float(_logp(e, ids, src)[0, tail[0, t]])
        ids = torch.cat([ids, tail[:, t : t + 1]], 1)
    return total


def _reference(e: Exam, start: Tensor, new: int, width: int, src: Tensor | None) -> float:
    """The best score of a plain beam."""
    beams, scores = start, torch.zeros(1, dtype=torch.float64)
    never = [i for i in (e.p.subject.eos,) if i is not None]
    for _ in range(new):
        logp = _logp(e, beams, src).double()
        logp[:, never] = -torch.inf
        total = scores[:, None] + logp
        scores, flat = total.flatten().topk(min(width, total.numel()))
        row, token = flat // logp.shape[-1], flat % logp.shape[-1]
        beams = torch.cat([beams[row], token[:, None]], 1)
    return float(scores.max())


def _lengths(e: Exam) -> list[Finding]:
    """Every step says the same: the answer may not depend on how long the prompt is."""
    p = e.p
    eos = p.subject.eos
    if p.kind == "encoder_decoder" or eos is None:
        return []
    model = duplicate(p.model)
    rest = (1 - math.exp(-0.5) - math.exp(-1.0)) / max(p.features - 2, 1)
    flat = torch.full((p.features,), math.log(rest), dtype=torch.float64)
    flat[eos] = -1.0
    flat[int(p.pool()[0])] = -0.5
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == p.features]
    if not heads:
        return []
    heads[-1].register_forward_hook(lambda m, a, out: flat.to(out).expand(out.shape).clone())
    lengths = {}
    for prompt in (1, 2, p.tokens - 1):
        got = _ask(e, model, p.draw(1, prompt), 4)
        tail = (got[:, prompt:] if got.shape[1] > NEW or got.shape[1] > prompt else got)[0].tolist()
        lengths[prompt] = tail.index(eos) if eos in tail else len(tail)
    if len(set(lengths.values())) == 1:
        return []
    told = ", ".join(f"{n} ids after a prompt of {prompt}" for prompt, n in lengths.items())
    return [
        _finding(
            f"with the same distribution at every step the answers have {told}",
            "the score is divided by the length of prompt and answer together: long prompts make short answers win",
            "divide by the number of generated tokens alone",
        )
    ]


def _finding(measured: str, cause: str, fix: str = "") -> Finding:
    return Finding(
        "beam",
        "error",
        "",
        measured,
        "at least the score of a plain beam of the same width",
        cause,
        fix or "after each step: cache = cache.index_select(0, parents); sort descending",
        "beam(width=1) == greedy; score(beam(width=k)) >= score(greedy)",
        "likely",
        explains=frozenset({"cached"}),
    )


PROBE = Probe("beam", "beam search finds what it promises", _run, _why_not)
