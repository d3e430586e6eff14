"""Every length up to the longest works: one token, as many as were promised, every width that can be asked for.

The promise is `max_len` of the subject, or a number that the model keeps under a name such as max_len or block_size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from brickformer.doctor.exam import Exam, Probe
from brickformer.doctor.outputs import main_of
from brickformer.doctor.probes.cached import own_generate
from brickformer.doctor.report import Finding

_PROMISE = re.compile(
    r"^(max_len(gth)?|max_seq_len(gth)?|block_size|context_(len(gth)?|size)|ctx_len|n_ctx|n_positions|max_positions"
    r"|max_position_embeddings|max_sequence_length|sequence_length)$"
)
LONGEST = 600


def _run(e: Exam) -> list[Finding]:
    p = e.p
    if p.subject.build is not None and (found := _widths(e)):
        return found
    if p.shape == "pooled" or p.subject.allowed is not None:
        return _promised(e)
    works = [n for n in range(1, p.tokens + 1) if _tried(e, n)]
    if works == [p.tokens]:
        return []  # one length only
    missing = [n for n in range(1, p.tokens) if n not in works]
    if missing and missing == [1]:
        return [
            _finding(
                "one token alone raises an error or loses an axis; two do not",
                "every length from 1 on",
                "squeeze() drops an axis that happens to be 1",
                "squeeze(dim) of one axis by number, never squeeze()",
            )
        ]
    return _promised(e)


def _promised(e: Exam) -> list[Finding]:
    for where, n in _promises(e):
        if _answers(e, n):
            if found := _past(e, where, n):
                return found
            continue
        usable = next((k for k in range(n - 1, max(n - 9, 0), -1) if _answers(e, k)), None)
        if usable is None:
            continue  # another matter
        own = not where.startswith("config")
        return [
            _finding(
                f"{where} is {n}; {n} tokens raise an error, {usable} do not",
                f"as many tokens as it says: {n}",
                "positions begin above 0 (after the id of padding, or of a token that is added), so the table ends too "
                "early",
                f"a table with {n + n - usable} rows, or positions from 0",
                "warning" if own else "note",
            )
        ]
    return []


def _past(e: Exam, where: str, n: int) -> list[Finding]:
    """The model's own generate() goes on when the longest sequence is full."""
    p = e.p
    decode = own_generate(e)
    if p.kind != "decoder" or decode is None or n > 64:
        return []
    prompt = p.draw(1, 2)
    p.budget.tick()
    try:
        with torch.no_grad():
            decode(p.model, prompt, n - 4)
    except Exception:
        return []  # another matter
    try:
        with torch.no_grad():
            decode(p.model, prompt, n + 2)
    except Exception as error:
        said = (str(error).splitlines() or [""])[0][:90]
        return [
            _finding(
                f"{where} is {n}; decoding {n + 2} ids after a prompt of 2 raises {type(error).__name__}: {said}",
                "decoding goes on with the last ids, or refuses by name",
                "the whole sequence is read at every step, also when it has outgrown the table",
                "model(ids[:, -max_len:]), and drop the oldest entries of a cache",
            )
        ]
    finally:
        p.model.eval()
    return _forgets(e, where, n)


def _forgets(e: Exam, where: str, n: int) -> list[Finding]:
    """The last id of a prompt that is longer than the table still has its say."""
    p = e.p
    decode = own_generate(e)
    ids = p.draw(8, n + 2)
    turned = p.other(ids, n + 1)
    with torch.no_grad():
        likely = [p(x[:, -n:])[:, -1].argmax(-1) for x in (ids, turned)]
        if torch.equal(*likely):
            return []  # nothing to be seen
        said = [decode(p.model, x, 1)[:, -1] for x in (ids, turned)]
    p.model.eval()
    if not torch.equal(*said):
        return []
    return [
        _finding(
            f"{where} is {n}; after prompts of {n + 2} ids the next one does not depend on the last",
            "the newest ids are read, the oldest are dropped",
            "the text is cut at the wrong end when it has outgrown the table",
            "model(ids[:, -max_len:]), not ids[:, :max_len]",
            "error",
        )
    ]


def _promises(e: Exam) -> Iterator[tuple[str, int]]:
    p, seen = e.p, set()
    if p.subject.max_len is not None:
        yield "max_len", p.subject.max_len
    for path, module in p.subject.model.named_modules():
        for name, value in vars(module).items():
            if type(value) is int and _PROMISE.match(name.lower()) and 2 <= value <= LONGEST and value not in seen:
                seen.add(value)
                yield f"{path}.{name}".lstrip("."), value
    config = getattr(p.subject.model, "config", None)
    for name, value in vars(config).items() if hasattr(config, "__dict__") else ():
        if type(value) is int and _PROMISE.match(name.lower()) and 2 <= value <= LONGEST and value not in seen:
            seen.add(value)
            yield f"config.{name}", value


def _answers(e: Exam, n: int) -> bool:
    """Whether so many tokens are answered: on the side of the target, else of both."""
    p = e.p
    try:
        p(p.draw(1, n))
        if p.kind == "encoder_decoder":
            p(e.ids[:1], src=p.draw(1, n, 5, "src"))
    except Exception:
        return False
    return True


def _widths(e: Exam) -> list[Finding]:
    """Odd widths: half of the columns are sines, the other half cosines, and one is left over."""
    build = e.p.subject.build
    assert build is not None
    for width in (32, 29, 30, 33):
        try:
            build(width)
        except Exception as error:
            if width == 32:
                return []
            said = (str(error).splitlines() or [""])[0][:100]
            if "divisible" in said or "multiple" in said or "even" in said or isinstance(error, AssertionError):
                continue  # it says so
            return [
                _finding(
                    f"a model of width {width} cannot be built: {type(error).__name__}: {said}",
                    "every width, or a clear refusal",
                    "sines and cosines share the columns half and half; an odd width has one cosine less",
                    "table[:, 1::2] = cos[:, : width // 2], or refuse odd widths by name",
                )
            ]
    return []


def _tried(e: Exam, n: int) -> bool:
    try:
        out = e.p(e.p.draw(2, n))
    except Exception:
        return False
    return out.shape[0] == 2 and out.shape[1] == n and _axes(e, n) == _axes(e, e.p.tokens)


def _axes(e: Exam, n: int) -> int:
    """How many axes the answer has before it is arranged."""
    p = e.p
    with torch.no_grad():
        out = main_of(p.raw(p.draw(2, n), p.source(2), None, None, p.model), 2, n)
    return 0 if out is None else out.ndim


def _finding(measured: str, expected: str, cause: str, fix: str, severity: str = "warning") -> Finding:
    return Finding("length", severity, "", measured, expected, cause, fix)  # type: ignore[arg-type]


PROBE = Probe("length", "every length works", _run)
