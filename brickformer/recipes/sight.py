"""What a trained run looks at while it answers: generation and looking, joined.

view = sight(Trained.open("runs/reverse-001"), "7 1 4");  page(view)
"""

from __future__ import annotations

from collections.abc import Sequence

from brickformer.errors import DataError
from brickformer.generate import Sampling, Stop
from brickformer.look import View, attention
from brickformer.look.view import replay
from brickformer.models import EncoderModel
from brickformer.recipes.trained import Trained


def sight(
    trained: Trained,
    text: str,
    sampling: Sampling | None = None,
    stop: Stop | None = None,
    *,
    rows: tuple[int, int] | None = None,
    only: Sequence[str] = (),
    remove: bool = True,
) -> View:
    """The run answers `text`; what it looked at, step by step. The others as in `look.attention`.

    Errors: BrickError: a text that cannot be read, or longer than the model takes.
    """
    stop = stop or (Stop(max_tokens=48) if trained.writes_text else Stop())
    result = trained.generate([text], sampling, stop).results[0]
    if result.error is not None:
        raise result.error
    model, target = trained.model, trained.target
    assert not isinstance(model, EncoderModel), "an encoder writes nothing"
    if trained.source is None:
        given, read, title = target.encode(text), None, text
    else:
        if not trained.start:
            raise DataError("look: the target has no token to begin with. Train with a tokenizer that has special ids.")
        given, read, title = list(trained.start), trained.source.encode(text), f"{text} → {result.text}"
    ids = [*given, *result.tokens[:-1]]  # the last token is written, and never read
    view = attention(
        model,
        ids,
        source=read,
        written=len(given),
        name=target.token,
        source_name=None if trained.source is None else trained.source.token,
        rows=rows,
        only=only,
        remove=remove,
        title=title,
    )
    view.steps = replay(model, given, result.tokens, read)
    return view
