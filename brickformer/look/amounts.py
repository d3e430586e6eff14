"""Counts and sizes as people read them."""

from __future__ import annotations


def amount(n: float) -> str:
    """A count a person can read: exact below a million, then three digits and K, M, G, T: ``8,320``, ``1.18 M``."""
    if abs(n) < 1_000_000:
        return f"{n:,.0f}"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(n) >= size * 0.9995:
            return f"{f'{n / size:#.3g}'.rstrip('.')} {unit}"
    return f"{n:,.0f}"


def bytes_(n: float) -> str:
    """Bytes a person can read, in powers of 1000: ``3.71 MB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n) >= size:
            return f"{f'{n / size:#.3g}'.rstrip('.')} {unit}"
    return f"{n:,.0f} bytes"


def cut(text: str, width: int) -> str:
    """A text in at most `width` characters, its end replaced by … when it is longer."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
