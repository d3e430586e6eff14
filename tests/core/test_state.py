"""State: a cache must hand back exactly the keys a query may see, whatever the chunks, the padding and the window.

Keys carry their own name (row, number of the token) as content, so what a query sees is a set of names that is compared
with a plain list of everything that was ever written.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from brickformer.errors import StateError
from brickformer.mask import EMPTY, Mask, Span
from brickformer.state import KV, CrossKV, LayerState, RingKV, StackState, State

CPU = torch.device("cpu")
ROWS, HEADS, WIDTH = 2, 2, 3


def kv(max_len: int) -> KV:
    return KV(ROWS, HEADS, max_len, WIDTH, device=CPU, dtype=torch.float64)


def ring(window: int) -> RingKV:
    return RingKV(ROWS, HEADS, window, WIDTH, device=CPU, dtype=torch.float64)


def named(start: int, length: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Keys that say `row·1000 + slot` in head 0 and minus that in head 1; values say the double."""
    name = (torch.arange(rows)[:, None] * 1000 + torch.arange(start, start + length)[None]).double()
    key = torch.stack([name, -name], 1)[..., None].expand(rows, 2, length, WIDTH).contiguous()
    return key, key * 2


def seen(mask: Mask, query: int, row: int, k: Tensor, v: Tensor, k_at: Span) -> list[int]:
    """The names a query at position `query` sees in a row, in the order of their positions."""
    where = k_at.positions(CPU)
    where = where[row if len(where) > 1 else 0]
    assert len(where) == k.shape[2] == v.shape[2] == k_at.length
    sees = mask.allowed(torch.tensor(query), where)
    pairs = sorted((int(p), int(n)) for p, n in zip(where[sees], k[row, 0, sees, 0], strict=True))
    assert torch.equal(k[row, 0], -k[row, 1]) and torch.equal(v[row, 0], k[row, 0] * 2), "heads or values mixed up"
    return [name for _, name in pairs]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[int, list[list[list[bool]]]]:
    """A window, and chunks of tokens with their padding: chunks[i][row][token] is True where it is real."""
    window = draw(st.integers(1, 5))
    padded = draw(st.booleans())
    chunks = []
    for length in draw(st.lists(st.integers(1, 7), min_size=1, max_size=9)):
        row = st.lists(st.booleans() if padded else st.just(True), min_size=length, max_size=length)
        chunks.append([draw(row) for _ in range(ROWS)])
    return window, chunks


@given(conversations())
@example((3, [[[True] * 6, [True] * 3 + [False] * 3], *[[[True], [True]]] * 4]))  # a right-padded prompt
@example((2, [[[True] * 7, [False] * 6 + [True]], *[[[True], [True]]] * 6]))  # a left-padded one
@example((1, [[[True], [True]]] * 9))
def test_ring_and_full_cache_show_a_query_what_it_may_see(case: tuple[int, list[list[list[bool]]]]) -> None:
    """RingKV and KV, told the same, against a list of everything written."""
    window, chunks = case
    mask, total = Mask(window=window), sum(len(chunk[0]) for chunk in chunks)
    stores: list[KV] = [kv(total), ring(window)]
    padded = not all(all(row) for chunk in chunks for row in chunk)
    written: list[list[tuple[int, int]]] = [[] for _ in range(ROWS)]  # (position, name) of real tokens
    start = 0
    for chunk in chunks:
        length = len(chunk[0])
        pos = torch.full((ROWS, length), EMPTY)
        for r, t in ((r, t) for r in range(ROWS) for t in range(length) if chunk[r][t]):
            pos[r, t] = len(written[r])
            written[r].append((len(written[r]), r * 1000 + start + t))
        at = Span(start, length, pos if padded else None)
        for store in stores:
            k, v, k_at = store.append(*named(start, length), at)
            for r, t in ((r, t) for r in range(ROWS) for t in range(length) if chunk[r][t]):
                query = int(pos[r, t])
                expected = [name for p, name in written[r] if query - window < p <= query]
                got = seen(mask, query, r, k, v, k_at)
                assert got == expected, f"{type(store).__name__}, row {r}, position {query}: sees {got}, not {expected}"
        start += length
    assert stores[1].k.shape[2] == 2 * window, "a ring grew"


def test_unpadded_caches_promise_plain_positions() -> None:
    """While nothing is padded, the span says so: that is what lets kernels go without a mask."""
    for store in (kv(12), ring(3)):
        for start, length in ((0, 4), (4, 1), (5, 1), (6, 5), (11, 1)):
            k, _, at = store.append(*named(start, length), Span(start, length))
            assert at.pos is None and at.end == start + length
            assert k[0, 0, :, 0].tolist() == list(range(at.start, at.end))


def test_padding_after_plain_tokens_writes_down_all_positions() -> None:
    store = kv(6)
    store.append(*named(0, 2), Span(0, 2))
    _, _, at = store.append(*named(2, 2), Span(2, 2, torch.tensor([[2, 3], [EMPTY, 2]])))
    assert at.pos is not None and at.pos.tolist() == [[0, 1, 2, 3], [0, 1, EMPTY, 2]]
    _, _, at = store.append(*named(4, 1), Span(4, 1, torch.tensor([[4], [3]])))
    assert at.pos is not None and at.pos.tolist() == [[0, 1, 2, 3, 4], [0, 1, EMPTY, 2, 3]]


@pytest.mark.parametrize("make", [lambda: kv(9), lambda: ring(2)], ids=["KV", "RingKV"])
def test_select_and_clone(make: object) -> None:
    store: KV = make()  # type: ignore[operator]
    store.append(*named(0, 3), Span(0, 3, torch.tensor([[0, 1, 2], [EMPTY, 0, 1]])))
    twin = store.clone()
    assert type(twin) is type(store) and twin.nbytes == store.nbytes > 0
    twin.select(torch.tensor([1, 1, 0]))
    k, v, at = twin.append(*named(3, 1, rows=3), Span(3, 1, torch.tensor([[2], [2], [3]])))
    assert seen(Mask(window=2), 2, 0, k, v, at) == [1002, 3] and seen(Mask(window=2), 3, 2, k, v, at) == [2, 2003]
    k, v, at = store.append(*named(3, 1), Span(3, 1, torch.tensor([[3], [2]])))
    assert seen(Mask(window=2), 3, 0, k, v, at) == [2, 3] and seen(Mask(window=2), 2, 1, k, v, at) == [1002, 1003]


@pytest.mark.parametrize("make", [lambda: kv(900), lambda: ring(450)], ids=["KV", "RingKV"])
def test_only_slots_that_hold_a_token_follow_their_rows(make: object) -> None:
    """Beams move at every step: the room that is still free must not be copied each time."""

    class Moved(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and "empty" not in str(func) and out.ndim == 4:
                self.most = max(self.most, out.shape[2])
            return out

    store: KV = make()  # type: ignore[operator]
    store.append(*named(0, 3), Span(0, 3))
    with Moved() as moved:
        store.select(torch.tensor([1, 0, 1]))
    assert moved.most == 3
    k, _, _ = store.append(*named(3, 1, rows=3), Span(3, 1))
    assert k[:, 0, :, 0].tolist() == [[1000, 1001, 1002, 3], [0, 1, 2, 1003], [1000, 1001, 1002, 2003]]


def test_a_ring_that_cannot_rewind_says_so_and_stays_as_it_was() -> None:
    store = ring(3)
    for i in range(8):
        store.append(*named(i, 1), Span(i, 1))
    store.rewind(7)
    with pytest.raises(StateError, match=r"RingKV cannot rewind to slot 2: .* Clone the state"):
        store.rewind(2)
    k, v, at = store.append(*named(7, 1), Span(7, 1))
    assert seen(Mask(window=3), 7, 0, k, v, at) == [5, 6, 7]
    with pytest.raises(StateError, match="has let go of slots below"):
        store.append(*named(0, 1), Span(0, 1))


@pytest.mark.parametrize(
    ("shape", "at", "says"),
    [
        ((2, 2, 5, 3), Span(0, 5), r"KV holds 4 tokens; asked to store token 5. Raise max_len in init_state\(\)"),
        ((2, 2, 1, 3), Span(4, 1), r"KV holds 4 tokens; asked to store token 5"),
        ((3, 2, 1, 3), Span(0, 1), r"KV holds 2 rows; got 3. Make the state with init_state\(3, ...\)"),
        ((2, 1, 1, 3), Span(0, 1), r"KV holds 2 heads of width 3; got 1 of 3. The state belongs to another layer"),
        ((2, 2, 1, 4), Span(0, 1), r"KV holds 2 heads of width 3; got 2 of 4"),
        ((2, 2, 1, 3), Span(0, 1, None, torch.zeros(2, 1, dtype=torch.long)), "cannot keep packed documents apart"),
    ],
)
def test_a_cache_refuses_what_is_not_its_own(shape: tuple[int, ...], at: Span, says: str) -> None:
    store = kv(4)
    with pytest.raises(StateError, match=says):
        store.append(torch.zeros(shape).double(), torch.zeros(shape).double(), at)
    assert store.k.abs().sum() == 0 and store.exact


# ---- cross-attention's memory ---------------------------------------------------------------------------------------


def test_cross_memory_is_put_once_and_follows_its_rows() -> None:
    store = CrossKV()
    assert store.get(2) is None and store.nbytes == 0
    store.select(torch.tensor([0]))
    k, v = named(0, 3)
    store.put(k, v, Span(0, 3, torch.tensor([[0, 1, 2], [0, 1, EMPTY]])))
    twin = store.clone()
    assert store.nbytes == k.nbytes + v.nbytes
    store.select(torch.tensor([1, 1, 0]))
    got = store.get(3)
    assert got is not None and got[2].pos is not None
    assert torch.equal(got[0], k[[1, 1, 0]]) and torch.equal(got[1], v[[1, 1, 0]])
    assert got[2].pos.tolist() == [[0, 1, EMPTY], [0, 1, EMPTY], [0, 1, 2]]
    kept = twin.get(2)
    assert kept is not None and torch.equal(kept[0], k)
    with pytest.raises(StateError, match="CrossKV holds the memory of 3 rows; asked for 2. Select its rows first"):
        store.get(2)
    store.rewind(0)
    assert store.get(3) is not None


# ---- the clock ------------------------------------------------------------------------------------------------------


def stack_state() -> StackState:
    return StackState([LayerState(kv(9)), LayerState(kv(9), CrossKV())])


def test_the_clock_counts_slots_and_each_row_goes_on_from_its_own_token() -> None:
    state = stack_state()
    assert (state.next(3).start, state.next(3).length, state.next(3).pos) == (0, 3, None)
    state.advance(Span(0, 3))
    assert state.length == 3 and state.next(1).pos is None
    state.advance(Span(3, 3, torch.tensor([[3, 4, 5], [EMPTY, 3, EMPTY]])))
    here = state.next(2)
    assert (state.length, here.start, here.end) == (6, 6, 8)
    assert here.pos is not None and here.pos.tolist() == [[6, 7], [4, 5]]
    state.advance(here)
    state.advance(Span(8, 1, torch.tensor([[8], [EMPTY]])))
    after = state.next(1)
    assert after.pos is not None and after.pos.tolist() == [[9], [6]]


def test_a_row_of_padding_only_starts_at_zero() -> None:
    state = stack_state()
    state.advance(Span.of(torch.zeros(2, 3), valid=torch.tensor([[True] * 3, [False] * 3])))
    here = state.next(1)
    assert here.pos is not None and here.pos.tolist() == [[3], [0]]


def test_a_call_that_does_not_follow_on_is_refused() -> None:
    state = stack_state()
    state.advance(Span(0, 3))
    state.check_next(Span(3, 1))
    for start in (0, 2, 4):
        with pytest.raises(
            StateError, match=rf"has 3 slots written; the call starts at slot {start}. Use at=state.next"
        ):
            state.check_next(Span(start, 1))
    state.advance(Span(3, 1, torch.tensor([[3], [EMPTY]])))
    state.check_next(state.next(1))
    with pytest.raises(StateError, match="holds padded rows; the call claims there is no padding"):
        state.check_next(Span(4, 1))


def test_select_clone_and_rewind_reach_every_part() -> None:
    state = stack_state()
    cross = state.layers[1].cross
    assert cross is not None
    cross.put(*named(0, 2), Span(0, 2))
    state.advance(Span(0, 3, torch.tensor([[0, 1, 2], [EMPTY, EMPTY, 0]])))
    parts = [part for layer in state.layers for part in layer.parts()]
    assert state.padding is not None
    assert len(parts) == 3 and state.nbytes == sum(part.nbytes for part in parts) + state.padding.nbytes
    twin = state.clone()
    twin.select(torch.tensor([1]))
    assert [s.mixer.k.shape[0] for s in twin.layers if isinstance(s.mixer, KV)] == [1, 1]
    assert twin.layers[1].cross is not None and twin.layers[1].cross.get(1) is not None
    assert twin.padding is not None and twin.padding.tolist() == [[2]]
    assert state.padding is not None and state.padding.tolist() == [[0], [2]]
    twin.advance(twin.next(1))
    assert (twin.length, state.length) == (4, 3)
    twin.rewind(3)
    assert twin.length == 3
    twin.rewind(0)
    assert twin.length == 0 and twin.padding is None and state.padding is not None
    for to in (-1, 4):
        with pytest.raises(StateError, match=rf"rewind\({to}\): the state has 3 slots; give a slot from 0 to 3"):
            state.rewind(to)


class Recurrent(State):
    """A state that cannot go back."""

    def select(self, rows: Tensor) -> None: ...

    def clone(self) -> Recurrent:
        return self

    def rewind(self, to: int) -> None:
        raise StateError("Recurrent: cannot rewind")

    @property
    def nbytes(self) -> int:
        return 0


def test_a_part_that_cannot_rewind_leaves_the_clock_alone() -> None:
    state = StackState([LayerState(kv(9)), LayerState(Recurrent())])
    state.advance(Span(0, 3))
    with pytest.raises(StateError, match="cannot rewind"):
        state.rewind(1)
    assert state.length == 3
