"""Large pages for weights that are read whole at every step.

    a page of 4 KiB: every 4 KiB of weights one address to look up, and one place where reading ahead ends
    a page of 2 MiB: a five-hundredth of both

A step of a decoder is as fast as its weights come out of memory. Linux makes small pages large where a process asks for
it (`MADV_COLLAPSE`, since 6.1); elsewhere, and where memory is too scattered, all stays as it was. What memory holds
never changes.
https://docs.kernel.org/admin-guide/mm/transhuge.html
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

LARGE: Final = 2 << 20
"""Bytes of a large page on x86-64, and on ARM with small pages of 4 KiB."""
NEAR: Final = 64 << 10
"""Bytes between two ranges that one large page may hold together."""
COLLAPSE: Final = 25
"""MADV_COLLAPSE in Linux's headers."""
MAPS: Final = Path("/proc/self/maps")

Range = tuple[int, int]
"""Addresses from the first to behind the last."""


def enlarge(tensors: Iterable[Tensor]) -> None:
    """Large pages for the memory of dense tensors on the CPU. It takes about as long as copying them."""
    dense = (t for t in tensors if t.device.type == "cpu" and t.layout is torch.strided)
    _collapse(place for place in map(_place, dense) if place is not None)


@contextmanager
def large_pages() -> Iterator[None]:
    """Large pages for what is mapped inside: for a library that keeps its weights to itself."""
    before = list(_private())
    yield
    _collapse(_new(_private(), before))


def _place(tensor: Tensor) -> Range | None:
    """Where a tensor's storage is. None: it has no memory itself, as one that stands for others (torchao) has not."""
    try:
        store = tensor.untyped_storage()
        return store.data_ptr(), store.data_ptr() + store.nbytes()
    except (RuntimeError, ValueError):
        return None


def _private() -> Iterator[Range]:
    """The memory of this process that belongs to no file, in order; none where the system does not say."""
    if not sys.platform.startswith("linux"):
        return
    try:
        lines = MAPS.read_text(errors="replace").splitlines()  # names of files may be in any encoding
    except OSError:
        return
    for line in lines:
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw.p \S+ \S+ 0\s*(\[heap\]|\[anon.*\])?$", line)
        if found is not None:
            yield int(found[1], 16), int(found[2], 16)


def _new(after: Iterable[Range], before: Iterable[Range]) -> Iterator[Range]:
    """What of `after` is not in `before`."""
    known = list(before)
    for start, end in after:
        for a, b in known:
            if a < end and b > start:
                if a > start:
                    yield start, a
                start = max(start, b)
        if start < end:
            yield start, end


def _collapse(ranges: Iterable[Range]) -> None:
    """Ask for it; what the system refuses stays in small pages."""
    if not sys.platform.startswith("linux"):
        return
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start - joined[-1][1] <= NEAR:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    madvise = ctypes.CDLL(None).madvise
    for start, end in joined:
        first, last = -(-start // LARGE) * LARGE, end // LARGE * LARGE
        if first < last:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), COLLAPSE)
