"""A fused call says only what it gave: the map that is computed again must explain it, or the page says so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brickformer.look import foreign

LETTERS = list("abcdef")
HIDDEN = torch.ones(6, 6, dtype=torch.bool).tril()
CALLS: dict[str, dict[str, Any]] = {
    "everything": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": HIDDEN},
    "added": {"attn_mask": torch.zeros(6, 6).masked_fill(~HIDDEN, torch.finfo(torch.float32).min)},
    "a row that sees nothing": {"attn_mask": HIDDEN & (torch.arange(6) != 5)[:, None]},
    "scaled": {"scale": 0.7},
    "grouped": {"enable_gqa": True},
}


class Fused(nn.Module):
    def __init__(self, call: dict[str, Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        k = q[:, ::2] if "enable_gqa" in self.call else q
        return F.scaled_dot_product_attention(q, k.flip(-1), k, **self.call)


class Layers(nn.Module):
    def __init__(self, *calls: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Fused(call) for call in calls)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_said_of_maps_that_explain_what_came_out(dtype: torch.dtype) -> None:
    calls = [
        {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}
        for call in CALLS.values()
    ]
    view = foreign(Layers(*calls), torch.randn(1, 6, 32).to(dtype), labels=LETTERS, remove=False)
    assert len(view.maps) == len(CALLS) and view.left_out == []


def test_dropout_in_eval_is_said_of_the_module_that_has_it() -> None:
    model = Layers({}, {"dropout_p": 0.5}, {})
    view = foreign(model, torch.randn(1, 6, 32), labels=LETTERS, remove=False)
    ((english, chinese),) = view.left_out
    assert english.startswith("Not what was used: the maps of layers.1 times the values")
    assert "layers.1 " in chinese


def test_dropout_of_torch_own_module_in_eval_is_said() -> None:
    model = nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=True)
    forward, x = F.multi_head_attention_forward, torch.randn(1, 6, 32)

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1)
            args = x, x, x, 32, 4, model.in_proj_weight, model.in_proj_bias, None, None, False, 0.5
            return forward(*args, model.out_proj.weight, model.out_proj.bias, training=True, need_weights=False)[0]

    ((english, _),) = foreign(Dropping(), x, labels=LETTERS, remove=False).left_out
    assert english.startswith("Not what was used: the maps of the model")


def test_falcon_is_seen_as_it_computes() -> None:
    """Its fused form adds ALiBi to the mask. The weights are those of the formula: softmax((q·k + slope · j) / √K)."""
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True)
    config._attn_implementation = "sdpa"
    model = FalconForCausalLM(config).eval()
    heard: list[Tensor] = []
    model.transformer.h[0].self_attention.query_key_value.register_forward_hook(lambda m, a, out: heard.append(out))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5 * torch.randn_like(p))
    view = foreign(model, torch.tensor([[1, 2, 3, 4, 5, 1]]), labels=LETTERS, remove=False)
    q, k = heard[0][0].float().split([32, 8, 8], -1)[:2]
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / 4) for h in range(4)])
    scores = torch.einsum("thk,sk->hts", q.unflatten(-1, (4, 8)), k) + slopes[:, None, None] * torch.arange(6.0)
    expected = (scores / math.sqrt(8)).masked_fill(~HIDDEN, -math.inf).softmax(-1)
    torch.testing.assert_close(view.maps[0].weights, expected, rtol=1e-4, atol=1e-5)
    assert view.left_out == []
