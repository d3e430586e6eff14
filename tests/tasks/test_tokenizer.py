"""Tokenizers: round trips, what a person reads when a text holds something unknown, and a strict JSON form."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brickformer.errors import DataError
from brickformer.tasks import (
    BOS,
    EOS,
    IGNORE,
    PAD,
    CharTokenizer,
    Tokenizer,
    WordTokenizer,
    dump_tokenizers,
    load_tokenizers,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@given(TEXT, st.booleans())
def test_characters_come_back_and_ids_are_ranks(text: str, specials: bool) -> None:
    tokenizer = CharTokenizer.of(text, specials=specials)
    first = 3 if specials else 0
    ranks = [first + sum(other < c for other in set(text)) for c in text]  # counted, not looked up
    assert tokenizer.encode(text) == ranks
    assert tokenizer.decode(ranks) == text
    assert tokenizer.vocab == first + len(set(text))


@given(TEXT.filter(lambda text: text.split()), st.booleans())
def test_words_come_back_with_single_spaces(text: str, specials: bool) -> None:
    tokenizer = WordTokenizer.of(text, specials=specials)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == " ".join(text.split())
    assert [tokenizer.token(i) for i in ids] == text.split()
    assert sorted(set(ids)) == list(range(3 if specials else 0, tokenizer.vocab))


def test_special_ids_are_skipped_and_shown_but_never_written() -> None:
    tokenizer = CharTokenizer.of("<pad>bos", specials=True)
    ids = tokenizer.encode("<bos><pad>")
    assert not {PAD, BOS, EOS} & set(ids)
    assert tokenizer.decode([BOS, *ids, EOS, PAD, PAD]) == "<bos><pad>"
    assert [tokenizer.token(i) for i in (PAD, BOS, EOS)] == ["<pad>", "<bos>", "<eos>"]
    assert (tokenizer.bos, tokenizer.eos) == (BOS, EOS)
    plain = CharTokenizer.of("ab")
    assert (plain.bos, plain.eos, plain.vocab) == (None, None, 2)
    assert plain.decode([0, 1]) == "ab"  # without special ids, 0 and 1 are text


def test_decode_reads_a_tensor() -> None:
    assert CharTokenizer.of("abc").decode(torch.tensor([2, 0, 1])) == "cab"


@pytest.mark.parametrize("bad", [-1, 5, IGNORE])
@pytest.mark.parametrize("specials", [False, True])
def test_an_id_of_another_vocabulary_is_refused(bad: int, specials: bool) -> None:
    tokenizer = CharTokenizer.of("ab" if specials else "abcde", specials=specials)
    with pytest.raises(DataError, match=f"got id {bad}, expected 0 to 4"):
        tokenizer.decode([3, bad])


def test_a_combining_mark_is_a_character_of_its_own() -> None:
    apart, composed = "e\u0301", "\u00e9"
    tokenizer = CharTokenizer.of(apart + composed)
    assert tokenizer.encode(apart) == [0, 2]
    assert tokenizer.encode(composed) == [1]
    assert tokenizer.decode([0, 2]) == apart != composed


@pytest.mark.parametrize(
    ("known", "text", "says"),
    [
        ("abc", "abXc", ["text, character 3: got 'X' (U+0058 LATIN CAPITAL LETTER X)", "3 known", "known: 'abc'."]),
        ("abc", "aB", ["character 2: got 'B'", "the nearest is 'b'."]),
        ("ABC", "Ab", ["the nearest is 'B'."]),
        ("it's", "it\u2019s", ["got '\u2019' (U+2019 RIGHT SINGLE QUOTATION MARK)", 'the nearest is "\'".']),
        ("0123", "0\uff13", ["U+FF13 FULLWIDTH DIGIT THREE", "the nearest is '3'."]),
        ("cafe", "caf\u00e9", ["U+00E9", "the nearest is 'e'."]),
        ("cafe\u0301", "caf\u00e9", ["character 4", "accent as a character of its own (NFD): 'e\\u0301'."]),
        (
            "caf\u00e9e",
            "cafe\u0301",
            ["character 5: got '\\u0301' (U+0301", "of its own", "write '\u00e9' as one (NFC)."],
        ),
        (
            "cafe",
            "e\u0301",
            ["character 2: got '\\u0301'", "a combining mark is a character of its own: leave it out."],
        ),
        ("ab", "a\nb", ["line 1, column 2: got '\\n' (U+000A)"]),
        ("ab\n", "ab\nba\nbaXa", ["line 3, column 3: got 'X'"]),
        ("ab", "a\udcff", ["character 2: got '\\udcff' (U+DCFF)"]),
        ("ab", "\x00", ["character 1: got '\\x00' (U+0000)"]),
        ("".join(map(chr, range(0x4E00, 0x4F00))), "x", ["256 known characters", "and 216 more."]),
    ],
)
def test_an_unseen_character_is_named_placed_and_helped(known: str, text: str, says: list[str]) -> None:
    with pytest.raises(DataError) as e:
        CharTokenizer.of(known).encode(text)
    for part in says:
        assert part in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("known", "text", "says"),
    [
        ("0 1 4 7", "7 x 4", ["line, word 2: got 'x'", "4 known words", "known: '0 1 4 7'."]),
        ("0 1 4 7", "714", ["word 1: got '714'", "write its parts with spaces between them: '7 1 4'."]),
        ("The cat sat", "the cat", ["word 1: got 'the'", "the nearest is 'The'."]),
        ("kitchen garden", "gardne", ["the nearest is 'garden'."]),
        (" ".join(f"w{i:03}" for i in range(60)), "?", ["and 20 more."]),
    ],
)
def test_an_unseen_word_is_named_placed_and_helped(known: str, text: str, says: list[str]) -> None:
    with pytest.raises(DataError) as e:
        WordTokenizer.of(known).encode(text, where="line")
    for part in says:
        assert part in str(e.value)


PLAIN = CharTokenizer.of("ab\n\"\\é\u0301\U0001f600 '")
SPECIAL = CharTokenizer.of("xyz", specials=True)
WORDS = WordTokenizer.of("zwei Wörter", specials=True)


@pytest.mark.parametrize(("source", "target"), [(None, PLAIN), (SPECIAL, WORDS), (WORDS, SPECIAL), (WORDS, WORDS)])
def test_the_file_round_trips(source: Tokenizer | None, target: Tokenizer) -> None:
    text = dump_tokenizers(source, target)
    assert load_tokenizers(text) == (source, target)
    assert dump_tokenizers(*load_tokenizers(text)) == text
    assert text.encode().decode() == text  # can be written as UTF-8


def test_tokenizers_differ_in_kind_specials_and_order() -> None:
    same = CharTokenizer("ab", specials=True)
    others = [
        CharTokenizer("ab", specials=False),
        CharTokenizer("ba", specials=True),
        WordTokenizer("ab", specials=True),
    ]
    assert same == CharTokenizer("ab", specials=True) and hash(same) == hash(CharTokenizer("ab", specials=True))
    assert all(same != other for other in others)


def test_a_file_cut_off_anywhere_is_refused() -> None:
    text = dump_tokenizers(SPECIAL, PLAIN).rstrip()
    for end in range(len(text)):
        with pytest.raises(DataError, match="runs/7/tokenizer.json: not whole JSON: .* cut off or damaged"):
            load_tokenizers(text[:end], "runs/7/tokenizer.json")


GOOD = {"kind": "char", "specials": True, "tokens": ["a", "b"]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "chars"}, "target.kind: got 'chars', expected a tokenizer; did you mean 'char'?"),
        ({"kind": None}, "target.kind: got None"),
        ({"kind": ["char"]}, "target.kind: got ['char']"),
        ({"specials": 1}, "target.specials: got 1, expected true or false."),
        ({"tokens": "ab"}, "target.tokens: got 'ab', expected a list of texts."),
        ({"tokens": ["a", 1]}, "target.tokens: got ['a', 1]"),
        ({"tokens": []}, "target: char tokenizer: got no characters, expected at least one."),
        ({"tokens": ["a", "b", "a"]}, "target: char tokenizer: 'a' is listed twice."),
        ({"tokens": ["a", "bc"]}, "target: char tokenizer: got 'bc', expected one character."),
        ({"tokens": ["a", ""]}, "got '', expected one character."),
        ({"tokens": ["\ud800"]}, "got '\\ud800', expected one character."),
        ({"kind": "word", "tokens": ["a b"]}, "target: word tokenizer: got 'a b', expected one word."),
        ({"token": []}, "target.token: a tokenizer has no such field; did you mean 'tokens'?"),
    ],
)
def test_a_file_that_says_something_else_is_refused(change: dict[str, Any], says: str) -> None:
    text = json.dumps({"source": None, "target": GOOD | change})
    with pytest.raises(DataError) as e:
        load_tokenizers(text, "t.json")
    assert str(e.value).startswith("t.json: ") and says in str(e.value)


@pytest.mark.parametrize("text", ["[]", "3", '{"target": null}', json.dumps({"source": None, "target": GOOD, "x": 1})])
def test_a_file_of_another_shape_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="expected an object with source and target"):
        load_tokenizers(text)


@pytest.mark.parametrize("missing", ["kind", "specials", "tokens"])
def test_a_missing_field_is_named(missing: str) -> None:
    data = {name: value for name, value in GOOD.items() if name != missing}
    with pytest.raises(DataError, match=f"tokenizer.{missing}: got None"):
        Tokenizer.from_json(data)


@pytest.mark.parametrize("data", [None, [], "char"])
def test_a_tokenizer_is_an_object(data: object) -> None:
    with pytest.raises(DataError, match="expected an object with kind, specials and tokens"):
        Tokenizer.from_json(data)


def test_brackets_without_end_are_refused() -> None:
    with pytest.raises(DataError, match="JSON"):
        load_tokenizers("[" * 200_000)
