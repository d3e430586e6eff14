"""Mamba, Mamba-2, GatedDelta and LSTM against loops over single tokens: values and gradients, in float64.

Long enough for several chunks and, with small blocks, for several blocks; whole, packed, padded, and piece by piece.
"""

from __future__ import annotations

import pytest
import torch
from mixers.recurrences import gradients, naive, shaken
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import brickformer.mixers.recurrent as recurrent
from brickformer.errors import SpecError, StateError
from brickformer.feedforward import GLU
from brickformer.layers import Layer, pattern
from brickformer.mask import EMPTY, Span
from brickformer.mixers.attention import Attention
from brickformer.mixers.base import Mixer, MixerSpec
from brickformer.mixers.delta import GatedDelta, GatedDeltaMixer
from brickformer.mixers.lstm import LSTM, LSTMMixer
from brickformer.mixers.mamba import Mamba, MambaMixer
from brickformer.mixers.mamba2 import Mamba2, Mamba2Mixer
from brickformer.mixers.recurrent import STEP_RANGE
from brickformer.models import Decoder
from brickformer.norms import RMSNorm

DIM = 12
SPECS: dict[str, MixerSpec] = {
    "mamba": Mamba(state=4),
    "mamba, other sizes": Mamba(state=3, inner=10, conv=2, rank=5, bias=True, conv_bias=False),
    "mamba, no convolution": Mamba(state=2, conv=1),
    "mamba, normed": Mamba(state=3, rank=5, inner_norm=RMSNorm(1e-2)),
    "mamba2": Mamba2(head_dim=6, state=5),
    "mamba2, groups": Mamba2(heads=4, head_dim=3, state=4, groups=2, conv=3, bias=True, conv_bias=False),
    "delta": GatedDelta(heads=3),
    "delta, shared keys": GatedDelta(heads=2, value_heads=4, head_dim=5, value_dim=3, conv=2, bias=True),
    "lstm": LSTM(),
    "lstm, narrow": LSTM(hidden=5),
}
BOTH_WAYS = {"lstm, both ways": LSTM(hidden=7, bidirectional=True)}
LINEAR = {name: spec for name, spec in SPECS.items() if not isinstance(spec, LSTM)}
LONG = 150  # two whole chunks of 64 and a part of one

every = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
every_way = pytest.mark.parametrize("spec", [*SPECS.values(), *BOTH_WAYS.values()], ids=[*SPECS, *BOTH_WAYS])
linear = pytest.mark.parametrize("spec", LINEAR.values(), ids=LINEAR.keys())


def built(spec: MixerSpec) -> Mixer:
    torch.manual_seed(0)
    m = shaken(spec.build(DIM))
    assert isinstance(m, Mixer)
    return m


def draw(rows: int, tokens: int) -> Tensor:
    return torch.randn(rows, tokens, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))


def close(got: Tensor, expected: Tensor, what: str = "") -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")


def new_state(m: Mixer, rows: int) -> object:
    return m.init_state(rows, 0, device=torch.device("cpu"), dtype=torch.float64)


# ---- against the loops ----------------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("blocks", [False, True], ids=["one block", "blocks of 64"])
def test_is_the_loop_of_the_paper(spec: MixerSpec, blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if blocks:
        monkeypatch.setattr(recurrent, "block_length", lambda *_: 64)
    m, x = built(spec), draw(1, LONG).requires_grad_()
    inputs = [x, *m.parameters()]
    y, expected = m(x, Span(0, LONG)), naive(m, x[0])[None]
    close(y, expected, "values")
    names = ["x", *(name for name, _ in m.named_parameters())]
    for name, got, wanted in zip(names, gradients(y, inputs), gradients(expected, inputs), strict=True):
        close(got, wanted, f"gradient of {name}")


@every
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 63, 64, 65, 128])
def test_every_length(spec: MixerSpec, tokens: int) -> None:
    m, x = built(spec), draw(2, tokens)
    with torch.no_grad():
        close(m(x, Span(0, tokens)), torch.stack([naive(m, row) for row in x]))


PIECES = [[LONG], [64, 64, 22], [100, 1, 1, 48], [1, 2, 3, 70, 74], [1] * 20 + [130]]


@every
def test_pieces_with_a_state_are_the_whole(spec: MixerSpec) -> None:
    m, x = built(spec), draw(2, LONG)
    with torch.no_grad():
        whole = m(x, Span(0, LONG))
        for sizes in PIECES:
            state, begin = new_state(m, 2), 0
            for size in sizes:
                close(
                    m(x[:, begin : begin + size], Span(begin, size), state), whole[:, begin : begin + size], str(sizes)
                )
                begin += size


def test_a_gradient_flows_through_the_state() -> None:
    """Two halves of a sequence, the second on the state of the first, learn what the whole learns."""
    for spec in SPECS.values():
        m, x = built(spec), draw(1, 80).requires_grad_()
        inputs = [x, *m.parameters()]
        state = new_state(m, 1)
        halves = torch.cat([m(x[:, :30], Span(0, 30), state), m(x[:, 30:], Span(30, 50), state)], 1)
        for got, wanted in zip(gradients(halves, inputs), gradients(m(x, Span(0, 80)), inputs), strict=True):
            close(got, wanted, repr(spec))


# ---- padding and documents ------------------------------------------------------------------------------------------


def holes(rows: int, tokens: int) -> Tensor:
    """True at real tokens: left, right, in the middle, here and there, everywhere, nowhere."""
    valid = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(3)) < 0.6
    valid[0], valid[1], valid[2], valid[3], valid[4] = True, True, True, True, False
    valid[0, : tokens // 2], valid[1, -tokens // 3 :], valid[2, 20 : tokens - 40] = False, False, False
    return valid


@every_way
@pytest.mark.parametrize("blocks", [False, True], ids=["one block", "blocks of 64"])
def test_padding_is_not_there(spec: MixerSpec, blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real tokens say, and learn, what they would alone, whatever stands at the padding."""
    if blocks:
        monkeypatch.setattr(recurrent, "block_length", lambda *_: 64)
    m, x, valid = built(spec), draw(6, LONG), holes(6, LONG)
    x = torch.where(valid[..., None], x, 1e3).requires_grad_()
    y = m(x, Span.of(x, valid=valid))
    assert bool(y.isfinite().all())
    alone = torch.cat(
        [m(row[real][None], Span(0, int(real.sum())))[0] for row, real in zip(x, valid, strict=True) if real.any()]
    )
    close(y[valid], alone, "values")
    inputs = [x, *m.parameters()]
    grads = gradients(y[valid], inputs)
    assert grads[0][~valid].abs().max() == 0.0
    for got, wanted in zip(grads, gradients(alone, inputs), strict=True):
        close(got, wanted, "gradient")


@every
def test_a_padded_prompt_leaves_the_state_of_its_real_tokens(spec: MixerSpec) -> None:
    m, x, valid = built(spec), draw(6, 90), holes(6, 90)
    pos = Span.of(x, valid=valid).pos
    assert pos is not None
    more = draw(6, 4)
    with torch.no_grad():
        for sizes in ([90], [1, 30, 1, 58]):
            state, begin = new_state(m, 6), 0
            for size in sizes:
                cut = slice(begin, begin + size)
                m(x[:, cut], Span(begin, size, pos[:, cut]), state)
                begin += size
            y = [m(more[:, i : i + 1], Span(90 + i, 1, valid.sum(1, keepdim=True) + i), state) for i in range(2)]
            y.append(m(more[:, 2:], Span(92, 2, valid.sum(1, keepdim=True) + torch.tensor([2, 3])), state))
            for r in range(6):
                alone = torch.cat([x[r][valid[r]], more[r]])[None]
                close(torch.cat(y, 1)[r], m(alone, Span(0, alone.shape[1]))[0, -4:], f"row {r}, prompt in {sizes}")


def packed(rows: int, tokens: int) -> Tensor:
    """Documents of many lengths; some begin where a chunk or a block does; a number may come back later."""
    begins = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(4)) < 0.05
    begins[0], begins[1, [0, 64, 128]], begins[2, [63, 65, 66]] = False, True, True
    return begins.cumsum(1) % 3


@every_way
@pytest.mark.parametrize("blocks", [False, True], ids=["one block", "blocks of 64"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_packed_documents_do_not_meet(
    spec: MixerSpec, blocks: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks:
        monkeypatch.setattr(recurrent, "block_length", lambda *_: 64)
    m, x, doc = built(spec), draw(4, LONG).requires_grad_(), packed(4, LONG)
    valid = torch.ones(4, LONG, dtype=torch.bool)
    if padded:
        valid = torch.rand(4, LONG, generator=torch.Generator().manual_seed(5)) < 0.7
    y = m(x, Span.of(x, doc=doc, valid=valid if padded else None))
    pieces, said = [], []
    for r in range(4):
        places = valid[r].nonzero()[:, 0]
        ends = (doc[r][places][1:] != doc[r][places][:-1]).nonzero()[:, 0] + 1
        for run in torch.tensor_split(places, ends):
            pieces.append(m(x[r, run][None], Span(0, len(run)))[0])
            said.append(y[r, run])
    close(torch.cat(said), torch.cat(pieces), "values")
    inputs = [x, *m.parameters()]
    for got, wanted in zip(gradients(torch.cat(said), inputs), gradients(torch.cat(pieces), inputs), strict=True):
        close(got, wanted, "gradient")


def test_one_row_of_positions_may_serve_all_rows() -> None:
    x, valid = draw(3, 20), torch.ones(1, 20, dtype=torch.bool)
    valid[0, 5:9] = False
    pos = (valid.cumsum(1) - 1).masked_fill(~valid, EMPTY)
    for spec in SPECS.values():
        m = built(spec)
        for state in (None, new_state(m, 3)):
            y = m(x, Span(0, 20, pos), state)
            close(y[:, valid[0]], m(x[:, valid[0]], Span(0, 16)))


# ---- states ---------------------------------------------------------------------------------------------------------


@every
def test_a_state_does_not_grow(spec: MixerSpec) -> None:
    m = built(spec)
    state = m.init_state(2, 5, device=torch.device("cpu"), dtype=torch.float64)
    size = state.nbytes
    assert size > 0
    with torch.no_grad():
        m(draw(2, 70), Span(0, 70), state)
    assert state.nbytes == size
    held = sum(x.untyped_storage().nbytes() for x in state.__dict__.values() if isinstance(x, Tensor))
    assert held <= 2 * size, "the state holds on to a larger tensor"  # 2: h and c of an LSTM may share a storage


@every
def test_a_state_refuses_what_it_cannot_do(spec: MixerSpec) -> None:
    m, x = built(spec), draw(2, 3)
    state = m.init_state(2, 5, device=torch.device("cpu"), dtype=torch.float64)
    m(x, Span(0, 3), state)
    state.rewind(3)
    with pytest.raises(StateError, match=rf"^{spec.kind}: .* cannot rewind \(from slot 3 to 1\).*clone\(\)"):
        state.rewind(1)
    with pytest.raises(StateError, match=rf"^{spec.kind}: the state's .* has shape \(2, .*init_state\(1, \.\.\.\)"):
        m(x[:1], Span(3, 3), state)
    with pytest.raises(StateError, match=f"^{spec.kind}: a state cannot keep packed documents apart. Decode each"):
        m(x, Span.of(x, start=3, doc=torch.zeros(2, 3, dtype=torch.int64)), state)
    for other in SPECS.values():
        if other.kind != spec.kind:
            with pytest.raises(StateError, match=f"^{spec.kind}: got a .*State, expected a "):
                m(x, Span(3, 3), new_state(built(other), 2))
    with pytest.raises(StateError, match="got a KV, expected a"):
        m(x, Span(3, 3), Attention(2).build(DIM).init_state(2, 9, device=x.device, dtype=x.dtype))


def test_a_state_of_other_sizes_is_refused() -> None:
    for here, there in ((Mamba(state=4), Mamba(state=5)), (GatedDelta(3), GatedDelta(2)), (LSTM(), LSTM(hidden=5))):
        m, state = built(here), new_state(built(there), 2)
        with pytest.raises(StateError, match=f"^{here.kind}: the state's [a-z]+ has shape"):
            m(draw(2, 3), Span(0, 3), state)


def test_an_lstm_that_reads_both_ways_keeps_no_state() -> None:
    m = built(LSTM(bidirectional=True))
    assert not m.causal
    with pytest.raises(StateError, match=r"^lstm: reads both ways.*bidirectional=False"):
        new_state(m, 2)
    with pytest.raises(StateError, match=r"^lstm: reads both ways.*bidirectional=False"):
        m(draw(2, 3), Span(0, 3), new_state(built(LSTM()), 2))


# ---- specs and initial values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mamba(state=0), r"mamba\.state: got 0, expected at least 1"),
        (lambda: Mamba(rank=0), r"mamba\.rank: got 0, expected at least 1"),
        (lambda: Mamba(conv=0), r"mamba\.conv: got 0"),
        (lambda: Mamba2(heads=6, groups=4), r"mamba2\.groups: got 4, expected a divisor of heads=6"),
        (
            lambda: Mamba2(head_dim=5).build(12),
            r"mamba2\.head_dim: got 5, expected a divisor of 2·dim=24, or give heads",
        ),
        (lambda: Mamba2().build(12), r"mamba2\.head_dim: got 64"),
        (lambda: Mamba2(head_dim=8, groups=2).build(12), r"mamba2\.groups: got 2, expected a divisor of heads=3"),
        (
            lambda: GatedDelta(heads=4, value_heads=6),
            r"gated_delta\.value_heads: got 6, expected a multiple of heads=4",
        ),
        (lambda: GatedDelta(heads=0), r"gated_delta\.heads: got 0"),
        (lambda: GatedDelta(heads=5).build(12), r"gated_delta\.heads: got 5, expected a divisor of dim=12"),
        (lambda: LSTM(hidden=0), r"lstm\.hidden: got 0, expected at least 1"),
    ],
)
def test_specs_that_do_not_fit(make: object, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        make()  # type: ignore[operator]


def test_initialising_a_model_leaves_decays_and_steps_alone() -> None:
    mixers = [Mamba(state=4), Mamba2(head_dim=8), GatedDelta(heads=4), LSTM()]
    model = Decoder(11, 16, pattern([Layer(mixer, GLU(16)) for mixer in mixers], 4)).build()
    mamba, mamba2, delta, lstm = model.stack.mixers()
    assert isinstance(mamba, MambaMixer) and isinstance(mamba2, Mamba2Mixer)
    assert isinstance(delta, GatedDeltaMixer) and isinstance(lstm, LSTMMixer)
    torch.testing.assert_close(mamba.A_log.exp(), torch.arange(1.0, 5.0).expand(32, 4))
    for bias in (mamba.step.bias, mamba2.dt_bias, delta.dt_bias):
        step = nn.functional.softplus(bias)
        assert step.min() >= STEP_RANGE[0] * 0.999 and step.max() <= STEP_RANGE[1] * 1.001
        assert step.unique().numel() > 1
    assert mamba.step.weight.abs().max() <= 1.0 and mamba.step.weight.std() > 0.3  # rank 1
    for a_log in (mamba2.A_log, delta.A_log):
        assert a_log.exp().min() >= 0.01 and a_log.exp().max() <= 16.0
    for gain in (mamba.D, mamba2.D, mamba2.norm.weight, delta.norm.weight):
        assert torch.equal(gain, torch.ones_like(gain))
    _, _, on_input, on_hidden = lstm.ahead.all_weights[0]
    assert torch.equal((on_input + on_hidden)[16:32], torch.ones(16))


# ---- work and precision ---------------------------------------------------------------------------------------------


class Work(TorchDispatchMode):
    """Counts calls of operators, the numbers they give back, and the largest tensor among them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.numbers = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and not func.is_view:
                self.calls += 1
                self.numbers += x.numel()
                self.largest = max(self.largest, x.numel())
        return out


def work(spec: MixerSpec, tokens: int, train: bool) -> Work:
    torch.manual_seed(0)
    m, x = spec.build(DIM), torch.randn(1, tokens, DIM, requires_grad=train)
    with torch.set_grad_enabled(train), Work() as counted:
        y = m(x, Span(0, tokens))
        if train:
            y.sum().backward()
    return counted


@linear
@pytest.mark.parametrize("train", [False, True], ids=["forward", "forward and backward"])
def test_work_and_memory_grow_with_the_length(spec: MixerSpec, train: bool) -> None:
    """Four times as many tokens: four times the numbers, not sixteen times as in attention; and no loop over tokens."""
    short, long = work(spec, 1024, train), work(spec, 4096, train)
    assert 3.5 < long.numbers / short.numbers < 4.3
    assert long.largest <= 4.3 * short.largest
    assert long.calls < 4096
    dense = Attention(2, backend="reference")
    assert work(dense, 1024, False).numbers / work(dense, 256, False).numbers > 8.0


@every
def test_lower_precision_stays_near(spec: MixerSpec) -> None:
    """Over 300 tokens, with decays computed in float32 whatever the type; nothing turns into another type."""
    torch.manual_seed(0)
    m = spec.build(DIM).double()
    x = draw(2, 300)
    with torch.no_grad():
        exact = m(x, Span(0, 300))
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
            low = m.to(dtype)
            y = low(x.to(dtype), Span(0, 300))
            state = low.init_state(2, 0, device=x.device, dtype=dtype)
            pieces = [low(x[:, a:b].to(dtype), Span(a, b - a), state) for a, b in ((0, 200), (200, 299), (299, 300))]
            for got in (y, torch.cat(pieces, 1)):
                assert got.dtype is dtype
                assert (got.double() - exact).norm() <= tolerance * exact.norm()
            m = m.double()


@linear
def test_strong_decays_neither_overflow_nor_vanish_into_nan(spec: MixerSpec) -> None:
    """Steps so large that a chunk's decay underflows: finite values and gradients, in float32."""
    torch.manual_seed(0)
    m = spec.build(DIM)
    x = (torch.randn(1, 200, DIM) * 1e3).requires_grad_()
    y = m(x, Span(0, 200))
    grads = torch.autograd.grad(y.square().mean(), [x, *m.parameters()])
    assert all(bool(g.isfinite().all()) for g in (y, *grads))
