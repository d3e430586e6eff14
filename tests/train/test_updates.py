"""The size of a step by group: against two copies of the weights, and not shown where a validation is."""

from __future__ import annotations

import torch
from torch import nn

from brickformer.train.log import is_validation, shown
from brickformer.train.updates import group, measured


def test_the_ratio_is_the_length_of_the_step_over_that_of_the_weights() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "ffn": nn.Linear(3, 4), "norm": nn.LayerNorm(3)}).double()
    nn.init.normal_(model["norm"].bias)
    flat = {
        n: torch.cat([p.detach().flatten() for p in model[n].parameters()]).clone() for n in ("embed", "ffn", "norm")
    }
    found: dict[str, torch.Tensor] = {}
    with measured(model, found), torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    assert set(found) == {"update.embed", "update.ffn", "update.norm"}
    for name, before in flat.items():
        after = torch.cat([p.detach().flatten() for p in model[name].parameters()])
        torch.testing.assert_close(
            found[f"update.{name}"].double(), (after - before).norm() / before.norm(), rtol=1e-5, atol=0
        )


def test_a_large_parameter_is_sampled_and_weighs_what_it_weighs() -> None:
    model = nn.ModuleDict({"ffn": nn.Linear(700, 700), "other": nn.ModuleDict({"ffn": nn.Linear(3, 3)})})
    before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    found: dict[str, torch.Tensor] = {}
    with measured(model, found), torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.01)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(found["update.ffn"], (after - before).norm() / before.norm(), rtol=0.02, atol=0)


def test_groups() -> None:
    names = {
        "decoder.stack.layers.0.mixer.qkv.weight": "mixer",
        "stack.layers.3.around_ffn.into.weight": "norm",
        "stack.layers.3.mixer.q_norm.weight": "norm",
        "decoder.embed.tokens.weight": "embed",
        "head.project.weight": "head",
        "stack.layers.0.cross.kv.weight": "cross",
        "anything.weight": "rest",
    }
    assert {name: group(name) for name in names} == names


def test_they_are_kept_and_not_shown() -> None:
    record = {"step": 1.0, "loss": 0.5, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 9.0, "update.ffn": 1e-3}
    assert not is_validation(record) and "update" not in shown(record)
    assert is_validation({**record, "val_loss": 0.4}) and "val loss" in shown({**record, "val_loss": 0.4})
