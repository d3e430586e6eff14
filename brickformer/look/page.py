"""One HTML file: no network, no other file, below 5 MB. What a view holds goes into it as JSON.

Texts are data from anywhere. They reach the file only inside a JSON script element in which <, > and & are escaped, and
the document only as text; a content security policy allows the two inline blocks by their hash and nothing else; a
page that is served live may ask its own server for numbers. What cannot be seen is shown: control characters and marks
that turn the direction of writing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import unicodedata
from dataclasses import asdict
from importlib.resources import files
from typing import Any, Final

from torch import Tensor

from brickformer.errors import DataError
from brickformer.look.lens import Layer
from brickformer.look.maps import Map, left_out
from brickformer.look.view import Step, View

LIMIT: Final = 5_000_000
"""Bytes of a page."""
_FINE: Final = 700_000  # numbers up to which each gets two bytes
_STEPS: Final = 400
_BEFORE: Final = 120  # tokens shown before a step
_CELLS: Final = 6_000  # answers of layers
_LONGEST: Final = 48  # characters of a token


def page(view: View) -> str:
    """The page of a view."""
    data = _data(view)
    return fill(view.title, data, ["page.js"])


def fill(title: str, data: dict[str, Any], scripts: list[str], *, live: bool = False) -> str:
    """The template with a title, data and scripts in it. live: it may ask its server. Errors: DataError: too large."""
    style = "\n" + _file("page.css")
    script = "\n" + "".join(map(_file, scripts)) + "begin();\n"
    asks = " connect-src 'self';" if live else ""
    policy = f"default-src 'none';{asks} style-src {_hash(style)}; script-src {_hash(script)}"
    parts = {
        "policy": html.escape(policy),
        "title": html.escape(readable(title, 120)),
        "style": style,
        "data": escaped(data),
        "script": script,
    }
    out = _file("page.html")
    head, *rest = out.split("{{")
    made = [head]  # put together in one go: what is put in is never searched for places to put something in
    for piece in rest:
        name, text = piece.split("}}", 1)
        made += [parts[name], text]
    done = "".join(made)
    size = len(done.encode())
    if size >= LIMIT:
        raise DataError(
            f"look: got a page of {size} bytes, expected less than {LIMIT}. Show fewer tokens (rows, --tokens A:B) or "
            "fewer layers (only, --only PATH)."
        )
    return done


def escaped(data: object) -> str:
    """JSON that no HTML parser reads anything else from."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode("utf-8", "backslashreplace").decode()


def readable(text: str, most: int = _LONGEST) -> str:
    """A text of which every character can be seen: ␣ for one that is nothing but spaces, ⏎, ␀, ⟨U+202E⟩."""
    if text and not text.strip(" "):
        return "␣" * min(len(text), most)
    out = "".join(char if _joins(text, i) else _visible(char) for i, char in enumerate(text[: most + 1]))
    if out and unicodedata.combining(out[0]):
        out = "◌" + out
    return out if len(text) <= most else out[: most - 1] + "…"


def _joins(text: str, i: int) -> bool:
    """Whether this makes one picture of the two beside it: a family, a profession."""
    if text[i] != "\u200d" or not 0 < i < len(text) - 1:
        return False
    before = text[:i].rstrip("\ufe0f\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff")  # its style, its skin
    return before != "" and {unicodedata.category(before[-1]), unicodedata.category(text[i + 1])} == {"So"}


def _visible(char: str) -> str:
    code = ord(char)
    if char == "\n":
        return "⏎"
    if char == "\t":
        return "⇥"
    if code < 32:
        return chr(0x2400 + code)
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"):
        return f"⟨U+{code:04X}⟩"
    return char


def _data(view: View) -> dict[str, Any]:
    left, (marked, idle) = list(view.left_out), view.marked()
    maps = [_map(m, _bits(view.maps)) for m in view.maps]
    steps, layers = view.steps[-_STEPS:], view.layers
    if len(steps) < len(view.steps):
        gone = len(view.steps) - len(steps)
        left.append(left_out(f"the first {gone} of {len(view.steps)} steps of writing", f"前 {gone} 个生成步骤"))
    lens = _lens(layers, view, left) if layers else None
    read: dict[str, list[range]] = {"source": [], "target": []}
    for m in view.maps:
        read[m.side].append(m.rows)
        read[m.key_side].append(m.keys)
    if lens is not None:
        read["target"].append(range(lens["row0"], view.layers_from + len(layers[0].ids)))
    if steps:
        read["target"].append(range((view.written or 0) + len(view.steps) - len(steps) - _BEFORE, len(view.labels)))
    return {
        "title": readable(view.title, 120),
        "about": {"en": _about(view), "zh": _about_chinese(view)},
        "labels": _texts(view.labels, read["target"]),
        "source": _texts(view.source, read["source"]),
        "written": view.written,
        "maps": maps,
        "start": _start(view),
        "marked": marked,
        "idle": idle,
        "logits": view.logits,
        "foreign": view.foreign,
        "steps": [_step(step, view) for step in steps],
        "step0": len(view.steps) - len(steps),
        "lens": lens,
        "left_out": [{"en": en, "zh": zh} for en, zh in left],
    }


def _texts(texts: list[str], read: list[range]) -> list[str]:
    """The texts of the places that the page reads, nothing for the others."""
    wanted = {i for places in read for i in places}
    return [readable(text) if i in wanted else "" for i, text in enumerate(texts)]


def _start(view: View) -> tuple[int, int]:
    """The map and the head to open with: the one that contributes most, or, where none does much, the clearest one."""
    heads = [(s, i, h) for i, m in enumerate(view.maps) for h, s in enumerate(m.stats)]
    worth = [s.removed if math.isfinite(s.removed) else 0.0 for s, _, _ in heads]
    if max(worth) < 0.02:
        worth = [max(x for x in (s.previous, s.same_token, s.anti, 0.0) if x == x) for s, _, _ in heads]
    best = max(range(len(heads)), key=worth.__getitem__)
    return heads[best][1:]


def _about(view: View) -> str:
    read = f"{len(view.source)} source tokens, " if view.source else ""
    return f"{read}{len(view.labels)} tokens · {len(view.maps)} maps, {sum(m.heads for m in view.maps)} heads"


def _about_chinese(view: View) -> str:
    read = f"源端 {len(view.source)} 个词元，" if view.source else ""
    return f"{read}{len(view.labels)} 个词元 · {len(view.maps)} 幅图，{sum(m.heads for m in view.maps)} 个头"


def _bits(maps: list[Map]) -> int:
    return 16 if sum(m.weights.numel() for m in maps) <= _FINE else 8


def _map(m: Map, bits: int) -> dict[str, Any]:
    heads, tokens, keys = m.weights.shape
    return {
        "name": readable(m.name, 120),
        "kind": m.kind,
        "what": m.what,
        "side": m.side,
        "key_side": m.key_side,
        "row0": m.rows.start,
        "key0": m.keys.start,
        "T": tokens,
        "S": keys,
        "heads": m.labels,
        "bits": bits,
        "data": packed(m.weights, bits),
        "stats": [{k: _number(v) for k, v in asdict(s).items()} for s in m.stats],
        "alike": m.alike(),
    }


def packed(weights: Tensor, bits: int) -> str:
    """Numbers from 0 to 1 as base64: w · 65535 in two bytes, or √w · 255 in one, which spares the small ones."""
    w = weights.clamp(0.0, 1.0).double()
    whole = (w * 65535).round().int().numpy().astype("<u2") if bits == 16 else (w.sqrt() * 255).round().byte().numpy()
    return base64.b64encode(whole.tobytes()).decode()


def _step(step: Step, view: View) -> dict[str, Any]:
    return {
        "text": readable(view.name(step.token)),
        "top": [[readable(view.name(i)), round(p, 4), i == step.token] for i, p in step.top],
        "length": step.length,
        "slots": step.slots,
        "nbytes": step.nbytes,
    }


def _lens(layers: list[Layer], view: View, left: list[tuple[str, str]]) -> dict[str, Any]:
    most = max(16, _CELLS // len(layers))
    gone = max(0, len(layers[0].ids) - most)
    if gone:
        left.append(left_out(f"answers of layers at {gone} earlier tokens", f"更早 {gone} 个词元处的各层预测"))
    cells = [
        [
            [[readable(view.name(i)), round(p, 4)] for i, p in zip(ids, ps, strict=True)]
            for ids, ps in zip(layer.ids[gone:], layer.p[gone:], strict=True)
        ]
        for layer in layers
    ]
    names = [layer.name.removeprefix("decoder.").removeprefix("stack.") for layer in layers]
    kl = [_number(sum(layer.kl[gone:]) / len(layer.kl[gone:])) for layer in layers]
    return {"names": names, "cells": cells, "kl": kl, "row0": view.layers_from + gone}


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _file(name: str) -> str:
    return files("brickformer.look").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
