"""What holds for the data of every task: batches are functions of seed and step, validation is fixed, padding right."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from brickformer.errors import SpecError
from brickformer.spec import Spec
from brickformer.tasks import IGNORE, Batch, Copy, Pairs, Reverse, Sort, Task, Text, pad
from brickformer.tasks.order import Order, spread

Make = Callable[[Path], Task]
TASKS: dict[str, Make] = {
    "reverse": lambda folder: Reverse(train=50, valid=20),
    "copy": lambda folder: Copy(train=50, valid=20, min_len=4, max_len=4),
    "sort": lambda folder: Sort(train=50, valid=20),
    "text": lambda folder: Text(_write(folder / "a.txt", "the quick brown fox\n" * 40), context=8, valid_windows=3),
    "pairs": lambda folder: Pairs(_write(folder / "a.tsv", _pairs()), split=0.8, valid_pairs=5),
    "words": lambda folder: Pairs(_write(folder / "a.tsv", _pairs()), level="word", vocabulary="shared"),
}


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    return TASKS[request.param](tmp_path)


def test_a_batch_is_a_function_of_seed_and_step(task: Task) -> None:
    """Asked in any order, of any object: a resumed run sees what it would have seen."""
    data, again = task.prepare(7), task.prepare(7)
    forwards = [data.batch(step, 16) for step in range(20)]
    for step in reversed(range(20)):
        _same(again.batch(step, 16), forwards[step])
        _same(data.batch(step, 16), forwards[step])
    _same(task.prepare(7).batch(19, 16), forwards[19])
    assert data.fingerprint == again.fingerprint


def test_another_seed_is_another_order(task: Task) -> None:
    one, two = task.prepare(0).batch(0, 16), task.prepare(1).batch(0, 16)
    assert one.inputs.shape != two.inputs.shape or not torch.equal(one.inputs, two.inputs)


def test_steps_differ(task: Task) -> None:
    data = task.prepare(0)
    assert len({str(data.batch(step, 16).inputs.tolist()) for step in range(10)}) == 10


def test_no_global_random_state_is_read_or_written(task: Task) -> None:
    def run(seed: int) -> tuple[list[Batch], list[object]]:
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        data = task.prepare(3)
        made = [data.batch(0, 4), data.batch(9, 4), *data.validation(4)]
        return made, [torch.rand(1).item(), np.random.rand(), random.random()]

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    untouched = [torch.rand(1).item(), np.random.rand(), random.random()]
    (one, after), (two, _) = run(1), run(2)
    assert after == untouched
    for a, b in zip(one, two, strict=True):
        _same(a, b)


def test_a_batch_has_the_promised_form(task: Task) -> None:
    data = task.prepare(0)
    for batch in [*(data.batch(step, 5) for step in range(8)), *data.validation(3), *data.validation(3, whole=True)]:
        assert batch.inputs.dtype == batch.targets.dtype == torch.long
        assert batch.inputs.shape == batch.targets.shape and batch.inputs.is_contiguous()
        assert batch.tokens == sum(t != IGNORE for row in batch.targets.tolist() for t in row) > 0
        assert batch.inputs.shape[1] <= data.max_target
        assert batch.inputs.min() >= 0 and batch.inputs.max() < data.target.vocab
        assert batch.targets[batch.targets != IGNORE].max() < data.target.vocab
        assert (batch.src is None) == (data.source is None)
        for ids, valid in ((batch.src, batch.src_valid), (batch.inputs, batch.valid)):
            if valid is not None:
                assert ids is not None and valid.shape == ids.shape and valid.dtype == torch.bool
                assert not valid.all(), "a mask although nothing is padded"
                assert valid[:, 0].all() and not (valid[:, 1:] & ~valid[:, :-1]).any(), "padding is on the right"
                assert valid.any(0).all(), "a column of nothing but padding"


def test_validation_is_the_same_in_batches_of_any_size(task: Task) -> None:
    data = task.prepare(0)
    for whole in (False, True):
        wanted = [row for batch in data.validation(1, whole=whole) for row in _rows(batch)]
        for size in (2, 3, 1000):
            got = [row for batch in data.validation(size, whole=whole) for row in _rows(batch)]
            assert got == wanted
            sizes = [len(batch.inputs) for batch in data.validation(size, whole=whole)]
            assert all(s == size for s in sizes[:-1]) and 0 < sizes[-1] <= size


def test_examples_are_the_validation_rows_as_text(task: Task) -> None:
    data = task.prepare(0)
    for whole in (False, True):
        examples = data.examples(whole=whole)
        if data.source is None:
            assert examples == []
            continue
        rows = [row for batch in data.validation(4, whole=whole) for row in _rows(batch)]
        assert [(data.source.decode(src), data.target.decode(targets)) for src, _, targets in rows] == examples


def test_batches_do_not_share_memory(task: Task) -> None:
    data = task.prepare(0)
    for make in (lambda: data.batch(0, 1), lambda: next(data.validation(1)), lambda: data.batch(2, 9)):
        first, second = make(), make()
        first.targets.fill_(-5)
        assert first.inputs.min() >= 0
        _same(make(), second)


def test_the_spec_round_trips_and_describes_itself(task: Task) -> None:
    assert Task.from_json(task.to_json()) == task
    assert (
        isinstance(task, Spec) and Task.from_json(task.to_json()).prepare(2).fingerprint == task.prepare(2).fingerprint
    )
    line = task.prepare(0).describe()
    assert line and "\n" not in line


def test_the_fingerprint_notices_a_change(tmp_path: Path) -> None:
    text = "the quick brown fox\n" * 40
    one = Text(_write(tmp_path / "a", text)).prepare(0)
    two = Text(_write(tmp_path / "b", text[:-2] + "t\n")).prepare(0)  # the same characters, one of them elsewhere
    assert one.target == two.target and one.fingerprint != two.fingerprint
    assert Reverse().prepare(0).fingerprint != Reverse().prepare(1).fingerprint


@pytest.mark.parametrize(("step", "size", "says"), [(-1, 4, "got step -1"), (0, 0, "got 0"), (0, -3, "got -3")])
def test_a_batch_that_cannot_be(task: Task, step: int, size: int, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        task.prepare(0).batch(step, size)


def test_an_empty_validation_batch_is_refused_at_once(task: Task) -> None:
    with pytest.raises(SpecError, match="batch size: got 0"):
        task.prepare(0).validation(0)


def test_a_negative_seed_is_refused(task: Task) -> None:
    with pytest.raises(SpecError, match="seed: got -1"):
        task.prepare(-1)


# ---- the parts


@pytest.mark.parametrize(("count", "stride", "slack"), [(1, 1, 0), (7, 1, 0), (5, 3, 4), (100, 64, 100)])
def test_order_is_one_shuffle_after_another(count: int, stride: int, slack: int) -> None:
    order = Order(3, count, stride=stride, slack=slack)
    epochs = [order.take(e * count, count).tolist() for e in range(30)]
    for items in epochs:
        shift = min(items)
        assert sorted(items) == [shift + stride * i for i in range(count)] and 0 <= shift <= slack
    assert count < 5 or len({str(items) for items in epochs}) == 30
    assert slack == 0 or len({min(items) for items in epochs}) > 1
    flat = [i for items in epochs for i in items]
    fresh = Order(3, count, stride=stride, slack=slack)
    for first, length in [(0, 1), (count - 1, 2), (5 * count - 1, 3 * count + 1), (2, 29 * count - 2)]:
        assert fresh.take(first, length).tolist() == flat[first : first + length]


def test_spread_is_even() -> None:
    for count in range(1, 40):
        for most in range(1, 45):
            chosen = spread(count, most).tolist()
            gaps = {b - a for a, b in pairwise(chosen)}
            assert len(chosen) == min(count, most) and chosen[0] == 0
            assert all(gap > 0 for gap in gaps) and (not gaps or max(gaps) - min(gaps) <= 1)
            assert most == 1 or chosen[-1] == count - 1


def test_pad_fills_on_the_right() -> None:
    assert pad([[1, 2, 3], [4], []], 9).tolist() == [[1, 2, 3], [4, 9, 9], [9, 9, 9]]
    assert pad([[1]], 0).dtype == torch.long
    with pytest.raises(ValueError, match="got no rows"):
        pad([], 0)


def test_a_batch_counts_its_targets_and_moves_whole() -> None:
    batch = Batch(
        torch.ones(2, 3).long(), torch.tensor([[1, 2, IGNORE], [3, IGNORE, IGNORE]]), valid=torch.ones(2, 3) > 0
    )
    assert batch.tokens == 3
    moved = batch.to("meta")
    assert moved.tokens == 3 and moved.inputs.is_meta and moved.targets.is_meta
    assert moved.valid is not None and moved.valid.is_meta and moved.src is None and moved.src_valid is None


def _rows(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """Every row without its padding: source, inputs, targets."""
    out = []
    for i in range(len(batch.inputs)):
        src = [] if batch.src is None else batch.src[i].tolist()
        inputs, targets = batch.inputs[i].tolist(), batch.targets[i].tolist()
        if batch.src_valid is not None:
            src = src[: int(batch.src_valid[i].sum())]
        if batch.valid is not None:
            length = int(batch.valid[i].sum())
            assert set(targets[length:]) <= {IGNORE}
            inputs, targets = inputs[:length], targets[:length]
        out.append((src, inputs, targets))
    return out


def _same(a: Batch, b: Batch) -> None:
    assert a.tokens == b.tokens
    for x, y in (
        (a.inputs, b.inputs),
        (a.targets, b.targets),
        (a.src, b.src),
        (a.src_valid, b.src_valid),
        (a.valid, b.valid),
    ):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert torch.equal(x, y)


def _write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def _pairs() -> str:
    draw = random.Random(0)
    words = "the a one cat dog bird sees hears likes".split()
    lines = [" ".join(draw.choices(words, k=draw.randint(1, 5))) for _ in range(60)]
    return "".join(f"{line}\t{' '.join(reversed(line.split()))}!\n" for line in lines)
