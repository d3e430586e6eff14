"""The int8 cache: how far off a vector and what attention makes of it may be, and that all the rest is a cache."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from brickformer import GLU, Attention, Decoder, Layer, Mask, Rope, pattern
from brickformer.attend import attention_weights
from brickformer.errors import StateError
from brickformer.mask import EMPTY, Span
from brickformer.mixers.latent import LatentAttention
from brickformer.mixers.lstm import LSTM
from brickformer.mixers.shortconv import ShortConv
from brickformer.models import DecoderModel
from brickformer.state import KV, RingKV, StackState
from brickformer.state.int8 import expand, packed_width, shrink

CPU = torch.device("cpu")


def loop(x: list[float]) -> list[float]:
    """The definition, number by number."""
    scale = max(map(abs, x)) / 127
    return [scale * round(n / scale) if scale else 0.0 for n in x]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=9))
def test_a_vector_is_kept_as_defined_and_within_its_bound(numbers: list[float]) -> None:
    x = torch.tensor(numbers)[None, None, None]
    kept = shrink(x)
    assert kept.dtype is torch.int8 and kept.shape[-1] == packed_width(len(numbers))
    back = expand(kept, len(numbers), torch.float32)
    largest = max(map(abs, numbers))
    if largest > 1e-30:  # below that float32 itself is coarse
        assert (back - x).abs().max().item() <= largest / 254 * (1 + 1e-5)
        off = (back[0, 0, 0].double() - torch.tensor(loop(numbers)).double()).abs().max().item()
        assert off <= largest / 127 * (1 + 1e-5), "a tie may fall either way, no more"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(2, 3, 700, 250), (1, 1, 1, 5), (0, 2, 3, 4)])
def test_vectors_expanded_in_pieces_are_those_of_the_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kept = shrink(torch.randn(shape))
    numbers, scale = kept[..., : shape[-1]], kept[..., -4:].view(torch.float32)
    assert torch.equal(expand(kept, shape[-1], dtype), (numbers.float() * scale).to(dtype))


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    assert torch.equal(expand(shrink(torch.zeros(1, 1, 2, 5)), 5, torch.float32), torch.zeros(1, 1, 2, 5))
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.tensor([[[[1.0, bad, 2.0, 0.0], [1.0, 2.0, 3.0, 4.0]]]])
        back = expand(shrink(x), 4, torch.float32)
        assert not back[..., 0, :].isfinite().any() and back[..., 1, :].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 64])
def test_every_type_comes_back_as_itself(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(2, 3, 4, width).to(dtype)
    back = expand(shrink(x), width, dtype)
    assert back.dtype is dtype and back.shape == x.shape
    off = (back.double() - x.double()).abs()
    half_digit = torch.finfo(dtype).eps
    assert (off <= x.double().abs().amax(-1, keepdim=True) * (1 / 254 + half_digit + 1e-6)).all()


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    everything = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    return attention_weights(q, k, everything) @ v


def test_what_attention_reads_is_within_the_bound() -> None:
    """|Δout| <= max|v| / 254 + (e^(2δ) - 1) max|v|, with δ = ‖q‖₁ max|k| / 254 / √K; on normal numbers, 1 %."""
    q, k, v = (torch.randn(2, 4, n, 64, dtype=torch.float64) for n in (3, 50, 50))
    store = KV(2, 4, 50, 64, device=CPU, dtype=torch.float64).in_int8()
    kept_k, kept_v, _ = store.append(k, v, Span(0, 50))
    exact, got = attended(q, k, v), attended(q, kept_k, kept_v)
    delta = q.abs().sum(-1, keepdim=True) * k.abs().amax((-2, -1), keepdim=True) / 254 / 8
    most = v.abs().amax((-2, -1), keepdim=True)
    assert ((got - exact).abs() <= most / 254 + (torch.exp(2 * delta) - 1) * most).all()
    assert 0.0 < ((got - exact).norm() / exact.norm()).item() < 0.01


@pytest.mark.parametrize("heads", [1, 8])
def test_it_holds_less_than_three_tenths(heads: int) -> None:
    for store in (
        KV(2, heads, 100, 64, device=CPU, dtype=torch.float32),
        RingKV(2, heads, 50, 64, device=CPU, dtype=torch.float32),
    ):
        small = store.in_int8()
        assert type(small) is type(store) and small.max_len == store.max_len
        assert 0.25 < small.nbytes / store.nbytes <= 0.30


MIXERS = {
    "attention": Attention(heads=4, kv_heads=2, position=Rope()),
    "window": Attention(heads=4, kv_heads=2, position=Rope(), mask=Mask(window=3)),
    "head width 3": Attention(heads=4, head_dim=3),
    "latent": LatentAttention(heads=4, rank=6, rope_dim=2),
    "latent window": LatentAttention(heads=4, rank=6, rope_dim=2, mask=Mask(window=3)),
    "shortconv": ShortConv(Attention(heads=4)),
    "lstm": LSTM(),
}
TOKENS = 12


def model_of(mixer: str) -> DecoderModel:
    torch.manual_seed(1)
    made = Decoder(vocab=11, dim=16, layers=pattern([Layer(MIXERS[mixer], GLU(24))], 2)).build()
    return made.double().eval()


def fed(model: DecoderModel, ids: Tensor, state: StackState, chunks: list[int]) -> Tensor:
    return torch.cat([model(part, state=state) for part in ids.split(chunks, 1)], 1)


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_chunks_rows_copies_and_rewinds_agree_to_the_last_digits(mixer: str) -> None:
    """Rounding is of a token alone, so however the tokens come the numbers kept are the same."""
    model = model_of(mixer)
    ids = torch.randint(0, 11, (3, TOKENS))
    state = model.init_state(3, TOKENS, cache="int8")
    whole = fed(model, ids, state, [TOKENS])
    plain = model(ids)
    off = (whole - plain).norm() / plain.norm()
    assert off < 0.03 and (bool(off > 0) or mixer == "lstm"), "near the exact logits, and not by keeping them exactly"
    for chunks in ([1] * TOKENS, [5, *[1] * 7], [2, 3, 4, 3]):
        torch.testing.assert_close(fed(model, ids, model.init_state(3, TOKENS, cache="int8"), chunks), whole)
    for r in range(3):
        alone = fed(model, ids[r : r + 1], model.init_state(1, TOKENS, cache="int8"), [4, 8])
        torch.testing.assert_close(alone, whole[r : r + 1])
    state = model.init_state(3, TOKENS, cache="int8")
    fed(model, ids[:, :7], state, [6, 1])
    twin = state.clone()
    assert twin.nbytes == state.nbytes
    twin.select(torch.tensor([2, 0, 2, 2]))  # beams follow their parents
    torch.testing.assert_close(fed(model, ids[[2, 0, 2, 2], 7:], twin, [1] * 5), whole[[2, 0, 2, 2], 7:])
    state.select(torch.tensor([1]))  # finished rows leave
    torch.testing.assert_close(fed(model, ids[1:2, 7:9], state, [1, 1]), whole[1:2, 7:9])
    try:
        state.rewind(8)
    except StateError:
        assert mixer == "lstm"
    else:
        torch.testing.assert_close(fed(model, ids[1:2, 8:], state, [4]), whole[1:2, 8:])


@pytest.mark.parametrize("mixer", ["attention", "window", "latent window"])
@torch.no_grad()
def test_padding_changes_nothing(mixer: str) -> None:
    model = model_of(mixer)
    ids = torch.randint(0, 11, (2, TOKENS))
    valid = torch.ones(2, TOKENS, dtype=torch.bool)
    valid[1, :4] = False
    pos = Span.of(ids, valid=valid).pos
    assert pos is not None and int(pos[1, 0]) == EMPTY
    state = model.init_state(2, TOKENS, cache="int8")
    first = model(ids[:, :8], Span(0, 8, pos[:, :8]), state)
    got = torch.cat([first, *(model(ids[:, i : i + 1], state=state) for i in range(8, TOKENS))], 1)
    alone = fed(model, ids[1:, 4:], model.init_state(1, TOKENS, cache="int8"), [TOKENS - 4])
    torch.testing.assert_close(got[1:, 4:], alone)


def test_a_cache_that_is_not_known_is_refused() -> None:
    with pytest.raises(StateError, match="cache: got 'int4', expected 'float' or 'int8'"):
        model_of("attention").init_state(1, 4, cache="int4")  # type: ignore[arg-type]
