"""The table of properties: what every model owes, and when one does not apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from brickformer.proof import answers, learning, windows
from brickformer.proof.subject import Subject


def _not_causal(s: Subject) -> str | None:
    return None if s.causal else f"{s.side.spec.kind}: it sees the future"


def _keeps_no_state(s: Subject) -> str | None:
    return None if s.decodes else f"{s.side.spec.kind}: it keeps no state"


def _no_attention(s: Subject) -> str | None:
    return None if answers.attends(s) else "no attention"


def _no_head(s: Subject) -> str | None:
    return None if s.side.head is not None else "no head, so no loss of its own"


def _no_window(s: Subject) -> str | None:
    return None if windows.has_window(s) else "no mask has a window"


@dataclass(frozen=True)
class Property:
    """name: in one or two words. says: the sentence. why_not: the reason when a subject does not owe it."""

    name: str
    says: str
    run: Callable[[Subject], str]
    why_not: Callable[[Subject], str | None] = lambda s: None


PROPERTIES: Final = (
    Property("eval", "eval is deterministic", answers.eval_mode),
    Property("batch", "batch == single", answers.batch),
    Property("causal", "causal", answers.causal, _not_causal),
    Property("window", "unseen beyond a window", windows.window, _no_window),
    Property("cached", "cached == full", answers.cached, _keeps_no_state),
    Property("padded", "padded == unpadded", answers.padded),
    Property("fused", "fused == reference", answers.fused, _no_attention),
    Property("bf16", "bf16 close to fp32", answers.low_precision),
    Property("gradients", "gradients reach everything", learning.gradients),
    Property("saved", "save → load equal", learning.saved),
    Property("first loss", "first loss near ln V", learning.first_loss, _no_head),
)
