"""Pairs of texts: what is read, who is held out, batches against plain loops, and what a bad line is told."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from brickformer.errors import DataError, SpecError
from brickformer.tasks import BOS, EOS, IGNORE, PAD, Pairs, Seq2SeqData, pad

LINES = [("ab", "BA"), ("abc", "CBA"), ("c", "C"), ("caca", "ACAC"), ("b a", "A B"), ("e\u0301", "\u00c9")]


def _data(folder: Path, lines: list[tuple[str, str]] | bytes, seed: int = 0, **fields: Any) -> Seq2SeqData:
    path = folder / "pairs.tsv"
    path.write_bytes(lines if isinstance(lines, bytes) else "".join(f"{a}\t{b}\n" for a, b in lines).encode())
    data = Pairs(str(path), **fields).prepare(seed)
    assert isinstance(data, Seq2SeqData)
    return data


def _all(data: Seq2SeqData) -> list[tuple[str, str]]:
    return data.texts(sorted([*data.train.tolist(), *data.held_out.tolist()]))


def _random_lines(count: int, words: bool = False) -> list[tuple[str, str]]:
    draw = random.Random(1)
    units = ["zwei", "eins", "drei", "noch", "ein"] if words else list("abcdeé中 ")
    gap = " " if words else ""
    out = []
    for _ in range(count):
        picked = [draw.choice(units) for _ in range(draw.randint(1, 9))]
        line = "x" + gap + gap.join(picked) + gap + "y"
        out.append((line, line[::-1].upper() if not words else gap.join(reversed(line.split()))))
    return out


@pytest.mark.parametrize("level", ["char", "word"])
@pytest.mark.parametrize("vocabulary", ["separate", "shared"])
def test_batches_against_loops(tmp_path: Path, level: Any, vocabulary: Any) -> None:
    lines = _random_lines(80, words=level == "word")
    data = _data(tmp_path, lines, level=level, vocabulary=vocabulary)
    cut = (lambda s: s.split()) if level == "word" else list
    known = [sorted({unit for line in lines for unit in cut(line[side])}) for side in (0, 1)]
    if vocabulary == "shared":
        known = [sorted({*known[0], *known[1]})] * 2
    assert data.source is not None
    assert (data.source.tokens, data.target.tokens) == (tuple(known[0]), tuple(known[1]))
    assert _all(data) == lines
    answers = dict(lines)
    checked = 0
    for batch in [*(data.batch(step, 6) for step in range(15)), *data.validation(3)]:
        assert batch.src is not None
        sources = [data.source.decode(row) for row in batch.src]
        src = [[3 + known[0].index(unit) for unit in cut(s)] for s in sources]
        tgt = [[3 + known[1].index(unit) for unit in cut(answers[s])] for s in sources]
        assert batch.src.tolist() == pad(src, PAD).tolist()
        assert batch.inputs.tolist() == pad([[BOS, *t] for t in tgt], PAD).tolist()
        assert batch.targets.tolist() == pad([[*t, EOS] for t in tgt], IGNORE).tolist()
        assert batch.tokens == sum(len(t) + 1 for t in tgt)
        lengths = [len(s) for s in src]
        if batch.src_valid is None:
            assert len(set(lengths)) == 1
        else:
            assert batch.src_valid.sum(1).tolist() == lengths
        checked += len(sources)
    assert checked > 90
    assert data.max_source == max(len(cut(a)) for a, _ in lines)
    assert data.max_target == max(len(cut(b)) for _, b in lines) + 1


def test_an_epoch_shows_every_training_pair_once(tmp_path: Path) -> None:
    data = _data(tmp_path, [(f"s{i:03}", "t") for i in range(100)])
    assert data.source is not None and len(data.train) == 90
    seen = []
    for step in range(9):
        batch = data.batch(step, 10)
        assert batch.src is not None and batch.src_valid is None and batch.valid is None
        seen += [data.source.decode(row) for row in batch.src]
    assert sorted(seen) == sorted(source for source, _ in data.texts(data.train))


def test_no_source_is_on_both_sides(tmp_path: Path) -> None:
    lines = [(f"s{i % 40}", f"t{i}") for i in range(200)]  # every source five times, with different targets
    for seed in range(5):
        data = _data(tmp_path, lines, seed=seed, split=0.75)
        train = {source for source, _ in data.texts(data.train)}
        held_out = {source for source, _ in data.texts(data.held_out)}
        assert not train & held_out and len(train) == 30 and len(held_out) == 10
        assert len(data.train) == 150 and len(data.held_out) == 50
        assert sorted([*data.train, *data.held_out]) == list(range(200))


def test_words_are_the_same_source_however_they_are_spaced(tmp_path: Path) -> None:
    lines = [(f"a{i % 10}{' ' * (1 + i // 10)}b", "t") for i in range(30)]
    data = _data(tmp_path, lines, level="word", split=0.5)
    assert not {s for s, _ in data.texts(data.train)} & {s for s, _ in data.texts(data.held_out)}
    assert len(data.held_out) == 15


def test_the_split_does_not_depend_on_the_order_of_lines(tmp_path: Path) -> None:
    lines = [(f"s{i}", f"t{i}") for i in range(50)]
    shuffled = random.Random(0).sample(lines, 50)
    one, two = _data(tmp_path, lines), _data(tmp_path, shuffled)
    assert set(one.examples(whole=True)) == set(two.examples(whole=True))
    assert one.examples(whole=True) != _data(tmp_path, lines, seed=1).examples(whole=True)


@pytest.mark.parametrize(
    ("split", "sources", "held"), [(0.9, 100, 10), (0.5, 7, 4), (0.999, 10, 1), (0.001, 10, 9), (0.9, 2, 1)]
)
def test_how_many_are_held_out(tmp_path: Path, split: float, sources: int, held: int) -> None:
    data = _data(tmp_path, [(f"s{i}", "t") for i in range(sources)], split=split)
    assert (len(data.held_out), len(data.train)) == (held, sources - held)


def test_the_validation_sample_and_the_whole(tmp_path: Path) -> None:
    data = _data(tmp_path, [(f"s{i}", "t") for i in range(100)], split=0.5, valid_pairs=7)
    sample, whole = data.examples(), data.examples(whole=True)
    assert len(sample) == 7 and len(whole) == 50
    places = [whole.index(pair) for pair in sample]
    gaps = {b - a for a, b in pairwise(places)}
    assert places[0] == 0 and places[-1] == 49 and gaps <= {8, 9}
    assert sum(len(batch.inputs) for batch in data.validation(4)) == 7


def test_windows_files_blank_lines_and_odd_line_breaks(tmp_path: Path) -> None:
    plain = _data(tmp_path, LINES)
    text = "\r\n\r\n".join(f"{a}\t{b}" for a, b in LINES)  # blank lines between, none at the end
    windows = _data(tmp_path, b"\xef\xbb\xbf" + text.encode())
    assert _all(windows) == _all(plain) == LINES
    assert windows.fingerprint == plain.fingerprint
    odd = [("a\u2028b", "c\x0bd"), ("e\x85", "f\x0c g")]  # line breaks to some, characters here
    assert _all(_data(tmp_path, odd)) == odd


def test_characters_keep_their_spaces_and_combining_marks(tmp_path: Path) -> None:
    lines = [(" a ", "b  b"), ("e\u0301", "\u00e9")]
    data = _data(tmp_path, lines)
    assert _all(data) == lines
    assert data.source is not None and data.source.tokens == (" ", "a", "e", "\u0301")


BAD: dict[str, tuple[str, str]] = {
    "one column": (
        "a\tb\nhello there\n",
        "line 2: got one column in 'hello there', expected source TAB target. Put one tab",
    ),
    "one column after blanks": ("\n\na\tb\n\nx\n", "line 5: got one column in 'x'"),
    "three columns": ("a\tb\na\tb\tc\n", "line 2: got 3 columns in 'a\\tb\\tc', expected source TAB target. Keep two"),
    "a long line": ("x" * 1000, "line 1: got one column in '" + "x" * 37 + "...'"),
    "no source": ("a\tb\n\tb\n", "line 2: the source is empty. Fill it or delete the line."),
    "no target": ("a\tb\nc\td\na\t\n", "line 3: the target is empty."),
    "a source of spaces": ("  \tb\n", "line 1: the source is empty."),
    "neither": ("a\tb\n\t\n", "line 2: both sides are empty."),
    "only blank lines": ("\n \n\n", "only blank lines, expected source TAB target on each line."),
    "one pair": ("a\tb\n", "got 1 pair(s) with one and the same source, expected at least 2 different sources"),
    "one source": ("a\tb\na\tc\n", "got 2 pair(s) with one and the same source"),
    "too long": (
        "a\tb\nc\t" + "d" * 513,
        "line 2: the target has 513 tokens, expected at most 512. Shorten it, or set longest=513.",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_bad_line_is_named(tmp_path: Path, case: str, end: str) -> None:
    content, says = BAD[case]
    with pytest.raises(DataError) as e:
        _data(tmp_path, content.replace("\n", end).encode())
    assert str(e.value).startswith(str(tmp_path / "pairs.tsv")) and says in str(e.value)
    assert "\n" not in str(e.value)


def test_longest_counts_tokens_and_can_be_raised(tmp_path: Path) -> None:
    lines = [("a", "b " * 300), ("c", "d")]  # 600 characters, 300 words
    assert _data(tmp_path, lines, level="word").max_target == 301
    assert _data(tmp_path, lines, longest=600).max_target == 601


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"data": ""}, "data: got ''"),
        ({"level": "sentence"}, "level: got 'sentence' .*, expected 'char' \\| 'word'"),
        ({"vocabulary": "both"}, "vocabulary: got 'both' .*, expected 'separate' \\| 'shared'"),
        ({"split": 1.5}, "split: got 1.5"),
        ({"longest": 0}, "longest: got 0"),
        ({"valid_pairs": 0}, "valid_pairs: got 0"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Pairs("a.tsv").but(**fields)
