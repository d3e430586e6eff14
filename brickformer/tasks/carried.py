"""The files of a published tokenizer inside a run's tokenizer.json: texts as they are, other bytes in base64.

{"files": {"tokenizer.json": "..."}, "bytes": {"tokenizer.model": "CkQ..."}}
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from brickformer.errors import DataError

Files = Mapping[str, str | bytes]
"""By name, word for word."""


def packed(files: Files) -> dict[str, Any]:
    """Plain data that `unpacked` reads back to equal files."""
    texts = {name: content for name, content in files.items() if isinstance(content, str)}
    others = {name: base64.b64encode(c).decode() for name, c in files.items() if isinstance(c, bytes)}
    return {"files": texts} | ({"bytes": others} if others else {})


def unpacked(data: Mapping[str, Any], where: str) -> dict[str, str | bytes]:
    """The files of `packed`. Errors: DataError: where, expected."""
    texts, others = data.get("files"), data.get("bytes", {})
    for name, part in (("files", texts), ("bytes", others)):
        if not isinstance(part, dict) or not all(isinstance(content, str) for content in part.values()):
            raise DataError(f"{where}.{name}: expected an object of texts by name.")
    assert isinstance(texts, dict)
    try:
        return texts | {name: base64.b64decode(content, validate=True) for name, content in others.items()}
    except (binascii.Error, ValueError):
        raise DataError(f"{where}.bytes: expected base64. The file is damaged; copy it again.") from None


def ends_of(data: Mapping[str, Any], where: str) -> list[int]:
    """The ids that close a text. Errors: DataError: no list of ids."""
    ends = data.get("ends")
    if not isinstance(ends, list) or not all(type(i) is int for i in ends):
        raise DataError(f"{where}.ends: got {ends!r}, expected a list of ids.")
    return ends
