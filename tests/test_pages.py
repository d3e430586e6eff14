"""Large pages, by what Linux says of this process."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from brickformer import pages
from brickformer.pages import LARGE, enlarge, large_pages


def in_large_pages() -> int:
    """Bytes of this process that are in large pages."""
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.fixture
def collapsing() -> None:
    """Skips where the system has no large pages to give, or too few: they are a favour that any machine may refuse."""
    try:
        with mmap.mmap(-1, 96 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.write(bytes(len(memory)))
            memory.madvise(25)  # MADV_COLLAPSE
    except (OSError, AttributeError) as e:
        pytest.skip(f"this system makes no small pages large: {e}")


def small(mb: int) -> torch.Tensor:
    """Memory in small pages: what malloc gives, never more than the system's default does by itself."""
    return torch.arange(mb << 18, dtype=torch.float32)


@pytest.mark.usefixtures("collapsing")
def test_tensors_get_large_pages_and_keep_what_they_hold() -> None:
    empty = in_large_pages()
    tensors = [small(32), small(32)]
    before, sums = in_large_pages(), [t.double().sum() for t in tensors]
    if before - empty >= 32 << 20:
        pytest.skip("this system gives large pages by itself")
    enlarge([*tensors, tensors[0].view(2, -1), tensors[1][5:]])
    assert in_large_pages() - before >= 32 << 20  # of 64: the system may refuse some
    assert [t.double().sum() for t in tensors] == sums


@pytest.mark.usefixtures("collapsing")
def test_small_tensors_side_by_side_share_large_pages() -> None:
    empty = in_large_pages()
    memory = mmap.mmap(-1, 48 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    each = (48 << 20) // 40 // 4  # numbers of 1.2 MB: no tensor is as large as a page, all in one piece of memory
    tensors = [torch.frombuffer(memory, dtype=torch.float32, count=each, offset=4 * each * i) for i in range(40)]
    for tensor in tensors:
        tensor.fill_(1.0)
    before = in_large_pages()
    if before - empty >= 24 << 20:
        pytest.skip("this system gives large pages by itself")
    enlarge(tensors)
    assert in_large_pages() - before >= 24 << 20
    assert all(bool((t == 1).all()) for t in tensors)


@pytest.mark.usefixtures("collapsing")
def test_what_is_mapped_inside_gets_large_pages() -> None:
    outside = small(32)
    before = in_large_pages()
    with large_pages():
        inside = small(64)
    gained = in_large_pages() - before
    assert 32 << 20 <= gained <= 68 << 20  # 64 of the 96
    assert torch.equal(inside, small(64))
    assert torch.equal(outside, small(32))


def test_an_error_inside_comes_out() -> None:
    with pytest.raises(KeyError), large_pages():
        raise KeyError


def test_nothing_to_do() -> None:
    square = torch.eye(3)
    enlarge([])
    enlarge([torch.empty(0), square, square.to_sparse(), square.to_mkldnn(), torch.empty(9, device="meta")])


class Stands(torch.Tensor):
    """A tensor that stands for others and has no memory, as those of torchao have none."""

    @staticmethod
    def __new__(cls) -> Stands:
        made: Stands = torch.Tensor._make_wrapper_subclass(cls, (3, 3))  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object) -> object:
        raise AssertionError(f"{func}: nothing is computed here")


def test_tensors_without_memory_hinder_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[pages.Range] = []
    monkeypatch.setattr(pages, "_collapse", asked.extend)
    beside = small(4)
    enlarge([Stands(), torch.nn.UninitializedParameter(), beside, Stands()])
    assert asked == [(beside.data_ptr(), beside.data_ptr() + (4 << 20))]


def test_a_system_that_does_not_say_where_memory_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for maps in (tmp_path / "hidden", tmp_path):  # not there, and not to be read
        monkeypatch.setattr(pages, "MAPS", maps)
        with large_pages():
            made = small(4)
        assert torch.equal(made, small(4))


def test_names_of_mapped_files_in_any_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = b"7f0000000000-7f0000400000 rw-p 00000000 00:00 0 \n"
    (tmp_path / "maps").write_bytes(b"5500-5600 rw-p 00000000 08:01 9 /tmp/caf\xe9.bin\n" + own)
    monkeypatch.setattr(pages, "MAPS", tmp_path / "maps")
    monkeypatch.setattr(pages.sys, "platform", "linux")
    assert list(pages._private()) == [(0x7F0000000000, 0x7F0000400000)]


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.sys, "platform", "darwin")
    monkeypatch.setattr(pages, "MAPS", Path("nowhere"))
    monkeypatch.setattr(pages.ctypes, "CDLL", None)
    with large_pages():
        enlarge([torch.ones(LARGE)])


@pytest.mark.parametrize(
    ("after", "new"),
    [
        ([(0, 10)], [(0, 10)]),
        ([(20, 30)], []),
        ([(15, 35)], [(15, 20), (30, 35)]),
        ([(25, 45)], [(30, 40)]),
        ([(0, 100)], [(0, 20), (30, 40), (50, 100)]),
        ([(20, 31), (39, 52)], [(30, 31), (39, 40), (50, 52)]),
    ],
)
def test_new_ranges(after: list[pages.Range], new: list[pages.Range]) -> None:
    assert list(pages._new(after, [(20, 30), (40, 50)])) == new
