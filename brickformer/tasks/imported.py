"""What a model that was imported has learnt: nobody here knows. It can be used, exported, looked at, not trained on."""

from __future__ import annotations

from typing import NoReturn

from brickformer.errors import DataError
from brickformer.spec import spec
from brickformer.tasks.task import Task


@spec("imported")
class Imported(Task):
    """Learnt elsewhere. source: where it came from.

    start: the id that a target begins with, of an encoder-decoder. never: ids that its configuration forbids to write.
    """

    source: str = ""
    start: int | None = None
    never: tuple[int, ...] = ()

    def prepare(self, seed: int) -> NoReturn:
        """Errors: DataError, always: there is no data."""
        raise DataError(
            f"imported: {self.source or 'this model'} was trained elsewhere, and its data is not here. Train a model "
            "of the same spec on data of your own."
        )
