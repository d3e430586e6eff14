"""`brick look` and `brick show --svg`: what is written, what is said, and what is refused in one or two lines."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import threading
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from cli.conftest import Brick, contents

from brickformer.cli.curves import server

FOREIGN = """
import torch
from torch import nn

LAYER = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)


def make():
    model = nn.TransformerEncoder(LAYER, 1, enable_nested_tensor=False)
    return model, torch.randn(1, 3, 16), ["<b>", "b", "c"]

def empty():
    return nn.Linear(2, 2), torch.ones(2, 2)

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoder(LAYER, 1, enable_nested_tensor=False)

    def forward(self, labels):
        return self.inner(labels)

def by_name():
    return Own(), {"labels": torch.randn(1, 3, 16)}, None

def shape():
    return Own(), torch.randn(1, 3, 5)

def no_axes():
    return Own(), torch.tensor(3)

def no_list():
    return Own(), torch.randn(1, 3, 16), 3

def number():
    return 3

def broken():
    raise ValueError("no")
"""


SHORT = ("--set", "max_tokens=4")  # who knows nothing does not know when to stop


def test_a_run_is_looked_at(brick: Brick, trained: Path, tmp_path: Path) -> None:
    before = contents(trained)
    said = brick("look", trained, "7 1 4", "--out", tmp_path / "x.html", "--layers")
    assert said.code == 0 and said.out.startswith("7 1 4 → 4 1 7\n")
    table = [line.split() for line in said.out.splitlines() if ".cross" in line and "%" in line]
    assert len(table) == 8, "two layers of four heads"
    mirrored = max(int(row[-3]) for row in table)
    assert mirrored >= 90, "some head of cross-attention has learnt to look at the mirrored place"
    last = next(line for line in said.out.splitlines() if line.startswith("decoder.1 "))
    assert last.split()[1:5] == ["4", "1", "7", "<eos>"]
    html = (tmp_path / "x.html").read_text()
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])
    assert data["source"] == ["7", "1", "4"] and data["labels"] == ["<bos>", "4", "1", "7"]
    assert [s["text"] for s in data["steps"]] == ["4", "1", "7", "<eos>"] and [s["length"] for s in data["steps"]] == [
        1,
        2,
        3,
        4,
    ]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert contents(trained) == before


def test_the_page_goes_into_the_run_folder(brick: Brick, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny, run)
    assert brick("look", run, "1 2 3", "--only", "decoder.stack.layers.1.cross", *SHORT).code == 0
    assert {"look.html", "look.png"} <= {p.name for p in run.iterdir()}
    data = json.loads((run / "look.html").read_text().split('id="data">')[1].split("</script>")[0])
    assert [m["name"] for m in data["maps"]] == ["decoder.stack.layers.1.cross"]
    said = brick("look", run, "--training")
    assert said.code == 0 and said.out == "open run/training.html\n"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["RUN"], "no text"),
        (["RUN", "7 x"], "got 'x'"),
        (["RUN", "7 1", "--tokens", "5"], "expected A:B"),
        (["RUN", "7 1", "--tokens", "50:60", *SHORT], "expected a part of 0:"),
        (["RUN", "7 1", "--out", "x.txt"], "ends in .html"),
        (["RUN", "7 1", "--live"], "belongs to --training"),
        (["RUN", "7 1", "--training"], "means nothing"),
        (["RUN", "--training", "--layers"], "exclude each other"),
        (["RUN", "--training", "--live", "--out", "x.html"], "writes none"),
        (["RUN", "7 1", "--set", "width=3"], "one answer is written"),
        (["RUN", "7 1", "--set", "tempratur=3"], "did you mean 'temperature'"),
        (["RUN", "7 1", "--only", "nowhere", *SHORT], "expected the path of a part; known: "),
        (
            ["RUN", "7 1", "--only", "decoder.stack.layers.1.cros", *SHORT],
            "did you mean 'decoder.stack.layers.1.cross'?",
        ),
        (
            ["RUN", "7 1", "--only", "encoder:9", *SHORT],
            "got head '9' of encoder.stack.layers.0.mixer, expected one of 1",
        ),
        (["nowhere", "7 1"], "no such run folder"),
        (["FOREIGN:make", "7 1"], "belongs to a run"),
        (["FOREIGN:empty"], "no attention was seen in Linear"),
        (["FOREIGN:number"], "returned int; expected (model, inputs, tokens)"),
        (["FOREIGN:broken"], "raised ValueError: no"),
        (["FOREIGN:make", "--only", "layers.1"], "known: layers.0.self_attn"),
        (["FOREIGN:make", "--only", "layers:5"], "got head '5' of layers.0.self_attn, expected one of 1, 2, 3, 4"),
        (["FOREIGN:shape"], "shape: the model raised"),
        (["FOREIGN:no_axes"], "no_axes: the model raised"),
        (["FOREIGN:no_list"], "the tokens are int; expected a list of texts"),
        (["FOREIGN:mak"], "did you mean 'make'"),
        (["FOREIGN"], "foreign.py:make"),
        (["FOREIGN", "7 1"], "foreign.py:make"),
        (["TYPO:make"], "no such file; did you mean '"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_cannot_be_looked_at(brick: Brick, tiny: Path, tmp_path: Path, args: list[str], expected: str) -> None:
    (tmp_path / "foreign.py").write_text(FOREIGN)
    args = [a.replace("TYPO", str(tmp_path / "forein.py")) for a in args]
    args = [a.replace("RUN", str(tiny)).replace("FOREIGN", str(tmp_path / "foreign.py")) for a in args]
    before = contents(tiny)
    assert expected in brick("look", *args).error
    assert contents(tiny) == before


@pytest.mark.parametrize(("place", "expected"), [("nowhere/x.html", "no such folder"), ("x.html", "it is a folder")])
def test_a_page_that_cannot_be_written(brick: Brick, tiny: Path, tmp_path: Path, place: str, expected: str) -> None:
    (tmp_path / "x.html").mkdir()
    said = brick("look", tiny, "7 1", "--out", tmp_path / place, "--only", "decoder:1", *SHORT)
    assert said.code == 2 and expected in said.err and said.err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["x.html"]


def test_a_longer_text_than_the_model_takes(brick: Brick, tiny: Path) -> None:
    assert "expected at most" in brick("look", tiny, " ".join("1" * 5000)).error


def test_anyones_model(brick: Brick, tmp_path: Path) -> None:
    (tmp_path / "foreign.py").write_text(FOREIGN)
    (tmp_path / "look.html").write_text("mine")
    said = brick("look", f"{tmp_path / 'foreign.py'}:make")
    assert said.code == 0 and "layers.0.self_attn" in said.out
    data = json.loads((tmp_path / "look-foreign-make.html").read_text().split('id="data">')[1].split("</script>")[0])
    assert data["labels"] == ["<b>", "b", "c"] and data["foreign"]
    said = brick("look", f"{tmp_path / 'foreign.py'}:by_name")
    assert said.code == 0 and "inner.layers.0.self_attn" in said.out
    data = json.loads((tmp_path / "look-foreign-by_name.html").read_text().split('id="data">')[1].split("</script>")[0])
    assert data["labels"] == ["0", "1", "2"]
    assert (tmp_path / "look.html").read_text() == "mine"


def test_the_live_page_is_for_this_machine_and_has_two_addresses(tiny: Path) -> None:
    with server(tiny) as at:
        thread = threading.Thread(target=at.serve_forever)
        thread.start()
        try:
            base = f"http://127.0.0.1:{at.server_address[1]}"
            assert at.server_address[0] == "127.0.0.1"
            with urllib.request.urlopen(f"{base}/") as answer:
                assert b'"live":true' in answer.read()
            with urllib.request.urlopen(f"{base}/data.json") as answer:
                data = json.loads(answer.read())
            assert data["steps_asked"] == 3 and {c["key"] for c in data["charts"]} >= {"loss", "update", "att_entropy"}
            elsewhere = urllib.request.Request(f"{base}/", headers={"Host": "evil.example"})
            for address, code in ((f"{base}/../run.json", 404), (f"{base}/weights.safetensors", 404), (elsewhere, 403)):
                with pytest.raises(urllib.error.HTTPError) as e:
                    urllib.request.urlopen(address)
                assert e.value.code == code
                e.value.close()
        finally:
            at.shutdown()
            thread.join()


def test_the_live_page_outlives_a_browser_that_hangs_up_and_a_run_that_is_gone(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, aside = tmp_path / "run", tmp_path / "aside"
    shutil.copytree(tiny, run)
    with server(run) as at:
        thread = threading.Thread(target=at.serve_forever)
        thread.start()
        try:
            port = at.server_address[1]
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", port)) as s:
                    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
                    s.sendall(f"GET / HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            data = f"http://127.0.0.1:{port}/data.json"
            metrics = run / "metrics.jsonl"
            whole = metrics.read_bytes()
            early = json.dumps({**json.loads(whole.splitlines()[0]), "step": 1})
            metrics.write_text(early + '\n{"step": 3, "lo')  # killed while it wrote
            os.utime(metrics, (1.0, 1.0))
            with urllib.request.urlopen(data) as answer:
                assert json.loads(answer.read())["about"]["en"].startswith("step 1 of 3 · nothing new for ")
            metrics.write_bytes(whole)
            with urllib.request.urlopen(data) as answer:
                assert json.loads(answer.read())["about"]["en"] == "step 3 of 3 · finished"
            run.rename(aside)
            with pytest.raises(urllib.error.HTTPError) as e:
                urllib.request.urlopen(data)
            assert e.value.code == 503
            e.value.close()
            aside.rename(run)
            with urllib.request.urlopen(data) as answer:
                assert json.loads(answer.read())["live"]
        finally:
            at.shutdown()
            thread.join()
    assert capfd.readouterr().err == ""


# ---- drawings


def drawn(brick: Brick, *args: str) -> list[str]:
    said = brick("show", *args, "--svg", "x.svg")
    assert said.code == 0 and said.out.splitlines()[-1].split() == ["drawn", "x.svg"]
    root = ET.parse("x.svg").getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert width <= 960, "readable at page width"
    for node in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y = float(node.attrib.get("x", 0)), float(node.attrib.get("y", 0))
        assert (
            x >= 0
            and y >= 0
            and x + float(node.attrib["width"]) <= width
            and y + float(node.attrib["height"]) <= height
        )
    return [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_an_encoder_decoder_is_drawn(brick: Brick) -> None:
    texts = drawn(brick, "vaswani", "--set", "vocab=37000")
    assert texts.count("× 6") == 2 and texts.count("cross-attention · 1.05 M") == 1
    assert "B × S × 512" in texts and "B × T × 37000" in texts and any("memory B × S × 512" in t for t in texts)
    assert "512 → 2048 → 512" in texts and texts.count("LayerNorm 512") == 2 + 3 + 2


def test_a_hybrid_is_drawn_once_a_pattern(brick: Brick, tmp_path: Path) -> None:
    from brickformer import GLU, Attention, Decoder, Layer, Mask, pattern
    from brickformer.mixers.mamba import Mamba

    unit = [
        Layer(Attention(heads=4, mask=Mask(window=8)), GLU(32), place="peri"),
        Layer(Mamba(), GLU(32)),
        Layer(Mamba(), GLU(32)),
    ]
    (tmp_path / "spec.json").write_text(Decoder(50, 16, pattern(unit, 12)).to_json())
    texts = drawn(brick, "spec.json")
    assert "× 4" in texts and "× 2" in texts
    assert sum(t.startswith("mamba ·") for t in texts) == sum(t.startswith("attention ·") for t in texts) == 1
    assert any("window 8" in t for t in texts)


@pytest.mark.parametrize("arrange", ["parallel", "parallel_norms"])
def test_parallel_branches_stand_side_by_side(brick: Brick, arrange: str) -> None:
    texts = drawn(brick, "gpt2", "--set", f"layers.*.arrange={arrange}", "--set", "depth=2")
    norms = sum(t.startswith("LayerNorm") for t in texts)
    assert norms == (2 if arrange == "parallel" else 3) and "× 2" in texts


def test_rounds_experts_positions_and_what_stands_behind_a_convolution(brick: Brick, tmp_path: Path) -> None:
    from brickformer import GLU, Attention, Decoder, Layer, Rope
    from brickformer.mixers.shortconv import ShortConv
    from brickformer.moe import MoE, Router

    experts = MoE(4, GLU(24), Router(top_k=2), shared=GLU(8))
    layers = (Layer(Attention(heads=4, position=Rope()), experts), Layer(ShortConv(Attention(heads=2)), GLU(32)))
    (tmp_path / "spec.json").write_text(Decoder(50, 16, (*layers, layers[1]), loops=3).to_json())
    texts = drawn(brick, "spec.json")
    assert texts.count("3 rounds") == 1 and texts.count("× 2") == 1, "all layers go round together"
    assert "4 experts, 2 used, 1 shared, 16 → 24 → 16" in texts and "4 heads × 4, rotary, causal" in texts
    assert any(t.startswith("shortconv + attention ·") for t in texts)
    assert "convolution of 4, 2 heads × 8, causal" in texts


def test_a_drawing_needs_a_name(brick: Brick) -> None:
    assert "ends in .svg" in brick("show", "gpt2", "--svg", "x.png").error
