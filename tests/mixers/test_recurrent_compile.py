"""torch.compile on linear recurrences: one graph forward, one backward, and one for all decode steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_one_graph(root: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, root / "tests")))}
    script = root / "tests" / "mixers" / "compiled.py"
    run = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "compiled\n"), run.stderr
