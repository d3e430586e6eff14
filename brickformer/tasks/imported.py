"""What a model that was imported has learnt: nobody here knows. It can be used, exported, looked at, not trained on."""

from __future__ import annotations

from typing import NoReturn

from brickformer.errors import DataError
from brickformer.spec import spec
from brickformer.tasks.task import Task


@spec("imported")
class Imported(Task):
    """Learnt elsewhere. source: where it came from.

    What its configuration asks of whoever writes: start, the id before the answers of an encoder-decoder; first, the id
    that each of them begins with; never and never_runs, ids that are not written, alone and in a row. said: settings of
    generation that it asks for besides ("width=4"), undone: those that there is nothing for; neither is done by itself.
    """

    source: str = ""
    start: int | None = None
    first: int | None = None
    never: tuple[int, ...] = ()
    never_runs: tuple[tuple[int, ...], ...] = ()
    said: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()

    def prepare(self, seed: int) -> NoReturn:
        """Errors: DataError, always: there is no data."""
        raise DataError(
            f"imported: {self.source or 'this model'} was trained elsewhere, and its data is not here. Train a model "
            "of the same spec on data of your own."
        )
