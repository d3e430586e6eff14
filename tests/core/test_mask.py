"""Masks: every lowering is compared, cell by cell, with the definition written as a loop over plain integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any, assert_never

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from brickformer.errors import SpecError, StateError
from brickformer.mask import CAUSAL, EMPTY, FULL, Block, Dense, Everything, IsCausal, Lowered, Mask, Span, lower

CPU = torch.device("cpu")
MASKS = [Mask(causal, window) for causal in (True, False) for window in (None, 1, 2, 3, 7, 50)]
ROWS = 3


# ---- the definition, once more, by hand -----------------------------------------------------------------------------


def by_hand(mask: Mask, q: Span, k: Span) -> Tensor:
    """(B, T, S), by loops over Python ints; written from the words of the definition, not from the code."""
    rows = max([len(t) for t in (q.pos, k.pos, q.doc, k.doc) if t is not None], default=1)
    out = torch.zeros(rows, q.length, k.length, dtype=torch.bool)
    for b, i, j in product(range(rows), range(q.length), range(k.length)):
        at_q, at_k = _place(q, b, i), _place(k, b, j)
        sees = at_k != EMPTY
        if mask.causal and at_k > at_q:
            sees = False
        if mask.window is not None and abs(at_q - at_k) >= mask.window and (at_k <= at_q or not mask.causal):
            sees = False
        if q.doc is not None and k.doc is not None and q.doc[b, i].item() != k.doc[b, j].item():
            sees = False
        out[b, i, j] = sees
    return out


def _place(at: Span, row: int, token: int) -> int:
    return at.start + token if at.pos is None else int(at.pos[row if len(at.pos) > 1 else 0, token])


def as_map(lowered: Lowered, rows: int, tokens: int, keys: int) -> Tensor:
    """What a kernel that is told this would let through, (B, T, S)."""
    match lowered:
        case Everything(last=None):
            return torch.ones(rows, tokens, keys, dtype=torch.bool)
        case Everything(last=last):
            assert 0 < last <= keys
            return (torch.arange(keys) >= keys - last).expand(rows, tokens, keys)
        case IsCausal():
            return (torch.arange(keys) <= torch.arange(tokens)[:, None]).expand(rows, tokens, keys)
        case Dense(allowed=allowed):
            assert allowed.dtype is torch.bool and allowed.ndim == 4
            return allowed[:, 0].expand(rows, tokens, keys)
        case Block(block_mask=made):
            out = torch.zeros(rows, tokens, keys, dtype=torch.bool)
            for b, i, j in product(range(rows), range(tokens), range(keys)):
                out[b, i, j] = made.mask_mod(torch.tensor(b), torch.tensor(0), torch.tensor(i), torch.tensor(j))
            assert made.kv_num_blocks.shape[0] in (1, rows)
            return out
        case other:
            assert_never(other)


# ---- the cases ------------------------------------------------------------------------------------------------------


def _valid(*rows: str) -> Tensor:
    return torch.tensor([[c == "x" for c in row] for row in rows])


def _spans() -> Iterator[tuple[str, Span, Span]]:
    """Queries and keys as models meet them: training, chunks, decoding, caches, rings, padding, packing."""
    for tokens in (1, 2, 7):
        yield f"whole-{tokens}", Span(0, tokens), Span(0, tokens)
    for start, tokens in ((3, 4), (6, 1), (4, 2)):
        yield f"chunk-{start}+{tokens}", Span(start, tokens), Span(0, start + tokens)
    for first, start, tokens in ((3, 6, 1), (2, 4, 3), (5, 5, 2)):
        yield f"ring-from-{first}-at-{start}+{tokens}", Span(start, tokens), Span(first, start + tokens - first)
    yield "apart", Span(0, 3), Span(5, 4)
    yield "behind", Span(9, 3), Span(0, 4)
    yield "moved", Span(5, 4), Span(5, 4)
    yield "cross", Span(2, 3), Span(0, 6)
    ids = torch.zeros(ROWS, 7, dtype=torch.long)
    sides = {
        "left": _valid("xxxxxxx", "..xxxxx", "......x"),
        "right": _valid("xxxxxxx", "xxxxx..", "x......"),
        "middle": _valid("xx..xxx", "x.x.x.x", "xxxxxxx"),
        "nothing": _valid("xxxxxxx", ".......", ".xxxxx."),
        "one-row": _valid("..xxxx."),
    }
    for side, valid in sides.items():
        at = Span.of(ids[: len(valid)], valid=valid)
        assert at.pos is not None
        yield f"{side}-whole", at, at
        yield f"{side}-last", Span(6, 1, at.pos[:, 6:]), at
        yield f"{side}-chunk", Span(4, 3, at.pos[:, 4:]), at
        yield f"{side}-keys", Span(2, 3), at
        yield f"{side}-queries", at, Span(0, 7)
        yield f"{side}-after", Span(7, 2, torch.tensor([[7, 8]]) - (~valid).sum(1, keepdim=True)), at
        ring = torch.cat([at.pos[:, 4:], torch.full((len(valid), 3), EMPTY)], 1)
        yield f"{side}-ring-with-holes", Span(4, 3, at.pos[:, 4:]), Span(4, 6, ring)
    doc = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [5, 5, 5, 5, 5, 5, 5], [2, 1, 1, 1, 0, 0, 0]])
    packed = Span.of(ids, doc=doc)
    yield "packed", packed, packed
    both = Span.of(ids, doc=doc, valid=sides["left"])
    yield "packed-and-padded", both, both
    yield "packed-pairs", packed, Span.of(ids[:, :5], doc=doc[:, 2:])
    yield "packed-in-place", Span(0, 7, None, doc), Span(0, 7, None, doc)


CASES = list(_spans())


@pytest.mark.parametrize("flex", [False, True], ids=["dense", "flex"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: f"{'causal' if m.causal else 'full'}-{m.window}")
def test_every_lowering_says_what_the_definition_says(mask: Mask, flex: bool) -> None:
    for name, q, k in CASES:
        if flex and q.length * k.length > 9 and "whole" not in name and "packed" not in name:
            continue  # a block mask is asked cell by cell, which is slow: the dense pass has these
        expected = by_hand(mask, q, k)
        got = as_map(lower(mask, q, k, device=CPU, flex=flex), *expected.shape)
        assert torch.equal(got, expected), f"{name}:\n{got.int()}\nexpected\n{expected.int()}"
        definition = mask.allowed(q.positions(CPU)[:, :, None], k.positions(CPU)[:, None, :])
        if q.doc is None:
            assert torch.equal(definition.expand_as(expected), expected), f"{name}: Mask.allowed"


def test_hundreds_of_lowerings_take_every_form() -> None:
    forms = Counter(type(lower(mask, q, k, device=CPU)).__name__ for mask in MASKS for _, q, k in CASES)
    lasts = [
        low.last for mask in MASKS for _, q, k in CASES if isinstance(low := lower(mask, q, k, device=CPU), Everything)
    ]
    assert forms.total() >= 500
    assert set(forms) == {"Everything", "IsCausal", "Dense"} and min(forms.values()) >= 15
    assert sum(last is not None for last in lasts) >= 5 and sum(last is None for last in lasts) >= 20
    blocks = [type(lower(mask, q, k, device=CPU, flex=True)) for mask in MASKS[:3] for _, q, k in CASES[:12]]
    assert Block in blocks and Dense not in blocks


@pytest.mark.parametrize(
    ("mask", "q", "k", "form"),
    [
        (CAUSAL, Span(0, 7), Span(0, 7), IsCausal()),
        (Mask(window=7), Span(0, 7), Span(0, 7), IsCausal()),
        (CAUSAL, Span(6, 1), Span(0, 7), Everything()),
        (CAUSAL, Span(9, 3), Span(0, 4), Everything()),
        (Mask(window=3), Span(6, 1), Span(0, 7), Everything(last=3)),
        (Mask(window=3), Span(6, 1), Span(4, 3), Everything()),
        (Mask(window=3), Span(6, 1), Span(3, 4), Everything(last=3)),
        (FULL, Span(0, 7), Span(0, 7), Everything()),
        (FULL, Span(0, 3, torch.tensor([[0, EMPTY, 1]])), Span(0, 7), Everything()),
        (Mask(False, 7), Span(0, 7), Span(0, 7), Everything()),
    ],
)
def test_the_cheapest_form_is_chosen(mask: Mask, q: Span, k: Span, form: Lowered) -> None:
    assert lower(mask, q, k, device=CPU) == form


@pytest.mark.parametrize(
    ("mask", "q", "k"),
    [
        (Mask(window=6), Span(0, 7), Span(0, 7)),
        (CAUSAL, Span(3, 4), Span(0, 7)),
        (CAUSAL, Span(0, 3), Span(0, 7)),
        (Mask(False, 6), Span(0, 7), Span(0, 7)),
        (Mask(window=3), Span(5, 2), Span(0, 7)),
        (FULL, Span(0, 7), Span(0, 7, torch.arange(7)[None])),
    ],
)
def test_what_no_cheap_form_can_say_is_dense(mask: Mask, q: Span, k: Span) -> None:
    assert isinstance(lower(mask, q, k, device=CPU), Dense)
    assert isinstance(lower(mask, q, k, device=CPU, flex=True), Block)


class NoReading(TorchDispatchMode):
    """Fails whenever the value of a tensor is asked for: on a GPU that would wait for everything before it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func), f"{func} reads a tensor"
        return func(*args, **(kwargs or {}))


def test_lowering_never_reads_a_tensor() -> None:
    valid = _valid("..xxxxx", "xxxxx..")
    at = Span.of(torch.zeros(2, 7), valid=valid, doc=valid.long())
    with NoReading():
        for mask in MASKS:
            for q, k in ((Span(0, 7), Span(0, 7)), (at, at), (Span(3, 2), Span(0, 5))):
                lower(mask, q, k, device=CPU)
        with pytest.raises(AssertionError, match="reads a tensor"):
            bool(valid.any())


def test_documents_on_one_side_only_are_refused() -> None:
    doc = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(StateError, match="Give `doc` to both"):
        lower(CAUSAL, Span(0, 3, None, doc), Span(0, 3), device=CPU)
    with pytest.raises(StateError, match="Give `doc` to both"):
        lower(FULL, Span(0, 3), Span(0, 3, None, doc), device=CPU)


# ---- Mask -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", MASKS, ids=repr)
def test_and_allows_what_both_allow(one: Mask) -> None:
    q, k = torch.arange(9)[:, None], torch.arange(9)
    for other in MASKS:
        both = one & other
        if one.causal == other.causal or one.window is None or other.window is None or one.window <= other.window:
            assert torch.equal(both.allowed(q, k), one.allowed(q, k) & other.allowed(q, k)), f"{one} & {other}"
        assert both == other & one


def test_masks_are_values() -> None:
    assert Mask() == CAUSAL and hash(Mask(True, 4)) == hash(Mask(True, 4)) and Mask(window=4) != Mask(window=5)
    assert {Mask(): 1}[CAUSAL] == 1
    with pytest.raises(AttributeError):
        Mask().causal = False  # type: ignore[misc]
    with pytest.raises(SpecError, match=r"mask\.window: got 0, expected at least 1"):
        Mask(window=0)


# ---- Span -----------------------------------------------------------------------------------------------------------


def test_span_counts_real_tokens_only() -> None:
    ids = torch.zeros(3, 5, dtype=torch.long)
    at = Span.of(ids, valid=_valid("xxxxx", "..xxx", "x.x.x"), start=10)
    e = EMPTY
    assert at.pos is not None
    assert at.pos.tolist() == [[10, 11, 12, 13, 14], [e, e, 10, 11, 12], [10, e, 11, e, 12]]
    assert (at.start, at.length, at.end) == (10, 5, 15)
    real = at.real()
    assert real is not None and real.tolist() == _valid("xxxxx", "..xxx", "x.x.x").tolist()


def test_span_restarts_at_each_document() -> None:
    ids = torch.zeros(2, 6, dtype=torch.long)
    doc = torch.tensor([[7, 7, 7, 2, 2, 7], [1, 1, 1, 1, 1, 1]])
    at = Span.of(ids, doc=doc)
    assert at.pos is not None and at.pos.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    padded = Span.of(ids, doc=doc, valid=_valid(".xx.xx", "xxx..x"))
    assert padded.pos is not None
    assert padded.pos.tolist() == [[EMPTY, 0, 1, EMPTY, 0, 0], [0, 1, 2, EMPTY, EMPTY, 3]]


def test_span_without_padding_is_a_promise() -> None:
    at = Span.of(torch.zeros(2, 4, dtype=torch.long), start=3)
    assert at.pos is None and at.real() is None and at.positions(CPU).tolist() == [[3, 4, 5, 6]]


def test_span_select_keeps_rows_in_order() -> None:
    ids, rows = torch.zeros(3, 2, dtype=torch.long), torch.tensor([2, 0, 2])
    doc = torch.tensor([[0, 1], [2, 3], [4, 5]])
    at = Span.of(ids, doc=doc, valid=_valid("xx", ".x", "x.")).select(rows)
    assert at.doc is not None and at.doc.tolist() == [[4, 5], [0, 1], [4, 5]]
    assert at.pos is not None and at.pos.tolist() == [[0, EMPTY], [0, 0], [0, EMPTY]]
    assert Span(1, 2).select(rows).pos is None


@pytest.mark.parametrize("name", ["valid", "doc"])
def test_span_refuses_another_shape(name: str) -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    wrong = torch.ones(2, 3, dtype=torch.bool if name == "valid" else torch.long)
    with pytest.raises(StateError, match=rf"{name} has shape \(2, 3\), expected \(2, 4\)"):
        Span.of(ids, **{name: wrong})
