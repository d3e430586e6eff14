"""Weights that are cut, bent or of another kind, at every place where a file can be: one clear line each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hf.test_bad_input import NORM, Q, config, good, index, joined, shard

import brickformer
from brickformer import hf
from brickformer.errors import BrickError, DataError, RunError

__all__ = ["good"]
pytestmark = pytest.mark.unchecked

Spoil = Callable[[Path], Any]


def refused(folder: Path, spoil: Spoil, good: Path) -> str:
    """What is said of the folder once it is spoilt."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    spoil(folder)
    with pytest.raises(BrickError) as caught:
        hf.load(folder)
    said = str(caught.value)
    assert "\n" not in said and len(said) < 500
    return said


def header(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The header of a safetensors file, changed; its numbers as they were."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + length])
    text = json.dumps(change(fields) or fields).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def first_tensor(fields: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = next(v for k, v in fields.items() if k != "__metadata__")
    return out


def test_a_shard_cut_off_anywhere(good: Path, tmp_path: Path) -> None:
    """At every boundary: nothing, within the length, after it, within and after the header, within the numbers."""
    whole = shard(good).read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for length in {0, 1, 7, 8, 9, begin // 2, begin - 1, begin, begin + 1, len(whole) - 1}:
        said = refused(tmp_path / "model", lambda f, n=length: shard(f).write_bytes(whole[:n]), good)  # type: ignore[misc]
        assert "broken" in said and "model-00001" in said, (length, said)
    said = refused(tmp_path / "model", lambda f: shard(f).write_bytes(whole + b"more"), good)
    assert "broken" in said


BENT: dict[str, Spoil] = {
    "length of everything": lambda f: shard(f).write_bytes(b"\xff" * 8 + shard(f).read_bytes()[8:]),
    "no JSON": lambda f: shard(f).write_bytes(shard(f).read_bytes().replace(b'{"', b"{'", 1)),
    "not UTF-8": lambda f: shard(f).write_bytes(shard(f).read_bytes().replace(b"data_of", b"data_\xff\xff", 1)),
    "a list": lambda f: header(shard(f), lambda fields: [1]),
    "offsets that lead out": lambda f: header(shard(f), lambda h: first_tensor(h).update(data_offsets=[0, 10**9])),
    "offsets turned round": lambda f: header(shard(f), lambda h: first_tensor(h).update(data_offsets=[8, 0])),
    "a shape of other bytes": lambda f: header(shard(f), lambda h: first_tensor(h).update(shape=[3, 5])),
    "a shape below zero": lambda f: header(shard(f), lambda h: first_tensor(h).update(shape=[-1])),
    "a type nobody knows": lambda f: header(shard(f), lambda h: first_tensor(h).update(dtype="Q3")),
    "a folder in its place": lambda f: (shard(f).unlink(), (f / "model-00001-of-00004.safetensors").mkdir()),
    "nothing but a header": lambda f: joined(f, lambda tensors: tensors.clear()),
    "an index of nothing": lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
    "an index that is a list": lambda f: (f / "model.safetensors.index.json").write_text("[]"),
    "an index that is no text": lambda f: (f / "model.safetensors.index.json").write_bytes(b"\xff\xfe"),
    "an index of numbers": lambda f: index(f, lambda m: m.update({NORM: 3})),  # type: ignore[dict-item]
    "the wrong shard": lambda f: index(f, lambda m: m.update({NORM: min(v for v in m.values() if v != m[NORM])})),
    "an absolute path": lambda f: index(f, lambda m: m.update({NORM: "/etc/x.safetensors"})),
    "a path up": lambda f: index(f, lambda m: m.update({NORM: "a/../../x.safetensors"})),
    "a hidden file": lambda f: index(f, lambda m: m.update({NORM: "..safetensors"})),
    "whole numbers": lambda f: joined(f, lambda t: t.update({Q: t[Q].to(torch.int8)})),
    "numbers of eight bits": lambda f: joined(f, lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)})),
    "infinite": lambda f: joined(f, lambda t: t[Q][0, :1].fill_(-torch.inf)),
    "a tie in another shape": lambda f: joined(f, lambda t: t.update({"lm_head.weight": torch.zeros(9, 15)})),
    "a config that is a list": lambda f: (f / "config.json").write_text("[1]"),
    "a config that is no text": lambda f: (f / "config.json").write_bytes(b'{"model_type": "\xff"}'),
    "a config nested without end": lambda f: (f / "config.json").write_text('{"a":' * 100_000),
    "a number without end": lambda f: (f / "config.json").write_text('{"model_type": ' + "9" * 5000 + "}"),
    "no number at all": lambda f: config(f, rms_norm_eps=float("nan")),
    "a million layers": lambda f: config(f, num_hidden_layers=10**6),
    "no heads": lambda f: config(f, num_attention_heads=0),
    "a width of everything": lambda f: config(f, hidden_size=2**50),
    "a name of a class that is none": lambda f: config(f, architectures=[3]),
    "another task in plain words": lambda f: config(f, architectures="LlamaForSequenceClassification"),
}


@pytest.mark.parametrize("what", list(BENT))
def test_bent(what: str, good: Path, tmp_path: Path) -> None:
    assert refused(tmp_path / "model", BENT[what], good)


def pickled(folder: Path, data: Any) -> None:
    joined(folder, lambda tensors: None)
    (folder / "model.safetensors").unlink()
    torch.save(data, folder / "pytorch_model.bin")


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def test_pickles_run_nothing_and_hold_nothing_else(good: Path, tmp_path: Path) -> None:
    made, w = tmp_path / "made", torch.ones(2, 2)
    for data, why in (
        ({Q: Touch(str(made))}, "weights alone"),
        ([w], "more than named tensors"),
        ({1: w}, "more than named tensors"),
        ({"a": {"b": w}}, "more than named tensors"),
        ({"a": 3}, "more than named tensors"),
    ):
        assert why in refused(tmp_path / "model", lambda f, d=data: pickled(f, d), good)  # type: ignore[misc]
        assert not made.exists()
    tensors: dict[str, torch.Tensor] = {}
    for file in good.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(file)
    for odd in (tensors[Q].to_sparse(), tensors[Q].bool(), tensors[Q].to(torch.complex64)):
        said = refused(tmp_path / "model", lambda f, t=odd: pickled(f, {**tensors, Q: t}), good)  # type: ignore[misc]
        assert f"{Q!r} is of type" in said
    learnt = {name: torch.nn.Parameter(t) for name, t in tensors.items()}
    shutil.rmtree(tmp_path / "model")
    shutil.copytree(good, tmp_path / "model")
    pickled(tmp_path / "model", learnt)
    assert not any(p.grad_fn for p in hf.load(tmp_path / "model").model.parameters())
    cut = (tmp_path / "model/pytorch_model.bin").read_bytes()
    for length in (0, 3, len(cut) // 2, len(cut) - 1):
        (tmp_path / "model/pytorch_model.bin").write_bytes(cut[:length])
        with pytest.raises(RunError, match="cannot be read as weights alone"):
            hf.load(tmp_path / "model")


def test_types_are_mixed_without_losing_a_bit(good: Path, tmp_path: Path) -> None:
    """Parts of one product in two types, a norm in a third: the widest of all. A narrower one has to be asked for."""
    shutil.copytree(good, tmp_path / "model")
    joined(tmp_path / "model", lambda t: t.update({Q: t[Q].bfloat16(), NORM: t[NORM].half()}))
    model: Any = hf.load(tmp_path / "model").model
    plain: Any = hf.load(good).model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    ours, theirs = (m.stack.layers[0].mixer.qkv.weight for m in (model, plain))
    assert torch.equal(ours[16:], theirs[16:]) and torch.equal(ours[:16], theirs[:16].bfloat16().float())
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]]))).all()
    joined_again = tmp_path / "model/model.safetensors"
    large = safetensors.torch.load_file(joined_again)
    large[NORM] = torch.full((16,), 1e6)
    safetensors.torch.save_file(large, joined_again)
    with pytest.raises(RunError, match=r"model\.norm\.weight' holds 1e\+06, too much for torch\.float16"):
        hf.load(tmp_path / "model", dtype=torch.float16)


def test_a_tie_stored_in_two_types_is_one(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "model")
    rounded = "model.embed_tokens.weight"

    def twice(t: dict[str, torch.Tensor]) -> None:
        t[rounded] = t[rounded].bfloat16().float()
        t["lm_head.weight"] = t[rounded].bfloat16()

    joined(tmp_path / "model", twice)
    hf.load(tmp_path / "model")


def test_links_are_followed(good: Path, tmp_path: Path) -> None:
    """The hub's cache is a folder of links to files elsewhere."""
    (tmp_path / "model").mkdir()
    for file in good.iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    hf.load(tmp_path / "model")
    (tmp_path / "model" / shard(good).name).unlink()
    (tmp_path / "model" / shard(good).name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunError, match="missing"):
        hf.load(tmp_path / "model")


def test_an_import_that_is_killed_leaves_no_run(good: Path, tmp_path: Path) -> None:
    """Killed while the weights are written: what lies there is no run that another verb would take."""
    killer = (
        "import os, signal, sys\n"
        "import brickformer.files as files\n"
        "from brickformer.cli import main\n"
        "replace = files.os.replace\n"
        "def dying(a, b):\n"
        "    if str(b).endswith('.safetensors'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    replace(a, b)\n"
        "files.os.replace = dying\n"
        f"main(['import', {str(good)!r}, '--name', 'killed'])\n"
    )
    done = subprocess.run([sys.executable, "-c", killer], cwd=tmp_path, env={**os.environ}, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.rglob("*.safetensors"))
    with pytest.raises(BrickError):
        brickformer.Trained.open(next(iter((tmp_path / "runs").iterdir()), tmp_path / "runs"))


def test_a_sentencepiece_model_says_what_it_needs(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    shutil.copytree(good, tmp_path / "model")
    (tmp_path / "model/tokenizer.model").write_bytes(b"no such model")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sentencepiece" else find(name))
    with pytest.raises(DataError, match=r"has tokenizer\.model and no tokenizer\.json\. Install sentencepiece"):
        brickformer.load(tmp_path / "model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(DataError, match="Install transformers"):
        brickformer.load(tmp_path / "model")


def test_ids_that_are_none(good: Path, tmp_path: Path) -> None:
    """-1, a word, true: no token begins or ends a text."""
    from brickformer.hf.tokenizer import plain_tokenizer, read_tokenizer

    for name, text in plain_tokenizer(["a", "b"], words=True).files.items():
        (tmp_path / name).write_text(text)
    for value in (-1, "x", True, [-1, None, True]):
        said = read_tokenizer(tmp_path, {"eos_token_id": value, "bos_token_id": value})
        assert said is not None and said.ends == () and said.bos is None
    said = read_tokenizer(tmp_path, {"eos_token_id": [3, -1, 4], "bos_token_id": 0})
    assert said is not None and said.ends == (3, 4) and said.bos == 0
