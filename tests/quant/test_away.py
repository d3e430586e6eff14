"""Away: answers, memory, and what comes back, whatever happens."""

from __future__ import annotations

import copy
import errno
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from brickformer import llama
from brickformer.errors import BrickError
from brickformer.linear import FusedLinear
from brickformer.quant import Calibration, Int4, Int8, quantize
from brickformer.quant.away import AwayLinear, put_away
from brickformer.quant.products import exactly
from brickformer.surgery import get, places

SPEC = llama(vocab=40, dim=32, depth=2, heads=4, hidden=48, tied=True)


def held(*models: nn.Module) -> int:
    """Bytes of numbers in memory, those that are shared once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for m in models for t in tensors(m)}
    return sum(found.values())


def tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_same_answers_and_everything_back(dtype: torch.dtype) -> None:
    model = SPEC.build().eval().to(dtype)
    kept = copy.deepcopy(model.state_dict())
    maps = {p.name: p.module for p in places(model, nn.Linear)}
    parameters = list(model.parameters())
    ids = torch.randint(0, 40, (2, 9))
    before = model(ids)
    with put_away(model, maps):
        assert model(ids).equal(before)
        away = {p.name: p.module for p in places(model, AwayLinear)}
        assert away.keys() == maps.keys() - {"head.project"}, "one that is tied is in memory anyway"
        fused: Any = maps["stack.layers.0.mixer.qkv"]
        assert isinstance(fused, FusedLinear) and away["stack.layers.0.mixer.qkv"].parts == fused.parts
        norms = {t.data_ptr() for t in tensors(model)}
        assert held(model) == sum(p.nbytes for p in parameters if p.data_ptr() in norms and p.numel())
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert {p.name: p.module for p in places(model, nn.Linear)} == maps
    assert all(t.equal(kept[name]) for name, t in model.state_dict().items())


def test_memory_falls_and_stays_low() -> None:
    """At each matrix: never more than what no map holds, the codes there are, and one matrix."""
    model = llama(vocab=40, dim=64, depth=4, heads=4, hidden=128).build().eval()
    whole = held(model)
    maps = [p.module.weight.nbytes for p in places(model, nn.Linear) if isinstance(p.module, nn.Linear)]
    rest = whole - sum(maps)
    ids, seen = torch.randint(0, 40, (2, 9)), []
    reading = Calibration([lambda m: (m(ids), seen.append(held(m)))])
    quantize(model, Int4(), reading)
    assert len(seen) > 10 and max(seen) < rest + 0.15 * sum(maps)


@pytest.mark.parametrize("inside", [False, True])
def test_a_failure_gives_back_what_is_not_coded(inside: bool) -> None:
    model = SPEC.build().eval()
    kept = copy.deepcopy(model.state_dict())
    ids, calls = torch.randint(0, 40, (2, 9)), []

    def reading(m: nn.Module) -> None:
        calls.append(m)
        if len(calls) > 6:
            raise KeyboardInterrupt
        m(ids)

    with pytest.raises(KeyboardInterrupt), torch.inference_mode(inside):
        quantize(model, Int4(), Calibration([reading]))
    assert not list(places(model, AwayLinear))
    left = {p.name: p.module for p in places(model, nn.Linear)}
    assert 0 < len(left) < 9
    assert all(m.weight.equal(kept[f"{name}.weight"]) for name, m in left.items() if isinstance(m, nn.Linear))
    get(model, next(iter(left)))(torch.randn(2, 32)).sum().backward()


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = tempfile.TemporaryFile

    class Full:
        def __init__(self) -> None:
            self.file, self.room = real(dir=tmp_path), 3

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: Any) -> int:
            self.room -= 1
            if self.room < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    model = SPEC.build().eval()
    kept = copy.deepcopy(model.state_dict())
    with pytest.raises(BrickError, match="No space left on device. Make room, or set TMPDIR"):
        quantize(model, Int4(), Calibration([lambda m: m(torch.zeros(1, 3, dtype=torch.long))]))
    assert all(t.equal(kept[name]) for name, t in model.state_dict().items())


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    model = SPEC.build().eval()
    kept = copy.deepcopy(model.state_dict())
    with pytest.raises(BrickError, match="none cannot hold the full weights .*: No such file or directory. Make room"):
        quantize(model, Int4(), Calibration([lambda m: m(torch.zeros(1, 3, dtype=torch.long))]))
    assert all(t.equal(kept[name]) for name, t in model.state_dict().items())


def test_several_threads_read_at_once() -> None:
    model = nn.Sequential(nn.Linear(16, 700), nn.Tanh(), nn.Linear(700, 300), nn.Tanh(), nn.Linear(300, 16))
    x = torch.randn(3, 16)
    with torch.no_grad(), put_away(model, ["0", "2", "4"]), ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: model(x), range(100)))
    assert all(torch.allclose(a, model(x), atol=1e-6) for a in answers)


def test_hooks_act_while_weights_are_away_and_afterwards() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).eval()
    x, kept = torch.randn(400, 16), copy.deepcopy(model)
    thrice = model[0].register_forward_pre_hook(lambda _, args: (3 * args[0],))
    model[2].register_forward_hook(lambda _, args, y: y / 2)
    before = model(x)
    with put_away(model, ["0", "2"]):
        assert model(x).equal(before)
    quantize(model, Int8(), Calibration([lambda m: m(x)]))
    assert (model(x) - before).norm() < 0.02 * before.norm()
    thrice.remove()
    assert (model(x) - kept(x) / 2).norm() < 0.02 * before.norm()


@pytest.mark.unchecked
def test_what_was_compiled_before_is_read_all_the_same() -> None:
    """As a graph it would see neither the hooks nor what was replaced."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).eval()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(4, 16)
    with torch.no_grad():
        before = compiled(x)
        plain = quantize(copy.deepcopy(model), Int4(), Calibration([lambda m: m(x)]))
        matrices = quantize(compiled, Int4(), Calibration([lambda m: m(x)]))
        assert [m.error for m in matrices] == [m.error for m in plain]
        after = compiled(x)
    with exactly():
        assert 0 < (after - before).norm() < 0.3 * before.norm() and after.allclose(model(x), atol=1e-5)
