"""The decoder of an encoder-decoder reads its source: every source token has influence, the source sees no target."""

from __future__ import annotations

from brickformer.doctor.exam import Exam, Probe
from brickformer.doctor.outputs import differ
from brickformer.doctor.report import Finding


def _both(e: Exam) -> str | None:
    return None if e.p.kind == "encoder_decoder" else "no source beside the target"


def _run(e: Exam) -> list[Finding]:
    p = e.p
    src = p.source(2)
    assert src is not None
    for h in e.trace.heads:
        if h.q.ndim == 4 and h.scores is not None and h.scores.shape[-2:] == (src.shape[1], p.tokens):
            return [
                _finding(
                    "cross-attention has a query for each source token and a key for each target token",
                    "queries from the target, keys and values from the source",
                    "q and k, v are swapped",
                    "q = W_q(x); k, v = W_k(memory), W_v(memory)",
                    h.place,
                )
            ]
    base = p(e.ids, src=src)
    size = [float(differ(base, p(e.ids, src=p.other(src, s, "src"))).max()) for s in range(src.shape[1])]
    blind = [s for s, x in enumerate(size) if x <= p.allowed * 1e-3]
    if len(blind) == src.shape[1]:
        return [
            _finding(
                "another source changed the output by 0",
                "the output depends on the source",
                "the memory is not passed on, or cross-attention reads the target itself as keys and values",
                "k, v = W_k(memory), W_v(memory) in cross-attention, in the call as well",
                e.ends(lambda: p(e.ids, src=src), lambda: p(e.ids, src=p.other(src, 0, "src"))),
            )
        ]
    if blind:
        return [
            _finding(
                f"source tokens {blind} have no influence on any output",
                "every real source token has some",
                "the mask of the memory hides too much: built from the wrong side, or causal, or of wrong polarity",
                "build it from the source: (src != pad)[:, None, None, :]",
            )
        ]
    for h in e.trace.heads:
        if h.k.shape[-2] != src.shape[1] or h.q.shape[-2] != p.tokens:
            continue
        hidden = h.hides if h.weights is None else bool((h.weights == 0).any())
        if hidden:
            return [
                _finding(
                    "cross-attention hides source tokens from some targets, where no source token is padding",
                    "every target sees the whole source",
                    "it is causal or windowed: the mask of the target, or another wrong one, was given to it",
                    "the mask of cross-attention hides padding of the source and nothing else",
                    h.place,
                )
            ]
    first = differ(base, p(p.other(e.ids, 0), src=src))
    if float(first.max()) <= p.allowed * 1e-3 and p.tokens > 1:
        return [
            _finding(
                "another target token changed no output",
                "the decoder depends on its own input",
                "the decoder is not fed the (shifted) target, or attention takes the memory as queries",
                "queries come from the target: q = W_q(x)",
            )
        ]
    return []


def _finding(measured: str, expected: str, cause: str, fix: str, where: str = "") -> Finding:
    return Finding(
        "memory",
        "error",
        where,
        measured,
        expected,
        cause,
        fix,
        explains=frozenset({"dead parameters", "causality", "padding"}),
    )


PROBE = Probe("memory", "the decoder reads every source token", _run, _both)
