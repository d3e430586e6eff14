"""Numbered folders that are whole or not there: root/NAME-001, then root/NAME-002, each with all that belongs in it.

    root/.NAME-001.part     where it is written; its name claims the number, and its maker holds a lock on it
    root/NAME-001           the same folder, once it is whole

mkdir lets one process have a claim. The lock ends with the process, however that ends: a claim that nobody holds was
left by one that was killed, and goes when the next folder of this NAME is made.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from brickformer.files import flush, writing

try:
    import fcntl
except ImportError:  # Windows: what a killed process left is left there
    fcntl = None  # type: ignore[assignment]

NO_LOCK: Final = -1


@contextmanager
def numbered(root: Path, name: str) -> Iterator[tuple[Path, Path]]:
    """(a folder to write into, the name that it has when the block ends): the first number above all that are there.

    After an error nothing is left. Errors: RunError: a full disk, no permission.
    """
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        clear(root, name)
        path, lock = _claimed(root, name)
    part = _part(path)
    try:
        yield part, path
        with writing(path):
            flush(part)
            part.rename(path)
            flush(root)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        _release(lock)


def clear(root: Path, name: str) -> None:
    """Remove what killed processes have left of folders of this name."""
    for part in _numbers(root, rf"\.{re.escape(name)}-(\d+)\.part"):
        lock = _lock(part)
        if lock not in (None, NO_LOCK):
            shutil.rmtree(part, ignore_errors=True)
        _release(lock)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _numbers(root: Path, pattern: str) -> dict[Path, int]:
    """What is in `root` under such a name, with its number."""
    found = ((path, re.fullmatch(pattern, path.name)) for path in root.iterdir())
    return {path: int(match[1]) for path, match in found if match}


def _claimed(root: Path, name: str) -> tuple[Path, int]:
    """(the name of a new folder, the lock on its claim)."""
    number = max(_numbers(root, rf"{re.escape(name)}-(\d+)").values(), default=0)
    while True:
        number += 1
        path = root / f"{name}-{number:03d}"
        try:
            _part(path).mkdir()
        except FileExistsError:
            continue
        lock = _lock(_part(path))
        if lock is None:  # another process took it for one that was left
            continue
        if not path.exists():  # from here on nobody else makes it
            return path, lock
        with suppress(OSError):
            _part(path).rmdir()
        _release(lock)


def _lock(folder: Path) -> int | None:
    """A lock on a folder; None where another process has it or has removed it, NO_LOCK where there are no locks."""
    if fcntl is None:
        return NO_LOCK
    try:
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(folder)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:  # a file system without them
        os.close(lock)
        return NO_LOCK
    os.close(lock)
    return None


def _release(lock: int | None) -> None:
    if lock not in (None, NO_LOCK):
        os.close(lock)
