"""The recurrent mixers against the same layers in other libraries, with the same weights.

transformers' MambaModel and Mamba2Model, its gated delta rule layer (Qwen3-Next), and torch's nn.LSTM, all tiny and
random. Then the kernels of `mixers/kernels.py`: what is handed to them is checked against stand-ins that follow their
documentation; the kernels themselves where there is a device and they are installed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from mixers.recurrences import shaken
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from brickformer.mask import Span
from brickformer.mixers import kernels
from brickformer.mixers.base import MixerSpec
from brickformer.mixers.delta import GatedDelta, GatedDeltaMixer
from brickformer.mixers.lstm import LSTM, LSTMMixer
from brickformer.mixers.mamba import Mamba
from brickformer.mixers.mamba2 import Mamba2

DIM, TOKENS = 16, 90


def near(got: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    """float32 against float32."""
    assert got.shape == expected.shape
    assert (got - expected).norm() <= tolerance * expected.norm()


class Ours(nn.Module):
    """A mixer where transformers has its own."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        return self.mixer(hidden_states, Span(0, hidden_states.shape[1]))


def replaced(model: nn.Module, ours: Callable[[nn.Module], nn.Module]) -> tuple[Tensor, Tensor]:
    """What a model says, and what it says with our mixers in the place of its own."""
    shaken(model)
    model = model.float()
    ids = torch.randint(0, 30, (2, TOKENS))
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        for layer in model.layers:
            layer.mixer = Ours(ours(layer.mixer))
        return model(ids).last_hidden_state, expected


def same_weights(mine: nn.Module, theirs: nn.Module, names: dict[str, str]) -> nn.Module:
    """`mine` with the weights of `theirs`: every parameter of either is named once."""
    given = dict(theirs.named_parameters())
    assert set(names.values()) == set(given) and set(names) == {n for n, _ in mine.named_parameters()}
    with torch.no_grad():
        for name, p in mine.named_parameters():
            p.copy_(given[names[name]])
    return mine.eval()


LINEARS = {"into.weight": "in_proj.weight", "out.weight": "out_proj.weight", "A_log": "A_log", "D": "D"}
BIASES = {"into.bias": "in_proj.bias", "out.bias": "out_proj.bias"}
CONV, CONV_BIAS = {"conv.weight": "conv1d.weight"}, {"conv.bias": "conv1d.bias"}


@pytest.mark.parametrize("bias", [False, True])
def test_mamba_of_transformers(bias: bool) -> None:
    config = transformers.MambaConfig(
        vocab_size=30,
        hidden_size=DIM,
        state_size=5,
        num_hidden_layers=2,
        expand=3,
        conv_kernel=3,
        time_step_rank=4,
        use_bias=bias,
        use_conv_bias=not bias,
    )
    spec = Mamba(state=5, inner=3 * DIM, conv=3, rank=4, bias=bias, conv_bias=not bias)
    names = {**LINEARS, **CONV, "select.weight": "x_proj.weight"}
    names |= {"step.weight": "dt_proj.weight", "step.bias": "dt_proj.bias", **(BIASES if bias else CONV_BIAS)}
    near(*replaced(transformers.MambaModel(config), lambda theirs: same_weights(spec.build(DIM), theirs, names)))


@pytest.mark.parametrize(("bias", "groups"), [(False, 1), (True, 2)])
def test_mamba2_of_transformers(bias: bool, groups: int) -> None:
    config = transformers.Mamba2Config(
        vocab_size=30,
        hidden_size=DIM,
        state_size=6,
        num_hidden_layers=2,
        expand=2,
        num_heads=4,
        head_dim=8,
        n_groups=groups,
        conv_kernel=3,
        use_bias=bias,
        use_conv_bias=not bias,
        chunk_size=16,
    )
    spec = Mamba2(heads=4, head_dim=8, state=6, groups=groups, conv=3, bias=bias, conv_bias=not bias)
    names = {**LINEARS, **CONV, "dt_bias": "dt_bias", "norm.weight": "norm.weight", **(BIASES if bias else CONV_BIAS)}
    near(*replaced(transformers.Mamba2Model(config), lambda theirs: same_weights(spec.build(DIM), theirs, names)))


def test_gated_delta_of_transformers() -> None:
    """Its stacked projections are sorted by key head: q, k, and the values and gates of the heads that share them."""
    heads, value_heads, width, value = 2, 4, 6, 5
    config = transformers.Qwen3NextConfig(
        hidden_size=DIM,
        linear_num_key_heads=heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=width,
        linear_value_head_dim=value,
        linear_conv_kernel_dim=3,
        rms_norm_eps=1e-6,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
    )
    theirs = shaken(Qwen3NextGatedDeltaNet(config, 0)).float()
    mine = GatedDelta(heads, value_heads, width, value, conv=3).build(DIM).eval()
    assert isinstance(mine, GatedDeltaMixer)
    shared = value_heads // heads
    per_head = theirs.in_proj_qkvz.weight.view(heads, -1, DIM).split([width, width, shared * value, shared * value], 1)
    per_gate = theirs.in_proj_ba.weight.view(heads, -1, DIM).split([shared, shared], 1)
    with torch.no_grad():
        mine.into.weight.copy_(torch.cat([part.flatten(0, 1) for part in (*per_head, *per_gate)]))
        for name in ("A_log", "dt_bias", "norm.weight"):
            mine.get_parameter(name).copy_(theirs.get_parameter(name))
        mine.conv.weight.copy_(theirs.conv1d.weight)
        mine.out.weight.copy_(theirs.out_proj.weight)
        x = torch.randn(2, TOKENS, DIM)
        near(mine(x, Span(0, TOKENS)), theirs(x))


def test_lstm_of_torch() -> None:
    """Both ways, rows of different lengths: what nn.LSTM says of a packed sequence."""
    mine = shaken(LSTM(hidden=7, bidirectional=True).build(DIM))
    assert isinstance(mine, LSTMMixer) and mine.back is not None
    theirs = nn.LSTM(DIM, 7, batch_first=True, bidirectional=True).double()
    with torch.no_grad():
        for one, way in zip(theirs.all_weights, (mine.ahead, mine.back), strict=True):
            for p, given in zip(one, way.all_weights[0], strict=True):
                p.copy_(given)
        x, lengths = torch.randn(3, 9, DIM, dtype=torch.float64), torch.tensor([9, 1, 5])
        valid = torch.arange(9) < lengths[:, None]
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        expected, _ = nn.utils.rnn.pad_packed_sequence(theirs(rows)[0], batch_first=True)
        got = mine(x, Span.of(x, valid=valid))
        torch.testing.assert_close(got[valid], mine.out(expected)[valid], rtol=1e-12, atol=1e-12)


# ---- kernels --------------------------------------------------------------------------------------------------------


def mamba_stand_in(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """As mamba_ssm documents selective_scan_fn: u, delta (B, I, T); A (I, N); B, C (B, N, T); out (B, I, T)."""
    h, out = torch.zeros(len(u), *A.shape), []
    for t in range(u.shape[2]):
        h = h * torch.exp(delta[:, :, t, None] * A) + delta[:, :, t, None] * B[:, None, :, t] * u[:, :, t, None]
        out.append((h * C[:, None, :, t]).sum(-1))
    return torch.stack(out, 2)


def mamba2_stand_in(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int) -> Tensor:
    """As mamba_ssm documents mamba_chunk_scan_combined: x (B, T, H, P), dt (B, T, H), A (H), B and C (B, T, G, N)."""
    B, C = (v.repeat_interleave(x.shape[2] // v.shape[2], 2) for v in (B, C))
    h, out = torch.zeros(len(x), *x.shape[2:], B.shape[3]), []
    for t in range(x.shape[1]):
        written = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        h = h * torch.exp(dt[:, t] * A)[..., None, None] + written
        out.append((h * C[:, t, :, None]).sum(-1))
    return torch.stack(out, 1)


def delta_stand_in(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float
) -> tuple[Tensor, Tensor | None]:
    """As fla documents chunk_gated_delta_rule: q, k (B, T, H, K), v (B, T, H, V), g in log space and beta (B, T, H)."""
    s, out = torch.zeros(len(q), q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        s = s * torch.exp(g[:, t])[..., None, None]
        new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t]))
        s = s + k[:, t, ..., None] * new[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]) * scale)
    return torch.stack(out, 1), None


KERNELS: dict[str, tuple[MixerSpec, Callable[..., object]]] = {
    "mamba_kernel": (Mamba(state=4), mamba_stand_in),
    "mamba2_kernel": (Mamba2(heads=4, head_dim=6, state=5, groups=2), mamba2_stand_in),
    "delta_kernel": (GatedDelta(2, value_heads=4, head_dim=5, value_dim=6), delta_stand_in),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_told_the_right_thing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the kernel says what pure torch says, and is asked exactly where the kernel may serve."""
    spec, stand_in = KERNELS[name]
    m, x, calls = spec.build(DIM), torch.randn(2, 70, DIM), []

    def counted(*args: object, **options: object) -> object:
        calls.append(name)
        return stand_in(*args, **options)

    valid = torch.ones(2, 70, dtype=torch.bool)
    valid[1, 10:30] = False
    spans = [Span(0, 70), Span.of(x, valid=valid)]
    with torch.no_grad():
        expected = [m(x, at) for at in spans]
        found = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda: counted)
        monkeypatch.setattr("brickformer.mixers.recurrent.serves", lambda find, *_: find is found)
        got = [m(x, at) for at in spans]
        assert len(calls) == 2
        near(got[0], expected[0])
        near(got[1][valid], expected[1][valid])
        state = m.init_state(2, 70, device=x.device, dtype=x.dtype)
        near(m(x, Span(0, 70), state), expected[0])
        m(x, Span.of(x, doc=torch.zeros(2, 70, dtype=torch.int64)))
        assert len(calls) == 2, "asked with a state, or with documents"


def test_no_kernel_serves_a_cpu() -> None:
    assert not kernels.serves(lambda: mamba_stand_in, torch.ones(1), kernels.SINGLE)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_say_what_pure_torch_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, values and gradients, in the types in which the kernel may serve."""
    if not torch.cuda.is_available() or getattr(kernels, name)() is None:
        pytest.skip(f"NOT TESTED: {name} needs a CUDA device and its library (mamba-ssm, flash-linear-attention)")
    spec, _ = KERNELS[name]
    spec = spec.but(head_dim=64) if name != "mamba_kernel" else spec
    for dtype in type(spec.build(256)).kernel_types:  # type: ignore[attr-defined]
        torch.manual_seed(0)
        m, x = spec.build(256).to("cuda", dtype), torch.randn(2, 300, 256, device="cuda", dtype=dtype)
        x.requires_grad_()
        inputs = [x, *m.parameters()]

        def said() -> list[Tensor]:
            y = m(x, Span(0, 300))  # noqa: B023
            return [y, *torch.autograd.grad(y.float().square().mean(), inputs)]  # noqa: B023

        fast = said()
        with monkeypatch.context() as patch:
            patch.setattr("brickformer.mixers.recurrent.serves", lambda *_: False)
            exact = said()
        for got, expected in zip(fast, exact, strict=True):
            near(got.float(), expected.float(), 1e-4 if dtype is torch.float32 else 3e-2)
