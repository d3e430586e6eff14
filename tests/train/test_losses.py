"""Losses against the formula written out, token by token."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from brickformer.train.losses import IGNORE, cross_entropy


def by_hand(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> tuple[float, int]:
    """-Σ_t Σ_v q(v) log p(v) in plain Python; q = (1-ε) one-hot + ε/V."""
    total, count = 0.0, 0
    for row, wanted in zip(logits.flatten(0, -2).tolist(), targets.flatten().tolist(), strict=True):
        if wanted == -100:
            continue
        count += 1
        log_sum = math.log(sum(math.exp(z) for z in row))
        for v, z in enumerate(row):
            q = smoothing / len(row) + (1 - smoothing if v == wanted else 0.0)
            total -= q * (z - log_sum)
    return total, count


def example() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(3, 5, 7, dtype=torch.float64)
    targets = torch.randint(7, (3, 5))
    targets[0, 3:] = IGNORE
    targets[2] = IGNORE
    return logits, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_sum_and_count_are_those_of_the_formula(smoothing: float) -> None:
    logits, targets = example()
    total, count = cross_entropy(logits, targets, smoothing)
    expected, number = by_hand(logits, targets, smoothing)
    assert total.item() == pytest.approx(expected, rel=1e-12)
    assert count.item() == number == 8


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_mean_is_torchs(smoothing: float) -> None:
    logits, targets = example()
    total, count = cross_entropy(logits, targets, smoothing)
    reference = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, label_smoothing=smoothing)
    torch.testing.assert_close(total / count, reference)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_padding_has_neither_value_nor_gradient(smoothing: float) -> None:
    logits, targets = example()
    shifted = torch.where((targets == IGNORE)[..., None], logits + 1e6, logits).requires_grad_()
    total, _ = cross_entropy(shifted, targets, smoothing)
    torch.testing.assert_close(total, cross_entropy(logits, targets, smoothing)[0])
    total.backward()
    assert shifted.grad is not None
    assert shifted.grad[targets == IGNORE].eq(0).all()
    assert shifted.grad[targets != IGNORE].ne(0).all()


def test_parts_add_up_to_the_whole_however_ragged() -> None:
    logits, targets = example()
    parts = [cross_entropy(logits[i : i + 1], targets[i : i + 1], 0.1) for i in range(3)]
    total, count = cross_entropy(logits, targets, 0.1)
    torch.testing.assert_close(sum(t for t, _ in parts), total)
    assert sum(int(n) for _, n in parts) == int(count)


def test_nothing_to_say_costs_nothing() -> None:
    total, count = cross_entropy(torch.randn(2, 3, 5), torch.full((2, 3), IGNORE))
    assert (total.item(), count.item()) == (0.0, 0)


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits = torch.randn(1, 2000, 7).bfloat16()
    targets = torch.randint(7, (1, 2000))
    total, _ = cross_entropy(logits, targets)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), cross_entropy(logits.double(), targets)[0], rtol=1e-5, atol=0)
