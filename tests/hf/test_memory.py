"""Loading takes the model and one tensor more, in a process of its own that notes the most it ever held."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hf.test_bad_input import joined

from brickformer.hf.fit import fit
from brickformer.models import Decoder
from brickformer.presets import llama

pytestmark = pytest.mark.unchecked

SPEC = llama(vocab=6000, dim=512, depth=9, heads=8, hidden=1536, tied=True)  # 32 M parameters
MB = 2**20
SLACK = 12 * MB
"""What the allocator and the interpreter take besides: measured to be under 5 MB."""

CHILD = """
import re, sys, torch
from brickformer import hf
def held(what):                                    # bytes: VmRSS now, VmHWM at the most since it was reset
    return 1024 * int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
folder, dtype, small = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3]
hf.load(small)                                     # what is imported late is imported now
open("/proc/self/clear_refs", "w").write("5")      # the most is from now on the most of loading
before = held("VmRSS")
model = hf.load(folder, dtype=dtype).model
print(held("VmHWM") - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 MB in bfloat16 in five shards, written without comparing it."""
    folder = tmp_path_factory.mktemp("memory")
    for name, spec in (("large", SPEC), ("small", SPEC.but(vocab=9, layers=SPEC.layers[:1]))):
        model = spec.build().bfloat16()
        (folder / name).mkdir()
        write(folder / name, spec, model)
    return folder


def write(folder: Path, spec: Decoder, model: torch.nn.Module) -> None:
    """As `save` does."""
    from brickformer.files import write_json
    from brickformer.hf.save import _write_tensors, theirs

    found = fit(spec)
    write_json(folder / "config.json", {"model_type": found.family.model_type, **found.config})
    _write_tensors(folder, theirs(model, found.family), 14 * MB)  # type: ignore[arg-type]


def taken(folder: Path, dtype: str) -> tuple[int, int]:
    """(bytes that loading took at the most, bytes of the model)."""
    child = [sys.executable, "-c", CHILD, str(folder), dtype, str(folder.parent / "small")]
    out = subprocess.run(child, check=True, capture_output=True, text=True).stdout.split()
    return int(out[0]), int(out[1])


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: peak memory is read from /proc")
def test_loading_takes_the_model_and_one_tensor(shards: Path) -> None:
    """In shards, widened to float32 on the way."""
    peak, size = taken(shards / "large", "float32")
    assert peak <= size + 6000 * 512 * 4 + SLACK, f"{peak / MB:.1f} MB for a model of {size / MB:.1f} MB"
    assert size / 2 < peak, "nothing was measured"


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: peak memory is read from /proc")
def test_one_file_takes_no_more_than_shards(shards: Path) -> None:
    joined(shards / "large", lambda tensors: None)
    assert len(safetensors.torch.load_file(shards / "large" / "model.safetensors")) > 50
    peak, size = taken(shards / "large", "bfloat16")
    assert peak <= size + 6000 * 512 * 2 + SLACK, f"{peak / MB:.1f} MB for a model of {size / MB:.1f} MB"
