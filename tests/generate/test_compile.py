"""The compiled step, tested in a process of its own.

Dynamo keeps the modules it has met by name, so it can serve one copy of the package a process and no second one; other
tests in this process import copies too. What is tested, and why on a copy, stands in compiled.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_compiled_step() -> None:
    file = Path(__file__).with_name("compiled.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(file)],
        cwd=file.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
