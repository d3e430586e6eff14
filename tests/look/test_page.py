"""The page: one file, small, closed, and shown by a browser as a person meets it.

The browser is headless Chromium. Where there is none, what only a browser can show is not tested, and says so.
"""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brickformer import GLU, Attention, Decoder, Layer, pattern
from brickformer.errors import DataError
from brickformer.look import View, attention
from brickformer.look.curves import curves_data, curves_page
from brickformer.look.grid import picture
from brickformer.look.page import LIMIT, escaped, packed, page, readable
from brickformer.look.table import findings, heads, layers
from brickformer.look.view import replay

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
EVIL = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "{{script}}",
    "javascript:alert(1)",
    "\u202eabc",
    "\x00\x1b[31m",
    "\ud800",
    "\u2028",
    "مرحبا",
    "你好",
    "<!--",
    "&lt;b&gt;",
]


def view(names: list[str], *, layers: int = 2, dim: int = 16, tokens: int | None = None) -> View:
    """Of a small decoder that reads `names`, one token each."""
    model = Decoder(len(names), dim, pattern([Layer(Attention(heads=2), GLU(16))], layers)).build().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    ids = [i % len(names) for i in range(tokens or len(names))]
    made = attention(model, ids, name=lambda i: names[i], title=names[0], written=len(ids) - 2, remove=len(ids) < 50)
    made.steps = replay(model, ids[:-2], ids[-2:], None)
    return made


def data_of(html: str) -> Any:
    """What is in the page."""
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def unpacked(m: dict[str, Any]) -> np.ndarray:
    raw = base64.b64decode(m["data"])
    w = np.frombuffer(raw, "<u2") / 65535 if m["bits"] == 16 else (np.frombuffer(raw, np.uint8) / 255) ** 2
    return w.reshape(len(m["heads"]), m["T"], m["S"])


def test_the_page_holds_what_was_seen() -> None:
    made = view(list("abcdef"))
    data = data_of(page(made))
    assert data["labels"] == list("abcdef")
    for m, found in zip(made.maps, data["maps"], strict=True):
        np.testing.assert_allclose(unpacked(found), m.weights.numpy(), atol=1e-5)
        assert [s["entropy"] for s in found["stats"]] == pytest.approx([s.entropy for s in m.stats], rel=1e-4)
    assert [step["length"] for step in data["steps"]] == [4, 5]


def test_one_byte_is_enough_for_small_and_large_weights() -> None:
    w = torch.linspace(0, 1, 1001)[None, None]
    small = unpacked({"data": packed(w, 8), "bits": 8, "heads": [0], "T": 1, "S": 1001})
    assert float(np.abs(small - w.numpy()).max()) < 0.005
    assert float(np.abs(small - w.numpy())[w.numpy() < 0.01].max()) < 0.0005


def test_nothing_is_fetched_and_nothing_escapes() -> None:
    html = page(view(EVIL))
    assert html.count("<script") == 2 and html.count("</script>") == 2 and "<img" not in html
    assert not re.search(
        r"""(src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", html.split('id="data">')[0]
    )
    assert "default-src &#x27;none&#x27;; style-src" in html and "unsafe" not in html
    served = curves_page([], "run", steps=1, live=True)
    assert "connect-src &#x27;self&#x27;" in served and not re.search(
        "connect-src|img-src", curves_page([], "", steps=1)
    )
    data = data_of(html)
    assert data["labels"][0] == EVIL[0] and data["labels"][2] == "{{script}}"
    assert not any(c < " " or c in "\u202e\u2028\x7f" for label in data["labels"] for c in label)


def test_what_cannot_be_seen_is_shown() -> None:
    shown = {
        " ": "␣",
        "  ": "␣␣",
        "\n": "⏎",
        "a b": "a b",
        "\t": "⇥",
        "\x00": "␀",
        "\u202e": "⟨U+202E⟩",
        "\u0301": "◌\u0301",
    }
    assert {text: readable(text) for text in shown} == shown
    assert readable("\ud800") == "⟨U+D800⟩" and readable("你好") == "你好" and readable("") == ""
    assert len(readable("x" * 5000)) == 48
    for whole in ("👩‍👩‍👧", "👩🏽‍🚀", "❤️‍🔥"):
        assert "\u200d" in whole and readable(whole) == whole
    assert readable("a\u200db") == "a⟨U+200D⟩b" and readable("👩\u200d") == "👩⟨U+200D⟩", "nothing is joined here"
    assert readable("👩\u202e👩") == "👩⟨U+202E⟩👩"


def test_escaped_json_is_the_same_json() -> None:
    data = {"a": EVIL[:6], "b": [1, None, "\u2029"]}
    assert json.loads(escaped(data)) == data and not set(escaped(data)) & set("<>&\u2028\u2029")


def test_thousands_of_tokens_stay_small_and_say_so() -> None:
    made = view([f"w{i}" for i in range(40)], layers=6, tokens=3000)
    html = page(made)
    assert len(html.encode()) < LIMIT
    left = [x["en"] for x in data_of(html)["left_out"]]
    assert "Left out: tokens 0 to 2615 of 3000." in left and len(made.maps) == 6


def test_many_layers_of_many_heads_stay_small_and_say_so() -> None:
    made = view(list("abcdefgh"), tokens=300)
    m = made.maps[0]
    wide = replace(m, weights=m.weights.repeat(16, 1, 1), stats=m.stats * 16, labels=[str(i) for i in range(32)])
    from brickformer.look.view import fitting

    left: list[tuple[str, str]] = []
    made.maps = fitting([replace(wide, name=f"stack.layers.{i}.mixer") for i in range(48)], left)
    made.left_out += left
    html = page(made)
    assert len(html.encode()) < LIMIT and len(left) == 2 and "of 48 layers" in left[1][0]


def test_only_what_is_read_is_written() -> None:
    made = view(list("abcdefgh"), tokens=300)
    made.steps, made.written = [], None
    part = range(200, 210)
    made.maps = [replace(m, weights=m.weights[:, part][..., part], rows=part, keys=part) for m in made.maps]
    made.layers, made.layers_from = (
        [replace(x, ids=x.ids[205:212], p=x.p[205:212], kl=x.kl[205:212]) for x in made.layers],
        205,
    )
    expected = [text if 200 <= i < 212 else "" for i, text in enumerate(made.labels)]
    made.labels += ["x" * 48] * 150_000  # 7 MB that nobody reads
    data = data_of(page(made))
    assert data["labels"][:300] == expected and not any(data["labels"][300:])


def test_a_page_that_is_too_large_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brickformer.look.page.LIMIT", 10_000)
    with pytest.raises(DataError, match=r"expected less than 10000.*--tokens A:B.*--only PATH"):
        page(view(list("abcdef")))


def test_every_word_of_the_page_is_read_and_in_both_languages() -> None:
    script, more = (files("brickformer.look").joinpath(name).read_text() for name in ("page.js", "training.js"))
    words, code = script.split("const STATS", 1)
    english, chinese = (re.findall(r"\b(\w+): \"", part) for part in words.split("zh: {"))
    assert english == chinese
    made = {f"{a}_{b}" for a in ("what", "note") for b in ("attention", "hidden", "gradient")}
    data = {"self", "cross", "loss", "exact", "lr", "grad_norm", "update", "att_entropy", "speed", "train", "val"}
    read = set(re.findall(r"\w+", code + more)) | made | data
    assert not set(english) - read


def test_the_picture_needs_no_font_it_has_not() -> None:
    """A missing glyph would be a warning, and so an error; a $ alone would be a formula."""
    made = picture(view([*EVIL, "$x_", "₀", "🙂", "你好你好你好"]))
    assert made.startswith(b"\x89PNG")


def test_the_picture_says_what_it_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from brickformer.look import grid

    monkeypatch.setattr(grid, "ROWS", 1)
    monkeypatch.setattr(grid, "COLUMNS", 1)
    titles: list[str] = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda self, text, **_: titles.append(text))
    picture(view(list("abc")))
    assert titles == ["a\n1 layers left out\n1 heads a layer left out"]
    monkeypatch.setattr(grid, "_known", lambda: frozenset(range(128)))
    picture(view(["你好" * 30, "b", "c"]))
    assert len(titles[1].split("\n")[0]) <= 40 and titles[1].startswith("U+4F60U+597D"), "cut where the picture ends"


def test_the_tables_say_the_same() -> None:
    made = view(list("abcdef"))
    lines = heads(made)
    assert len(lines) == 1 + 4 and len({len(line) for line in lines}) == 1
    assert lines[1].split()[:3] == ["0.mixer", "1", f"{made.maps[0].stats[0].entropy:.2f}"]
    said = layers(made, 80)
    assert [line.split()[0] for line in said] == ["after", "1", "0", "embed"]
    assert len(heads(made, most=2)) == 4
    assert findings(replace(made, dead=[(0, 0), (0, 1)]))[:2] == [
        "removed alone, these change next to nothing (others may do the same work):",
        "  0.mixer 1, 2",
    ]


def test_curves() -> None:
    records = [
        {"step": float(s), "loss": 1 / s, "lr": 0.1, "grad_norm": math.nan, "tokens_per_s": 9.0} for s in range(1, 3001)
    ]
    records[-1] |= {"val_loss": 0.5, "update.ffn": 1e-3}
    data = curves_data(records, "run", steps=4000)
    charts = {c["key"]: c["series"] for c in data["charts"]}
    assert [s["name"] for s in charts["loss"]] == ["train", "val"]
    assert len(charts["loss"][0]["x"]) <= 1000 and charts["loss"][0]["x"][-1] == 3000
    assert data["missing"] == ["grad_norm", "att_entropy"] and data["about"]["en"] == "step 3,000 of 4,000"
    html = curves_page([{"step": 1.0, "update.</script>": 1.0}], "</title>", steps=1)
    assert html.count("</script>") == 2 and html.count("</title>") == 1


def test_a_live_page_says_whether_training_goes_on() -> None:
    record = {"step": 5.0, "loss": 1.0}
    about = {
        (steps, quiet): curves_data([record], "run", steps=steps, live=True, quiet=quiet)["about"]["en"]
        for steps in (5, 9)
        for quiet in (0.0, 59.0, 200.0)
    }
    assert about[5, 0.0] == about[5, 200.0] == "step 5 of 5 · finished"
    assert about[9, 0.0] == about[9, 59.0] == "step 5 of 9"
    assert about[9, 200.0] == "step 5 of 9 · nothing new for 3 min: stopped, or at long steps"
    stamps = {curves_data([record], "run", steps=9, live=True, quiet=q)["stamp"] for q in (0.0, 30.0, 70.0, 130.0)}
    assert len(stamps) == 3, "a page that waits is told when that changes, and not before"
    assert curves_data([record], "run", steps=9, quiet=200.0)["about"]["en"] == "step 5 of 9", "a file says no time"


# ---- in a browser


def dom(html: str, tmp_path: Path, hash_: str = "") -> str:
    """The document after its scripts have run."""
    if CHROMIUM is None:
        pytest.skip("NOT TESTED: no Chromium, so no browser has shown the page; install the package chromium")
    file = tmp_path / "page.html"
    file.write_bytes(html.encode())
    quiet = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking".split()
    quiet += "--disable-component-update --disable-sync --virtual-time-budget=2000".split()
    command = [CHROMIUM, *quiet, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"{file.as_uri()}{hash_}"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return done.stdout.decode()


def test_a_browser_shows_the_tokens_and_runs_none_of_them(tmp_path: Path) -> None:
    html = page(view(EVIL))
    shown = dom(html, tmp_path)
    main = shown.split("<main")[1].split("</main>")[0]
    assert "owned" not in re.findall(r"<title>(.*?)</title>", shown, re.DOTALL)[0][:20]
    assert shown.count("<script") == 2 and "<img" not in shown
    for text in ("&lt;img src=x", "مرحبا", "你好", "⟨U+202E⟩abc", "{{script}}", "&amp;lt;b&amp;gt;"):
        assert text in main, text
    assert 'role="group"' in main and "<canvas" in main and 'class="thumb' in main


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("#tab=heads&lang=zh", ["注意力头", "反对角线", 'lang="zh-Hans"']),
        ("#tab=steps&theme=dark", ["What was probable", "4 of 6 slots", 'data-theme="dark"']),
        ("#tab=layers", ["to go (nats)", "embed"]),
        ("#view=lines&map=1&head=1&row=3", ["<path", "d looks at"]),
    ],
)
def test_every_tab_in_a_browser(where: str, expected: list[str], tmp_path: Path) -> None:
    shown = dom(page(view(list("abcdef"))), tmp_path, where)
    text = re.sub(r"</?bdi[^>]*>", "", shown)
    for part in expected:
        assert part in text, part


def test_curves_in_a_browser(tmp_path: Path) -> None:
    records = [{"step": 1.0 + s, "loss": 1.0 / (1 + s), "lr": 0.1, "exact": s / 9} for s in range(10)]
    shown = dom(curves_page(records, "<b>run</b>", steps=10), tmp_path)
    assert shown.count("<polyline") >= 3 and "&lt;b&gt;run&lt;/b&gt;" in shown and "Not recorded by this run" in shown
