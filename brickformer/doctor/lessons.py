"""Traps as lessons: a planted bug beside the right lines, both trained on a toy task, and what to see.

Tasks: an order of ids and then its reverse, as one sequence (decoders) or as source and target (translators). Half of
such a sequence cannot be foreseen, so no honest decoder is below (half · ln 10): a loss below that has seen the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from brickformer.doctor.mutants.bug import FILL, SPLIT, Changes, Planted, module_of, text_of
from brickformer.doctor.subject import Subject

DIGITS: Final = 10
LENGTH: Final = 6


@dataclass(frozen=True)
class Lesson:
    """One trap. see: what to measure after training, of (module, model) -> a sentence."""

    name: str
    title: str
    question: str
    answer: str
    fix: str
    source: str
    changes: Changes
    loss: str = "lm_loss"
    make: str = "make"
    see: Callable[[Any, Any], str] | None = None
    says: dict[str, Any] = field(default_factory=dict)

    def modules(self) -> tuple[Any, Any]:
        """The specimen as it is right, and as it is broken."""
        return module_of(self.source), module_of(self.source, *self.changes)

    def lines(self) -> Iterator[tuple[list[str], list[str]]]:
        """Right and broken lines, whole, change by change."""
        text = text_of(self.source)
        for old, new in self.changes:
            at = text.index(old)
            begin, end = text.rfind("\n", 0, at) + 1, text.find("\n", at + len(old))
            right = text[begin:end]
            yield right.splitlines(), (text[begin:at] + new + text[at + len(old) : end]).splitlines()

    def subject(self) -> Subject:
        """The broken model for the doctor."""
        bug = Planted(self.name, "", self.source, self.changes, make=self.make, says=self.says)
        return bug.subject()


def batch(lesson: Lesson, step: int, size: int = 16) -> tuple[Tensor, ...]:
    """Digits and their reverse, in ids from 1: one sequence (B, 2n), or source and target (B, n), (B, n + 1)."""
    g = torch.Generator().manual_seed(step)
    digits = torch.randint(1, DIGITS + 1, (size, LENGTH), generator=g)
    if lesson.loss == "pair_loss":
        first = torch.full((size, 1), DIGITS + 1)
        return digits, torch.cat([first, digits.flip(1)], 1)
    ids = torch.cat([digits, digits.flip(1)], 1)
    if lesson.loss == "padded_loss":
        real = torch.randint(4, 2 * LENGTH + 1, (size, 1), generator=g)
        ids = torch.where(torch.arange(2 * LENGTH) < real, ids, 0)
    return (ids,)


def train(lesson: Lesson, module: Any, seconds: float) -> tuple[list[float], Any]:
    """Losses, step by step, and the model that was trained; at least three steps."""
    torch.manual_seed(0)
    model = getattr(module, lesson.make)()
    model.train()
    loss = getattr(module, lesson.loss)
    own = getattr(module, lesson.says["training"])(model) if "training" in lesson.says else None
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    found: list[float] = []
    end = time.monotonic() + seconds
    while len(found) < 3 or time.monotonic() < end:
        data = batch(lesson, len(found))
        value = loss(model, *data)
        found.append(float(value.detach()))
        if own is not None:
            own(*data)
            continue
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return found, model.eval()


def _leak(module: Any, model: Any) -> str:
    ids = torch.arange(1, 9)[None]
    other = ids.clone()
    other[0, -1] = 10
    with torch.no_grad():
        a, b = (model(x, x)[0] for x in (ids, other))
    return f"another last token moves the first logits by {float((a - b)[0, 0].abs().max()):.3g} (0 when it is right)"


def _spread(module: Any, model: Any) -> str:
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        loss = float(module.lm_loss(model, ids))
    return f"loss on digits in a row, which it has never seen: {loss:.3g}"


def _source(module: Any, model: Any) -> str:
    trg = torch.full((1, 7), DIGITS + 1)
    with torch.no_grad():
        a, b = (model(src, trg) for src in (torch.arange(1, 7)[None], torch.arange(4, 10)[None]))
    return f"another source moves the logits by {float((a - b).abs().max()):.3g}"


def _real(module: Any, model: Any) -> str:
    ids = batch(LESSONS["padding-in-the-loss"], 10**6)[0]
    with torch.no_grad():
        logits = model(ids)[0][:, :-1]
    gold = ids[:, 1:]
    value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), gold.flatten(), ignore_index=0)
    return f"loss on real tokens alone: {float(value):.3g}"


def _twice(module: Any, model: Any) -> str:
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        moved = float((model(ids)[0] - model(ids)[0]).abs().max())
    return f"two calls of the same model in eval() differ by {moved:.3g}"


def _longer(module: Any, model: Any) -> str:
    try:
        ids = model.generate(torch.ones(1, 4, dtype=torch.long), 30)
    except Exception as error:
        return f"generate() of 30 ids: {type(error).__name__}: {error}"
    return f"generate() of 30 ids: {ids.shape[1]} ids, no error"


def _speed(module: Any, model: Any) -> str:
    src, trg = torch.ones(1, 6, dtype=torch.long), torch.ones(1, 7, dtype=torch.long)
    with torch.no_grad():
        begin = time.perf_counter()
        for _ in range(50):
            model(src, trg)
    return f"one call takes {(time.perf_counter() - begin) * 20:.2f} ms"


def _steps(module: Any, model: Any) -> str:
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        whole = model(ids)[0]
        kept, steps = None, []
        for t in range(8):
            one, kept = model(ids[:, t : t + 1], kept)
            steps.append(one)
    off = (torch.cat(steps, 1) - whole).abs().amax((0, 2))
    return f"token by token, step 0 is off by {float(off[0]):.3g}, step 7 by {float(off[7]):.3g}"


ALL: Final = (
    Lesson(
        "mask-zero",
        "the mask is filled with 0",
        "Both models learn. Which loss is lower, and is that good?",
        "The broken one: exp(0) = 1 is a weight like any other, so it reads the answer from the future.",
        "scores.masked_fill(blocked, float('-inf')), before the softmax",
        "decoder",
        ((FILL, "att.masked_fill(~self.tril[:T, :T], 0.0)"),),
        see=_leak,
    ),
    Lesson(
        "no-scale",
        "scores are not divided by √K",
        "What happens to the softmax when the scores are √K times as large?",
        "It is nearly one-hot: its gradient is small, and learning begins late. The wider the heads, the worse.",
        "scores / math.sqrt(q.shape[-1])",
        "decoder",
        ((" / math.sqrt(self.width)", ""),),
        see=_spread,
    ),
    Lesson(
        "view-without-transpose",
        "heads are split by view alone",
        "The shapes fit and nothing raises. What is in the rows of a head?",
        "Slices of several tokens: a head's row t is no longer token t, so masks and positions mean nothing.",
        "x.view(B, T, H, K).transpose(1, 2)",
        "decoder",
        ((SPLIT, "reshape(B, self.heads, T, self.width)"),),
        see=_leak,
    ),
    Lesson(
        "heads-and-widths",
        "number of heads and width of a head are swapped",
        "4 heads of width 8, or 8 heads of width 4: does anything raise?",
        "No: the sizes multiply to the same. It has other heads than you think, scaled by the wrong width.",
        "view(B, T, heads, width), in this order",
        "decoder",
        ((SPLIT, "view(B, T, self.width, self.heads).transpose(1, 2)"),),
        see=_spread,
    ),
    Lesson(
        "table-every-call",
        "the table of positions is computed in every call",
        "The answers are equal. What does it cost?",
        "Time in every call and every layer that does it; the loss tells nothing.",
        "self.register_buffer('table', table), once in __init__",
        "seq2seq",
        (("return x + self.table[: x.size(1)]", "return x + Positions(x.size(2)).table[: x.size(1)]"),),
        loss="pair_loss",
        see=_speed,
    ),
    Lesson(
        "longer-than-the-table",
        "the sequence grows beyond the table",
        "The table has 16 rows, generate() is asked for 30 ids. When does it fail?",
        "At the 17th: training never saw it, since its batches are short.",
        "self(idx[:, -self.max_len :]), or positions without a table",
        "decoder",
        (("self(idx[:, -self.max_len :])", "self(idx)"),),
        see=_longer,
    ),
    Lesson(
        "post-norm",
        "twelve post-norm layers without warm-up",
        "Both take the same steps at the same rate, but one begins with a tenth of it. Does the other catch up?",
        "Gradients near the output are large at the start; full steps throw the deep stack where it cannot learn.",
        "warm the rate up, or put the norm before the branch",
        "loop",
        (("warmup=10", "warmup=1"),),
        make="make_post",
        says={"training": "Step"},
    ),
    Lesson(
        "memory-not-passed",
        "cross-attention reads the target in place of the memory",
        "The decoder has its own tokens. How far does the loss fall?",
        "To what can be said of the target alone: the source is never read.",
        "self.cross(x, memory, memory, memory_mask)",
        "seq2seq",
        (("self.cross(x, memory, memory, memory_mask)", "self.cross(x, x, x, mask)"),),
        loss="pair_loss",
        see=_source,
    ),
    Lesson(
        "padding-in-the-loss",
        "padding is counted in the loss",
        "Whose curve is lower, and whose model is better?",
        "The broken one looks better: after the first padding the next one is easy. On real tokens it is no better.",
        "F.cross_entropy(..., ignore_index=pad)",
        "rotary",
        ((", ignore_index=0", ""),),
        loss="padded_loss",
        see=_real,
        says={"loss": "padded_loss", "pad": 0},
    ),
    Lesson(
        "dropout-on",
        "dropout goes on in eval()",
        "The curves are nearly the same. Where does it show?",
        "Nowhere but in eval(): two calls differ, and every answer is a little worse than it could be.",
        "F.dropout(x, p, training=self.training)",
        "decoder",
        (("att = self.drop(att)", "att = F.dropout(att, 0.1)"),),
        see=_twice,
    ),
    Lesson(
        "cache-ignored",
        "the cache is kept and not read",
        "Training is the same to the last bit. What is wrong with the answers?",
        "After the first step each token sees itself alone, at position 0.",
        "layer(x, None if cache is None else cache[i])",
        "rotary",
        (("layer(x, None if cache is None else cache[i])", "layer(x, None)"),),
        see=_steps,
    ),
)
LESSONS: Final = {lesson.name: lesson for lesson in ALL}
"""By name, the article's traps first."""
