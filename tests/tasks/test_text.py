"""Text windows against plain loops. In a text whose characters all differ and ascend, an id is a position."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brickformer.errors import DataError, SpecError
from brickformer.tasks import IGNORE, CharTokenizer, Text, TextData, files, other_text
from brickformer.tasks.text import encode_file

FIRST = 0x10000  # code points without surrogates or line ends among them


def _data(folder: Path, length: int, **fields: object) -> TextData:
    """A text whose i-th character has id i."""
    path = folder / "ascending.txt"
    path.write_text("".join(chr(FIRST + i) for i in range(length)), encoding="utf-8")
    data = Text(str(path)).but(**fields).prepare(0)
    assert isinstance(data, TextData)
    return data


@pytest.mark.parametrize(
    ("length", "dtype"),
    [(200, torch.uint8), (256, torch.uint8), (257, torch.int16), (32768, torch.int16), (32769, torch.int32)],
)
def test_windows_of_any_vocabulary(tmp_path: Path, length: int, dtype: torch.dtype) -> None:
    data = _data(tmp_path, length, context=16)
    assert data.ids.dtype == dtype and data.ids.tolist() == list(range(length)) and data.target.vocab == length
    for step in range(20):
        batch = data.batch(step, 6)
        for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            i = inputs[0]
            assert inputs == list(range(i, i + 16)) and targets == list(range(i + 1, i + 17))
            assert targets[-1] < data.cut, "a training window reaches into validation"
        assert batch.src is None and batch.src_valid is None and batch.valid is None and batch.tokens == 96


def test_a_text_in_ids_that_are_there_already(tmp_path: Path) -> None:
    path = tmp_path / "other.txt"
    path.write_text("".join(chr(FIRST + i) for i in range(200, 300)), encoding="utf-8")
    tokenizer = CharTokenizer([chr(FIRST + i) for i in range(400)], specials=False)
    data = other_text(str(path), tokenizer, context=8, sample=9)
    assert data.target is tokenizer and data.cut == 90
    learnt = {i for step in range(20) for i in data.batch(step, 4).targets.flatten().tolist()}
    (held,) = data.validation(4)
    assert learnt <= set(range(201, 290)) and held.inputs.tolist() == [list(range(290, 298))]
    with pytest.raises(
        DataError, match="100 tokens leave 10 for validation, expected at least 12 .* Use a longer text"
    ):
        other_text(str(path), tokenizer, context=11, sample=9)
    path.write_text("abc")
    with pytest.raises(DataError, match=r"other\.txt"):
        other_text(str(path), tokenizer, context=1, sample=9)


@given(length=st.integers(4, 300), context=st.integers(1, 40), split=st.floats(0.1, 0.9), size=st.integers(1, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_character_once(tmp_path: Path, length: int, context: int, split: float, size: int) -> None:
    cut = int(length * split)
    if min(cut, length - cut) <= context:
        with pytest.raises(DataError, match=f"expected at least {context + 1} "):
            _data(tmp_path, length, context=context, split=split)
        return
    data = _data(tmp_path, length, context=context, split=split)
    windows = data._order.count
    assert windows >= 1
    for epoch in range(3):
        rows = [data.batch(epoch * windows + i, 1) for i in range(windows)]
        seen = [t for batch in rows for t in batch.targets[0].tolist()]
        assert len(set(seen)) == len(seen), "seen twice in an epoch"
        assert sorted(seen) == list(range(min(seen), max(seen) + 1)), "a gap between windows"
        assert min(seen) >= 1 and max(seen) < cut and cut - 1 - len(seen) < 2 * context
    counted: list[int] = []
    for batch in data.validation(size, whole=True):
        for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            assert inputs == list(range(inputs[0], inputs[0] + context)) and inputs[0] >= cut
            assert all(t in (i + 1, IGNORE) for i, t in zip(inputs, targets, strict=True))
            counted += [t for t in targets if t != IGNORE]
    assert counted == list(range(cut + 1, length)), "each validation character but the first, exactly once"


def test_a_window_may_start_anywhere(tmp_path: Path) -> None:
    data = _data(tmp_path, 62, context=8, split=0.8)  # 48 to predict: windows fit without slack
    assert {data.batch(step, 1).inputs[0, 0].item() for step in range(2000)} == set(range(data.cut - 8))


@pytest.mark.parametrize("sample", [1, 2, 5, 11, 12, 100])
def test_the_validation_sample_is_evenly_spaced(tmp_path: Path, sample: int) -> None:
    data = _data(tmp_path, 1000, context=8, valid_windows=sample)  # 100 held out: 12 windows and 3 characters
    starts = [row[0] for batch in data.validation(5) for row in batch.inputs.tolist()]
    assert len(starts) == min(sample, 12) and starts[0] == 900
    tiles = [(s - 900) / 8 for s in starts]
    assert all(t == int(t) for t in tiles)
    gaps = [b - a for a, b in pairwise(tiles)]
    assert all(gap >= 1 for gap in gaps) and (not gaps or max(gaps) - min(gaps) <= 1)
    assert sample == 1 or tiles[-1] == 11
    assert sum(batch.tokens for batch in data.validation(5)) == 8 * len(starts)
    assert sum(batch.tokens for batch in data.validation(5, whole=True)) == 99


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0\ufeff"), min_size=1, max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_encoded_file_against_a_loop(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE", 5)  # characters go on turning up in later pieces
        ids, tokenizer = encode_file(str(path))
    known = sorted(set(text))
    assert tokenizer.tokens == tuple(known)
    assert ids.tolist() == [known.index(c) for c in text] == tokenizer.encode(text)


def test_line_ends_and_a_byte_order_mark_change_nothing(tmp_path: Path) -> None:
    text = "Zwölf Boxkämpfer\njagen Viktor\n" * 9
    made = []
    for name, content in {
        "plain": text.encode(),
        "windows": b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
        "old": text.replace("\n", "\r").encode(),
    }.items():
        (tmp_path / name).write_bytes(content)
        made.append(Text(str(tmp_path / name), context=8).prepare(0))
    assert made[0].fingerprint == made[1].fingerprint == made[2].fingerprint
    assert made[0].target == made[1].target == made[2].target
    assert "\r" not in made[1].target.tokens and "\ufeff" not in made[1].target.tokens


def test_no_normalization(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("e\u0301\u00e9" * 50, encoding="utf-8")
    data = Text(str(path), context=4).prepare(0)
    assert data.target.tokens == ("e", "\u00e9", "\u0301")


def test_one_character_over_and_over(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a" * 100)
    assert Text(str(path), context=4).prepare(0).batch(0, 3).targets.tolist() == [[0] * 4] * 3


@pytest.mark.parametrize(
    ("length", "part"), [(20, "leave 18 for training"), (640, "leave 64 for validation"), (1, "leave 0")]
)
def test_too_short(tmp_path: Path, length: int, part: str) -> None:
    with pytest.raises(DataError) as e:
        _data(tmp_path, length)
    said = str(e.value)
    assert f"ascending.txt: {length} characters {part}" in said and "expected at least 65" in said
    assert "Use a longer text, a shorter context or another split." in said


def test_just_long_enough(tmp_path: Path) -> None:
    data = _data(tmp_path, 650)
    assert [batch.inputs.shape for batch in data.validation(9, whole=True)] == [(1, 64)]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"data": ""}, "data: got ''"),
        ({"context": 0}, "context: got 0"),
        ({"split": 1.0}, "split: got 1.0, expected a number between 0 and 1. 0.9"),
        ({"split": 0.0}, "split: got 0.0"),
        ({"valid_windows": 0}, "valid_windows: got 0"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Text("a.txt").but(**fields)


def test_tinyshakespeare(shared_data: Path) -> None:
    data = Text(str(shared_data / "tinyshakespeare" / "input.txt")).prepare(0)
    assert isinstance(data, TextData)
    assert data.target.vocab == 65 and len(data.ids) == 1_115_394 and data.cut == 1_003_854
    assert data.target.decode(data.ids[:14]) == "First Citizen:"
    assert sum(batch.tokens for batch in data.validation(64, whole=True)) == 111_539
