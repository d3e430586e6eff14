"""In which order training examples are seen: shuffled anew every epoch, and known for every step in advance.

    item(p) = stride · order_e[p mod n] + shift_e      e = p div n,      order_e a permutation of 0..n-1

order_e and shift_e depend on (seed, e) alone, so a batch is a function of the seed and the step: a resumed run goes on
with the batches it would have seen, and no global random state is read or written. Every item is seen once an epoch.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
import numpy.typing as npt

from brickformer.errors import SpecError

Ints = npt.NDArray[np.integer]
Bools = npt.NDArray[np.bool_]

DRAW: Final = 1  # streams: what a generator is for, so that no two purposes share random numbers
SPLIT: Final = 2
ORDER: Final = 3


def generator(seed: int, stream: int, part: int = 0) -> np.random.Generator:
    """An independent random generator for each (seed, stream, part). Errors: SpecError for a negative seed."""
    if seed < 0:
        raise SpecError(f"seed: got {seed}, expected an integer from 0 up.")
    return np.random.default_rng((seed, stream, part))


@final
class Order:
    """The endless sequence of training items.

    count: items an epoch. stride: distance between neighbouring items. slack: an epoch's shift is drawn from 0..slack.
    """

    def __init__(self, seed: int, count: int, *, stride: int = 1, slack: int = 0) -> None:
        assert count > 0 and stride > 0 and slack >= 0
        generator(seed, ORDER)  # refuses a bad seed here, not at the first batch
        self.seed, self.count, self.stride, self.slack = seed, count, stride, slack
        self._recent: dict[int, Ints] = {}

    def take(self, first: int, length: int) -> Ints:
        """Items number first, first+1, ... of the sequence, (length,)."""
        epoch, at = divmod(first, self.count)
        parts = []
        while length > 0:
            part = self._epoch(epoch)[at : at + length]
            parts.append(part)
            length -= len(part)
            epoch, at = epoch + 1, 0
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _epoch(self, epoch: int) -> Ints:
        """All items of one epoch. The last two are kept: a memory, never a state."""
        items = self._recent.get(epoch)
        if items is None:
            random = generator(self.seed, ORDER, epoch)
            shift = random.integers(self.slack + 1)
            items = random.permutation(self.count) * self.stride + shift
            self._recent = {e: kept for e, kept in self._recent.items() if e == epoch - 1} | {epoch: items}
        return items


def spread(count: int, most: int) -> Ints:
    """At most `most` of the numbers 0..count-1, evenly spaced, first and last included where there are two."""
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).round().astype(np.int64)
