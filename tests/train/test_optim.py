"""Which optimizer moves which parameter, AdamW against its formula and torch's, and states that survive saving."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from train.toys import Toy, forward, ragged

from brickformer.embed import Head, TokenEmbedding
from brickformer.errors import RunError, SpecError
from brickformer.spec import read
from brickformer.train.losses import cross_entropy
from brickformer.train.muon import MuonOptimizer
from brickformer.train.optim import AdamW, Muon, Optimizers, OptimSpec, Parameters


class WithHead(nn.Module):
    """The kit's own table and head, tied or not, round one hidden layer; and a convolution and a bare parameter."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = TokenEmbedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.conv = nn.Conv1d(6, 6, 3)
        self.bare = nn.Parameter(torch.ones(6, 6))
        self.head = Head(tied=tied, bias=True).build(self.tokens, 6)


def names(model: nn.Module, params: list[nn.Parameter]) -> set[str]:
    known = {p: name for name, p in model.named_parameters()}
    return {known[p] for p in params}


def test_parameters_are_sorted_by_the_module_that_holds_them() -> None:
    model = WithHead(tied=False)
    found = Parameters.of(model)
    assert names(model, found.matrices) == {"hidden.weight"}
    assert names(model, found.heads) == {"head.project.weight", "conv.weight"}
    assert names(model, found.rest) == {"tokens.weight", "hidden.bias", "conv.bias", "bare", "head.project.bias"}


def test_a_tied_head_is_a_table() -> None:
    model = WithHead(tied=True)
    found = Parameters.of(model)
    assert names(model, found.matrices) == {"hidden.weight"}
    assert names(model, found.heads) == {"conv.weight"}
    assert "tokens.weight" in names(model, found.rest)


def test_parts_follow_their_matrices_and_frozen_parameters_stay_out() -> None:
    model = Toy()
    model.down.requires_grad_(False)
    found = Parameters.of(model)
    parts = dict(zip(names(model, found.matrices[:1]) | names(model, found.matrices[1:]), found.parts, strict=True))
    assert names(model, found.matrices) == {"up.weight", "out.weight"}
    assert sorted(parts.values()) == [(11,), (12, 12)]
    assert names(model, found.rest) == {"embed.weight", "up.bias", "norm.weight", "norm.bias"}


@pytest.mark.parametrize("spec", [AdamW(), Muon()])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_has_one_optimizer_and_tables_and_vectors_do_not_decay(spec: OptimSpec, tied: bool) -> None:
    model = WithHead(tied)
    spec = spec.but(weight_decay=0.3)
    optim = spec.build(model)
    assert sorted(map(id, optim.params)) == sorted(id(p) for p in model.parameters())
    decay = {optim.names[p]: group["weight_decay"] for group in optim.groups for p in group["params"]}
    assert decay["hidden.weight"] == 0.3
    for name in ("tokens.weight", "hidden.bias", "bare", "head.project.bias"):
        assert decay[name] == 0.0
    muon = [o for o in optim.optimizers if isinstance(o, MuonOptimizer)]
    assert [names(model, o.param_groups[0]["params"]) for o in muon] == [{"hidden.weight"}] * isinstance(spec, Muon)


def gradients(model: nn.Module, step: int) -> None:
    batch = ragged(step, 4)
    total, count = cross_entropy(forward(model, batch), batch.targets)
    (total / count).backward()


def test_adamw_equals_its_formula() -> None:
    """arXiv 1711.05101, algorithm 2, in float64 beside the model; decay on matrices only."""
    spec = AdamW(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    model = Toy().double()
    optim = spec.build(model)
    decayed = {"up.weight", "down.weight", "out.weight"}
    w = {name: p.detach().clone() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(p) for name, p in w.items()}
    v = {name: torch.zeros_like(p) for name, p in w.items()}
    for t in range(1, 5):
        gradients(model, t)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optim.set_factor(0.5 * t)
        optim.step()
        optim.zero_grad()
        lr = 0.01 * 0.5 * t
        for name, g in grads.items():
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            step = (m[name] / (1 - 0.8**t)) / ((v[name] / (1 - 0.95**t)).sqrt() + 1e-6)
            w[name] = w[name] * (1 - lr * (0.2 if name in decayed else 0.0)) - lr * step
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), w[name], rtol=1e-9, atol=1e-11)


def test_the_rest_of_muon_is_torchs_adamw() -> None:
    model, reference = Toy(seed=3), Toy(seed=3)
    optim = Muon(rest=AdamW(lr=0.02, betas=(0.9, 0.95), weight_decay=0.0)).build(model)
    rest = {
        name: p for name, p in reference.named_parameters() if name not in ("up.weight", "down.weight", "out.weight")
    }
    adam = torch.optim.AdamW(rest.values(), lr=0.02, betas=(0.9, 0.95), weight_decay=0.0, foreach=False, fused=False)
    for t in range(3):
        gradients(model, t)
        for name, p in model.named_parameters():
            if name in rest:
                assert p.grad is not None
                rest[name].grad = p.grad.clone()
        optim.step()
        adam.step()
        optim.zero_grad()
        for name, p in rest.items():
            torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-6, atol=1e-7)


def test_every_learning_rate_is_its_base_times_the_factor() -> None:
    optim = Muon(lr=0.02, rest=AdamW(lr=0.004)).build(Toy())
    for factor in (0.5, 0.25, 1.0):
        optim.set_factor(factor)
        assert {group["lr"] for group in optim.groups} == {0.02 * factor, 0.004 * factor}
        assert optim.lr == 0.02 * factor


@pytest.mark.parametrize("spec", [AdamW(lr=0.01), Muon()])
def test_restored_optimizers_go_on_with_the_same_bits(spec: OptimSpec) -> None:
    model = Toy()
    optim = spec.build(model)
    assert optim.tensors() == {}
    for t in range(3):
        gradients(model, t)
        optim.step()
        optim.zero_grad()
    saved = {name: value.clone() for name, value in optim.tensors().items()}
    assert {name.rpartition(".")[0] for name in saved} == {name for name, _ in model.named_parameters()}

    kept = {name: value.clone() for name, value in saved.items()}
    other = Toy(seed=9)
    other.load_state_dict(model.state_dict())
    again = spec.build(other)
    again.restore(saved)
    for t in range(3, 6):
        for m, o in ((model, optim), (other, again)):
            gradients(m, t)
            o.set_factor(1 / t)
            o.step()
            o.zero_grad()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert all(torch.equal(value, again.tensors()[name]) for name, value in optim.tensors().items())
    assert all(torch.equal(value, kept[name]) for name, value in saved.items()), "what was saved is not to be touched"


def stepped(spec: OptimSpec) -> dict[str, Tensor]:
    model = Toy()
    optim = spec.build(model)
    gradients(model, 0)
    optim.step()
    return optim.tensors()


def test_a_state_of_another_optimizer_or_model_is_refused() -> None:
    with pytest.raises(RunError, match="up.weight.*expected momentum.*another optimizer"):
        Muon().build(Toy()).restore(stepped(AdamW()))
    with pytest.raises(RunError, match="up.weight.*got momentum.*expected exp_avg"):
        AdamW().build(Toy()).restore(stepped(Muon()))
    with pytest.raises(RunError, match="no parameter of the model"):
        AdamW().build(nn.Linear(2, 2)).restore(stepped(AdamW()))


def test_nothing_to_train_is_refused() -> None:
    frozen = Toy().requires_grad_(False)
    with pytest.raises(SpecError, match="nothing to train"):
        AdamW().build(frozen)
    with pytest.raises(SpecError, match="no hidden nn.Linear.*Use AdamW"):
        Muon().build(nn.Embedding(3, 4))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"kind": "adamw", "lr": -1.0}, "spec.lr"),
        ({"kind": "adamw", "betas": [0.9, 1.0]}, "spec.betas"),
        ({"kind": "adamw", "eps": 0.0}, "spec.eps"),
        ({"kind": "adamw", "weight_decay": -0.1}, "spec.weight_decay"),
        ({"kind": "muon", "momentum": 1.0}, "spec.momentum"),
        ({"kind": "muon", "iterations": 1}, "spec.iterations.*2 to 6"),
        ({"kind": "muon", "scale": "shapes"}, "did you mean 'shape'"),
        ({"kind": "muon", "lr": -1}, "spec.lr"),
        ({"kind": "muon", "weight_decay": -1}, "spec.weight_decay"),
        ({"kind": "adam"}, "did you mean 'adamw'"),
    ],
)
def test_settings_that_cannot_be_are_refused(data: dict[str, object], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        read(OptimSpec, data)


def test_it_says_who_moves_what() -> None:
    assert Muon().build(Toy()).describe() == "Muon on 3 tensors (376 numbers), AdamW on 5 tensors (136 numbers)"
    assert AdamW().build(Toy()).describe() == "AdamW on 8 tensors (512 numbers)"
    assert math.prod((24, 8)) + 12 * 8 + 11 * 8 == 376


def test_the_fused_kernel_is_used_on_a_cpu() -> None:
    optim: Optimizers = AdamW().build(Toy())
    assert [o.defaults["fused"] for o in optim.optimizers] == [True]
