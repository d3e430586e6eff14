"""The short convolution against a loop over tokens, and its own backward against finite differences."""

import pytest
import torch
from torch import Tensor

from brickformer.attend import Attend
from brickformer.feedforward import MLP
from brickformer.layers import Layer
from brickformer.mask import Span
from brickformer.mixers.pointwise import Pointwise
from brickformer.mixers.shortconv import ShortConv, _Convolution
from brickformer.models import Decoder


def by_hand(x: Tensor, weight: Tensor) -> Tensor:
    """y_t = Σ_j w_j x_{t-j}."""
    rows = []
    for t in range(x.shape[1]):
        rows.append(sum(weight[j] * x[:, t - j] for j in range(len(weight)) if t >= j))
    return torch.stack(rows, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
@pytest.mark.parametrize("kernel", [2, 4])
def test_it_is_the_sum_it_says_and_so_are_its_gradients(tokens: int, kernel: int) -> None:
    x = torch.randn(2, tokens, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(kernel, 3, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(_Convolution.apply(x, weight), by_hand(x, weight), atol=1e-12)
    assert torch.autograd.gradcheck(_Convolution.apply, (x, weight))


def test_it_starts_as_the_identity_and_the_padded_way_is_the_same_sum() -> None:
    torch.manual_seed(0)
    mixer = ShortConv(Pointwise(MLP(8)), kernel=3).build(6).double()
    x, at = torch.randn(2, 7, 6, dtype=torch.float64), Span(0, 7)
    assert torch.allclose(mixer(x, at), mixer.mixer(x, at))
    torch.nn.init.normal_(mixer.weight)
    placed = Span(0, 7, torch.arange(7).expand(2, 7))  # the same places, told one by one
    assert torch.allclose(mixer(x, placed), mixer(x, at), atol=1e-12)
    assert torch.allclose(mixer(x, at), mixer.mixer(by_hand(x, mixer.weight), at), atol=1e-12)


def test_numbers_of_two_formats_meet_as_they_do_elsewhere() -> None:
    mixer = ShortConv(Pointwise(MLP(8)), kernel=3).build(6)
    with torch.autocast("cpu", torch.bfloat16):
        out = mixer(torch.randn(2, 5, 6).bfloat16().requires_grad_(), Span(0, 5))
        out.float().sum().backward()
    assert mixer.weight.grad is not None and bool(mixer.weight.grad.isfinite().all())


def test_a_layer_may_be_the_mixer_alone() -> None:
    """Pointwise alone in a layer is that layer's feed-forward: the same weights, the same logits."""
    torch.manual_seed(0)
    whole = Decoder(11, 8, (Layer(ShortConv(Pointwise(MLP(12)), kernel=2), MLP(16)),)).build().double()
    parts = Decoder(11, 8, (Layer(ShortConv(Pointwise(MLP(12)), kernel=2)), Layer(Pointwise(MLP(16))))).build().double()
    moved = {}
    for name, value in whole.state_dict().items():
        name = name.replace("layers.0.ffn", "layers.1.mixer.ffn").replace(
            "layers.0.around_ffn", "layers.1.around_mixer"
        )
        moved[name] = value
    parts.load_state_dict(moved)
    ids = torch.randint(11, (2, 9))
    assert torch.equal(parts(ids), whole(ids))
    assert not any(isinstance(m, Attend) for m in parts.modules())
