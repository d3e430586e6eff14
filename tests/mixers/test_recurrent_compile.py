"""torch.compile on linear recurrences: one graph without a break, and one graph for all decode steps.

It cannot trace the shape checker, so these tests work on a copy of the package that is imported without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch._dynamo
from mutants.world import world
from torch._dynamo.testing import CompileCounterWithBackend


@pytest.fixture
def copy() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The bricks and the checks on an unchecked copy of the package; no graph from another test."""
    torch._dynamo.reset()
    with world() as modules:
        yield modules
    torch._dynamo.reset()


@pytest.mark.parametrize("mixer", ["mamba", "mamba2", "delta"])
def test_one_graph(copy: tuple[ModuleType, ModuleType], mixer: str) -> None:
    bricks, checks = copy
    model = bricks.Cell(mixer=mixer, position="none").build()
    ids = checks.draw(model, tokens=14)
    whole = model(ids)

    def gradients(said: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(said.logsumexp(-1).square().sum(), list(model.parameters())))

    counter = CompileCounterWithBackend("aot_eager")
    learned = gradients(torch.compile(model, fullgraph=True, backend=counter)(ids))
    assert counter.frame_count == 1
    for (name, _), got, expected in zip(model.named_parameters(), learned, gradients(whole), strict=True):
        checks.close(got, expected, f"gradient of {name}")

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    run, state = torch.compile(model, fullgraph=True, backend=counter), model.init_state(2, 14)
    with torch.no_grad():
        for begin, end in [(0, 4), *((i, i + 1) for i in range(4, 14))]:
            checks.close(run(ids[:, begin:end], None, state), whole[:, begin:end], f"tokens from {begin}")
    assert counter.frame_count == 2, "a graph for the prompt, and one for every step after it"
