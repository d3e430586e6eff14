"""Run folders: whole or not there, never overwritten, and every way of being broken named in one or two lines."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from brickformer.errors import RunError
from brickformer.files import read_json, read_tensors, write_json, write_tensors, write_whole
from brickformer.train.checkpoint import RunFolder, load_into

SPEC = {"kind": "decoder", "vocab": 5}


def create(root: Path, name: str = "reverse") -> RunFolder:
    return RunFolder.create(root, name, spec=SPEC, run={"seed": 1}, tokenizer={"kind": "char", "chars": "äб"})


def message(info: pytest.ExceptionInfo[RunError]) -> str:
    """The text of an error that fits the command line: one or two lines, with the name of a file or folder."""
    text = str(info.value)
    assert len(text.splitlines()) <= 2
    return text


# ---- files


def fail_with(code: int) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("call", ["write", "fsync", "replace", "open"])
@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ENOSPC, "disk is full. Free some space"),
        (errno.EDQUOT, "disk is full"),
        (errno.EACCES, "no permission"),
        (errno.EROFS, "no permission"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, says: str
) -> None:
    path = tmp_path / "weights.safetensors"
    write_whole(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail_with(code))
        with pytest.raises(RunError, match=says) as info:
            write_whole(path, b"new and longer")
    assert str(path) in message(info)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["weights.safetensors"]


def test_a_disk_that_fills_up_in_the_middle_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, room = tmp_path / "a", os.write, [5]

    def small_disk(file: int, data: memoryview) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= min(room[0], 2)
        return write(file, data[:2])

    write_whole(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", small_disk)
        with pytest.raises(RunError, match="disk is full"):
            write_whole(path, b"0123456789")
        assert path.read_bytes() == b"old"
        room[0] = 100  # space again, still two bytes at a time
        write_whole(path, b"0123456789")
    assert path.read_bytes() == b"0123456789"
    assert os.listdir(tmp_path) == ["a"]


def test_a_real_limit_of_the_system_leaves_the_old_file(tmp_path: Path) -> None:
    """No patched functions: the kernel itself refuses to let the file grow beyond 4096 bytes."""
    code = """
import resource, sys
from pathlib import Path
from brickformer.errors import RunError
from brickformer.files import write_whole
path = Path(sys.argv[1])
write_whole(path, b"old")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_whole(path, bytes(100_000))
except RunError as e:
    print(e)
"""
    path = tmp_path / "a"
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert run.stdout == f"{path}: cannot be written: File too large.\n"
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_program_killed_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from brickformer.files import write_whole
path = Path(sys.argv[1])
write_whole(path, b"old")
os.fsync = lambda file: os._exit(9)
write_whole(path, b"new")
"""
    path = tmp_path / "a"
    run = subprocess.run([sys.executable, "-c", code, str(path)])
    assert run.returncode == 9
    assert path.read_bytes() == b"old"
    write_whole(path, b"later")  # what the killed program left behind is in nobody's way
    assert path.read_bytes() == b"later"
    assert os.listdir(tmp_path) == ["a"]


def test_tensors_come_back_with_bits_types_shapes_and_notes(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3, 2).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
        "empty too": torch.zeros(0, 4),
        "nan": torch.tensor([float("nan"), float("-inf")]),
        "turned": torch.randn(4, 5).T,
    }
    write_tensors(tmp_path / "t", tensors, {"step": "7"})
    back, notes = read_tensors(tmp_path / "t")
    assert notes == {"step": "7"}
    assert back.keys() == tensors.keys()
    for name, t in tensors.items():
        torch.testing.assert_close(back[name], t, rtol=0, atol=0, equal_nan=True)
        assert (back[name].dtype, back[name].shape) == (t.dtype, t.shape)
        assert back[name].untyped_storage().nbytes() == t.nbytes, "a view would keep the whole file in memory"


def test_tied_tensors_are_stored_once_and_overlapping_ones_whole(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    tensors = {"table": base, "head": base, "rows": base[2:4], "flat": base.view(24)}
    write_tensors(tmp_path / "t", tensors, {})
    stored = safetensors.torch.load_file(tmp_path / "t")
    assert stored.keys() == {"table", "rows", "flat"}
    back, _ = read_tensors(tmp_path / "t")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], t) for name, t in tensors.items())


def test_a_cut_off_tensor_file_is_an_error_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_tensors(path, {"a": torch.randn(40), "b": torch.randn(3, 3)}, {"step": "1"})
    whole = path.read_bytes()
    for length in [0, 1, 7, 8, 9, 40, len(whole) // 2, len(whole) - 4, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(RunError, match=r"weights.safetensors: broken \(.*use another run") as info:
            read_tensors(path)
        message(info)
    path.write_bytes(b"PK\x03\x04" + bytes(200))
    with pytest.raises(RunError, match="broken"):
        read_tensors(path)
    path.unlink()
    with pytest.raises(RunError, match="weights.safetensors: missing"):
        read_tensors(path)
    path.mkdir()
    with pytest.raises(RunError, match="weights.safetensors"):
        read_tensors(path)


@pytest.mark.parametrize(
    ("dtype", "shape", "tied", "says"),
    [
        ("F32", [1], '{"b": ["a"]}', "broken (its list of tied names"),
        ("F32", [1], "[1]", "broken (its list of tied names"),
        ("F32", [1], "[" * 100_000, "broken (maximum recursion depth"),
        ("F32", [2**63, 0], "{}", "broken (a shape of"),
        ("F8_E8M0", [4], "{}", "a: its numbers are of type F8_E8M0, which is not read here. Expected one of F64, F32"),
    ],
)
def test_what_safetensors_lets_pass_and_no_tensor_is_made_of(
    tmp_path: Path, dtype: str, shape: list[int], tied: str, says: str
) -> None:
    path, size = tmp_path / "a.safetensors", 0 if 0 in shape else 4
    header = {"__metadata__": {"tied": tied}, "a": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(RunError) as info:
        read_tensors(path)
    assert message(info).startswith(f"{path}: {says}") and len(message(info)) < 400


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"kind": "dec', "broken: Unterminated string.* at line 1, column 10"),
        (b"", "broken: Expecting value"),
        (b"[1, 2]", "expected a JSON object, found list"),
        (b"\xff\xfe{", "not UTF-8"),
    ],
)
def test_broken_json_is_named_with_the_place(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "spec.json"
    path.write_bytes(content)
    with pytest.raises(RunError, match=says) as info:
        read_json(path)
    assert message(info).startswith(str(path))


def test_json_keeps_every_character(tmp_path: Path) -> None:
    data = {"chars": 'äб中\u2028"\\\n', "n": 1.5, "none": None}
    write_json(tmp_path / "a.json", data)
    assert read_json(tmp_path / "a.json") == data


# ---- folders


def test_a_new_run_takes_the_next_number_and_touches_no_other(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "runs"
    first = create(root)
    (first.path / "spec.json").write_text("mine")
    assert [create(root).path.name for _ in range(2)] == ["reverse-002", "reverse-003"]
    (root / "reverse-041").mkdir()
    (root / "reverse-x").mkdir()
    (root / "reverse-1000-old").mkdir()
    assert create(root).path.name == "reverse-042"
    (root / "reverse-999").mkdir()
    assert create(root).path.name == "reverse-1000"
    assert create(root, "text").path.name == "text-001"
    assert (first.path / "spec.json").read_text() == "mine"


def _create(root: str) -> str:
    return RunFolder.create(Path(root), "race", spec=SPEC, run={}).path.name


def test_runs_started_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(_create, [str(tmp_path)] * 40))
    assert sorted(names) == [f"race-{i:03d}" for i in range(1, 41)]


def test_a_folder_that_appears_in_between_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finishes reverse-001 after this one has looked."""
    mkdir = Path.mkdir

    def late(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.name == ".reverse-001.part":
            mkdir(self.parent / "reverse-001")
            (self.parent / "reverse-001" / "theirs").touch()
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", late)
    run = create(tmp_path)
    assert run.path.name == "reverse-002"
    assert os.listdir(tmp_path / "reverse-001") == ["theirs"]
    assert sorted(os.listdir(tmp_path)) == ["reverse-001", "reverse-002"]


@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_claim_that_is_taken_for_a_left_one_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Another process removes it between mkdir and the lock."""
    fcntl = pytest.importorskip("fcntl")
    module, left = (os if call == "open" else fcntl), [tmp_path / ".reverse-001.part"]
    real = getattr(module, call)

    def late(*args: Any) -> Any:
        if left and left[0].exists():
            left.pop().rmdir()
        return real(*args)

    monkeypatch.setattr(module, call, late)
    assert create(tmp_path).path.name == "reverse-002"


def making(root: Path) -> AbstractContextManager[tuple[RunFolder, RunFolder]]:
    return RunFolder.making(root, "reverse", spec=SPEC, run={})


def test_a_folder_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    with making(tmp_path) as (part, made):
        part.save_weights(nn.Linear(3, 2).state_dict(), 5)
        assert not made.path.exists()
        with making(tmp_path) as (_, other):  # one that goes on is left alone, and its number too
            pass
    assert sorted(os.listdir(tmp_path)) == ["reverse-001", "reverse-002"]
    assert (made.path.name, other.path.name) == ("reverse-001", "reverse-002")
    assert RunFolder.open(made.path).weights()[1] == 5


@pytest.mark.parametrize("error", [OSError(errno.EIO, "x"), KeyboardInterrupt(), RunError("x"), SystemExit()])
def test_a_folder_that_is_not_finished_is_not_there(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), making(tmp_path) as (part, _):
        part.save_weights(nn.Linear(3, 2).state_dict(), 5)
        raise error
    assert not os.listdir(tmp_path)


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    """With the next folder of this name; a process that lives keeps what it writes, and the number."""
    child = "import sys; from pathlib import Path; from brickformer.train import RunFolder\n"
    child += "with RunFolder.making(Path(sys.argv[1]), 'reverse', spec={}, run={}): print(1, flush=True); input()"
    command = [sys.executable, "-c", child, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        assert create(tmp_path).path.name == "reverse-002"
        shutil.rmtree(tmp_path / "reverse-002")
        process.kill()
    assert os.listdir(tmp_path) == [".reverse-001.part"]
    with pytest.raises(RunError, match="no such run folder") as info:
        RunFolder.open(tmp_path / "reverse-001")
    assert ".part" not in str(info.value)
    (tmp_path / ".reverse-001.part" / "weights.safetensors").write_text("half")
    create(tmp_path, "text")
    assert sorted(os.listdir(tmp_path)) == [".reverse-001.part", "text-001"]
    assert create(tmp_path).path.name == "reverse-001"
    assert sorted(os.listdir(tmp_path)) == ["reverse-001", "text-001"]
    assert not (tmp_path / "reverse-001" / "weights.safetensors").exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "/abs", ".hidden", "a b", "ü", "a\n"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="run name: got .*expected ASCII letters"):
        create(tmp_path / "runs", name)
    assert not (tmp_path / "runs").exists()


def test_a_run_that_cannot_be_created_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = create(tmp_path)
    before = {p.name: p.read_bytes() for p in earlier.path.iterdir()}
    replace, left = os.replace, [1]

    def third(*args: Any) -> None:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        replace(*args)

    monkeypatch.setattr(os, "replace", third)
    with pytest.raises(RunError, match="run.json: cannot be written: the disk is full"):
        create(tmp_path)
    assert os.listdir(tmp_path) == ["reverse-001"]
    assert {p.name: p.read_bytes() for p in earlier.path.iterdir()} == before


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunError, match="runs: is a file, and run folders go into a folder"):
        create(tmp_path / "runs")


def test_what_is_saved_is_what_is_read(tmp_path: Path) -> None:
    run = create(tmp_path)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    run.save_weights(model.state_dict(), 12)
    run.save_state({"x": torch.arange(3)}, 11)
    again = RunFolder.open(run.path)
    assert (again.spec(), again.run(), again.tokenizer()) == (SPEC, {"seed": 1}, {"kind": "char", "chars": "äб"})
    assert again.load_weights(other) == 12
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    state, step = again.state()
    assert (state["x"].tolist(), step) == ([0, 1, 2], 11)
    assert RunFolder.create(tmp_path, "bare", spec=SPEC, run={}).tokenizer() is None


def test_weights_of_a_run_are_plain_safetensors(tmp_path: Path) -> None:
    run = create(tmp_path)
    model = nn.Linear(3, 2)
    run.save_weights(model.state_dict(), 5)
    plain = safetensors.torch.load_file(run.path / "weights.safetensors")
    assert {name: t.tolist() for name, t in plain.items()} == {n: t.tolist() for n, t in model.state_dict().items()}


def test_tied_weights_load_into_a_tied_model(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        table, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        head.weight = table.weight
        return nn.Sequential(table, head)

    run, model, other = create(tmp_path), tied(), tied()
    run.save_weights(model.state_dict(), 1)
    run.load_weights(other)
    assert torch.equal(other[1].weight, model[0].weight)
    assert other[1].weight is other[0].weight


@pytest.mark.parametrize("missing", ["spec.json", "run.json", "weights.safetensors"])
def test_a_folder_cut_off_in_the_middle_names_the_missing_file(tmp_path: Path, missing: str) -> None:
    run = create(tmp_path)
    run.save_weights(nn.Linear(3, 2).state_dict(), 5)
    RunFolder.open(run.path)
    (run.path / missing).unlink()
    with pytest.raises(RunError, match=f"{missing}: missing") as info:
        RunFolder.open(run.path)
    message(info)


def test_a_broken_file_of_a_folder_is_named_when_it_is_opened(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.save_weights(nn.Linear(3, 2).state_dict(), 5)
    (run.path / "run.json").write_text('{"seed"')
    with pytest.raises(RunError, match=r"reverse-001/run\.json: broken"):
        RunFolder.open(run.path)


def test_a_missing_folder_offers_the_nearest(tmp_path: Path) -> None:
    create(tmp_path)
    with pytest.raises(RunError, match="no such run folder; did you mean '.*reverse-001'") as info:
        RunFolder.open(tmp_path / "revers-001")
    message(info)
    with pytest.raises(RunError, match="no such run folder"):
        RunFolder.open(tmp_path / "no" / "where")
    with pytest.raises(RunError, match="not a run folder"):
        RunFolder.open(tmp_path)


def test_weights_that_do_not_fit_are_refused_before_any_is_copied(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    good = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    with pytest.raises(RunError, match=r"here does not fit the model: no tensor 'bias'\. Was"):
        load_into(model, {"weight": good["weight"]}, "here")
    with pytest.raises(RunError, match="'extra' belongs to no part of the model"):
        load_into(model, {**good, "extra": torch.zeros(1)}, "here")
    with pytest.raises(RunError, match=r"'weight' is \(2, 2\), the model has \(2, 3\) \(and 1 more\)"):
        load_into(model, {"weight": torch.zeros(2, 2), "bias": torch.zeros(1)}, "here")
    assert torch.equal(model.weight, before)


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    run = create(tmp_path)
    safetensors.torch.save_file({"weight": torch.zeros(2, 3)}, run.path / "weights.safetensors")
    with pytest.raises(RunError, match=r"weights.safetensors: broken: no step"):
        run.weights()
    write_tensors(run.path / "weights.safetensors", {"a": torch.zeros(1)}, {"step": "soon"})
    with pytest.raises(RunError, match="no step"):
        run.weights()


def test_nothing_is_pickled(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.save_weights(nn.Linear(3, 2).state_dict(), 5)
    run.save_state({"x": torch.zeros(2)}, 5)
    for path in run.path.iterdir():
        data = path.read_bytes()
        assert not data.startswith((b"\x80", b"PK")), path.name
        if path.suffix == ".json":
            json.loads(data)


# ---- two processes


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path) -> None:
    run = create(tmp_path)
    child = "import sys; from pathlib import Path; from brickformer.train.checkpoint import RunFolder\n"
    child += "with RunFolder(Path(sys.argv[1])).alone(): print('mine', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", child, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "mine\n"
        with pytest.raises(RunError, match="another process is training this run") as info, run.alone():
            pass
        message(info)
        with create(tmp_path).alone():
            pass
        other.kill()  # not even a killed process keeps it
    with run.alone():
        pass
    with run.alone():
        pass
