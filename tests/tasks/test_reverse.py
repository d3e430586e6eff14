"""Made-up digits: what is drawn, that nothing held out was trained on, and batches against plain loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from brickformer.errors import SpecError
from brickformer.tasks import BOS, EOS, IGNORE, PAD, Copy, Reverse, Seq2SeqData, Sort, Task, pad

ANSWERS: list[tuple[type[Task], Callable[[list[str]], list[str]]]] = [
    (Reverse, lambda s: s[::-1]),
    (Copy, lambda s: s),
    (Sort, sorted),
]


def _data(task: Task, seed: int) -> Seq2SeqData:
    data = task.prepare(seed)
    assert isinstance(data, Seq2SeqData)
    return data


@pytest.mark.parametrize("seed", range(10))
def test_held_out_sequences_are_new_and_different(seed: int) -> None:
    data = _data(Reverse(), seed)
    train = [source for source, _ in data.texts(data.train)]
    held_out = [source for source, _ in data.examples(whole=True)]
    assert len(train) == 1000 and len(held_out) == 500
    assert len(set(held_out)) == 500, "two of them are equal"
    assert not set(held_out) & set(train), "trained on"
    assert data.examples() == data.examples(whole=True)
    for drawn in (train, held_out):
        assert {len(s.split()) for s in drawn} == {3, 4, 5, 6}
        for place in range(6):
            assert {s.split()[place] for s in drawn if len(s.split()) > place} == set("0123456789")


def test_the_set_is_drawn_once() -> None:
    """Every training batch is made of the 1000 sequences, and an epoch shows each as often as it was drawn."""
    data = _data(Reverse(), 4)
    assert data.source is not None
    drawn = Counter(source for source, _ in data.texts(data.train))
    for epoch in range(3):
        seen: Counter[str] = Counter()
        for step in range(20):
            batch = data.batch(20 * epoch + step, 50)
            assert batch.src is not None
            seen.update(data.source.decode(row) for row in batch.src)
        assert seen == drawn


@pytest.mark.parametrize(("kind", "answer"), ANSWERS)
def test_batches_against_loops(kind: type[Task], answer: Callable[[list[str]], list[str]]) -> None:
    data = _data(kind(), 1)
    assert data.source is not None
    for batch in [*(data.batch(step, 7) for step in range(30)), *data.validation(64)]:
        assert batch.src is not None
        sources = [data.source.decode(row).split() for row in batch.src]
        digits = [[3 + int(d) for d in s] for s in sources]
        said = [[3 + int(d) for d in answer(s)] for s in sources]
        assert batch.src.tolist() == pad(digits, PAD).tolist()
        assert batch.inputs.tolist() == pad([[BOS, *s] for s in said], PAD).tolist()
        assert batch.targets.tolist() == pad([[*s, EOS] for s in said], IGNORE).tolist()
        even = len({len(s) for s in sources}) == 1
        assert (batch.src_valid is None) == even == (batch.valid is None)
        if batch.src_valid is not None and batch.valid is not None:
            assert batch.src_valid.sum(1).tolist() == [len(s) for s in sources]
            assert batch.valid.sum(1).tolist() == [len(s) + 1 for s in sources]


def test_sequences_of_one_length_need_no_mask() -> None:
    batch = Reverse(min_len=5, max_len=5).prepare(0).batch(0, 64)
    assert batch.src_valid is None and batch.valid is None and batch.inputs.shape == (64, 6)


def test_thirteen_tokens_for_both_sides_however_few_are_drawn() -> None:
    data = _data(Reverse(train=1, valid=1, min_len=1, max_len=1), 0)
    assert data.source == data.target and data.target.vocab == 13
    assert data.target.encode("0 1 2 3 4 5 6 7 8 9") == list(range(3, 13))
    assert _data(Reverse(min_len=7, max_len=12), 0).target == data.target, "a longer test set speaks the same tokens"
    assert (_data(Reverse(), 0).max_source, _data(Reverse(), 0).max_target) == (6, 7)


def test_every_unseen_sequence_can_be_held_out() -> None:
    data = _data(Reverse(train=1, valid=9, min_len=1, max_len=1), 0)
    rest = {source for source, _ in data.texts(data.train)} | {source for source, _ in data.examples()}
    assert rest == set("0123456789")


def test_too_few_sequences_left_to_hold_out() -> None:
    with pytest.raises(
        SpecError, match=r"sort.valid: got 10, expected at most 9: of the 10 .* 1 are in training. Lower"
    ):
        Sort(train=1, valid=10, min_len=1, max_len=1).prepare(0)
    with pytest.raises(SpecError, match="expected at most 0: of the 10 sequences of 1 to 1 digits 10 are in training"):
        Reverse(train=500, valid=1, min_len=1, max_len=1).prepare(0)


@pytest.mark.parametrize("kind", [Reverse, Copy, Sort])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"train": 0}, "train: got 0, expected 1 or more"),
        ({"valid": 0}, "valid: got 0, expected 1 or more"),
        ({"min_len": 0}, "min_len: got 0, expected 1 or more"),
        ({"max_len": 2}, "max_len: got 2, expected min_len \\(3\\) or more"),
        ({"kinds": 1}, "kinds: got 1, expected from 2 to 10"),
        ({"kinds": 11}, "kinds: got 11, expected from 2 to 10"),
        ({"train": "9"}, "train: got '9'"),
    ],
)
def test_settings_that_cannot_be(kind: type[Task], fields: dict[str, int], says: str) -> None:
    with pytest.raises(SpecError, match=f"{kind.kind}.{says}"):
        kind(**fields)


def test_fewer_kinds_of_digits_repeat_more() -> None:
    """With k kinds at least, k .. 10 evenly: of six digits so many different ones, against the formula."""
    data = _data(Reverse(train=20_000, min_len=6, max_len=6, kinds=2), 0)
    train = [source.split() for source, _ in data.texts(data.train)]
    expected = sum(k * (1 - (1 - 1 / k) ** 6) for k in range(2, 11)) / 9
    got = sum(len(set(digits)) for digits in train) / len(train)
    assert abs(got - expected) < 0.05, (got, expected)
    assert Counter(d for digits in train for d in digits).keys() == set("0123456789")
    assert any(len(set(digits)) == 2 for digits in train)


def test_the_drawn_sequences_stay_what_they_are() -> None:
    """Golden: published figures are of these sequences. If this changes, every figure is to be measured again."""
    data = _data(Reverse(), 0)
    train, held_out = data.texts(data.train[:3]), data.examples()[:3]
    assert [source for source, _ in train] == ["1 0 7 0 9", "4 9 0 8 0 5", "5 6 6 9 1 7"]
    assert [source for source, _ in held_out] == ["1 3 2 6", "5 1 8 0 8 1", "8 9 6"]
