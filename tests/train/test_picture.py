"""The loss curve: read back as pixels."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from brickformer.train.picture import draw

RECORDS = [{"step": s, "loss": 3 / s + 0.1, **({"val_loss": 3 / s + 0.2} if s % 5 == 0 else {})} for s in range(1, 31)]
WITH_EXACT = [{**r, **({"exact": min(1.0, r["step"] / 20)} if "val_loss" in r else {})} for r in RECORDS]
TRAIN, VALIDATION, EXACT = (0x9A, 0xA7, 0xB5), (0x1F, 0x5F, 0xA8), (0x2E, 0x8B, 0x57)


def pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return np.round(imread(io.BytesIO(path.read_bytes()), format="png")[..., :3] * 255).astype(int)


def count(image: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((np.abs(image - np.array(colour)).max(axis=-1) <= 2).sum())


def test_it_shows_what_there_is_and_nothing_else(tmp_path: Path) -> None:
    only_loss = [{"step": r["step"], "loss": r["loss"]} for r in RECORDS]
    shown = {}
    for name, records in {"loss": only_loss, "validation": RECORDS, "exact": WITH_EXACT}.items():
        draw(records, tmp_path / f"{name}.png", "reverse-001")
        image = pixels(tmp_path / f"{name}.png")
        shown[name] = [count(image, colour) > 200 for colour in (TRAIN, VALIDATION, EXACT)]
        assert image.shape[1] == 1036
    assert shown == {
        "loss": [True, False, False],
        "validation": [True, True, False],
        "exact": [True, True, True],
    }


def test_a_better_run_has_a_lower_curve(tmp_path: Path) -> None:
    """The training curve of a loss that falls is lower at the right than at the left."""
    draw([{"step": s, "loss": 2 - s / 30} for s in range(1, 31)], tmp_path / "a.png", "a")
    image = pixels(tmp_path / "a.png")
    rows, columns = np.nonzero(np.abs(image - np.array(TRAIN)).max(axis=-1) <= 2)
    left, right = columns < 300, columns > 900
    assert rows[left].mean() < rows[right].mean() - 100


@pytest.mark.parametrize(
    "records",
    [
        [{"step": 1, "loss": 2.0}],
        [{"step": 1, "loss": math.nan}, {"step": 2, "loss": math.nan}],
        [{"step": 1, "loss": 0.0}, {"step": 2, "loss": 5.0, "val_loss": math.inf, "exact": 1.0}],
    ],
)
def test_odd_records_still_give_a_picture(tmp_path: Path, records: list[dict[str, float]]) -> None:
    draw(records, tmp_path / "a.png", "a")
    assert pixels(tmp_path / "a.png").shape[2] == 3


def test_no_records_no_picture(tmp_path: Path) -> None:
    draw([], tmp_path / "a.png", "a")
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_is_imported_late() -> None:
    code = "import sys, brickformer.train; print('matplotlib' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
