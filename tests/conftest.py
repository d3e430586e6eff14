"""What every test gets: checked shapes, a seed, one thread a worker, no network, the shared data where there is any."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

for asks_to_stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(asks_to_stop) is signal.SIG_IGN:  # a suite in the background; its tests interrupt runs
        signal.signal(asks_to_stop, signal.default_int_handler if asks_to_stop is signal.SIGINT else signal.SIG_DFL)

IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg")
if IN_WORKER:  # before torch starts its threads; subprocesses inherit it
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import hypothesis
import jaxtyping
import pytest
import torch
from shape_checks import CORE

# brickformer itself and its plugin for pytest may be there: neither holds a shape
parts = {name: name.split(".")[1] for name in sys.modules if name.startswith("brickformer.")}
already = sorted(name for name, part in parts.items() if part in CORE)
assert not already, f"imported before their shapes could be checked: {', '.join(already)}"
jaxtyping.install_import_hook([f"brickformer.{name}" for name in CORE], "shape_checks.check")

if IN_WORKER:
    torch.set_num_threads(1)

# No deadline (a time is never asserted); in CI the same examples every time, elsewhere new ones.
hypothesis.settings.register_profile("suite", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("suite")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data(root: Path) -> Path:
    """The folder of data sets: $BRICKFORMER_DATA, else ../shared/data beside the checkout. Skips where neither is."""
    chosen = os.environ.get("BRICKFORMER_DATA")
    if chosen is not None:
        if not Path(chosen).is_dir():
            pytest.fail(f"BRICKFORMER_DATA: {chosen!r} is not a folder; set it to the data folder or unset it.")
        return Path(chosen).resolve()
    beside = root.parent / "shared" / "data"
    if not beside.is_dir():
        pytest.skip("NOT TESTED: no data in ../shared/data; set BRICKFORMER_DATA to the folder that holds it")
    return beside


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers in every test, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _shapes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shapes are checked unless the test is marked `unchecked`."""
    off = request.node.get_closest_marker("unchecked") is not None
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", off or before)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
