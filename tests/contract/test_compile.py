"""torch.compile: one graph without a break, the same numbers. Kept to a few models: compiling costs seconds.

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

World = tuple[ModuleType, ModuleType]


@pytest.fixture
def copy() -> Iterator[World]:
    """The bricks and the checks on an unchecked copy of the package; no graph from another test."""
    torch._dynamo.reset()
    with world() as modules:
        yield modules
    torch._dynamo.reset()


def test_forward_compiled_to_machine_code(copy: World) -> None:
    bricks, checks = copy
    model = bricks.Cell(mixer="gqa").build()
    ids = checks.draw(model)
    with torch.no_grad():
        got = torch.compile(model, fullgraph=True, backend="inductor")(ids)
    checks.close(got, model(ids), "inductor")


def test_training_step_in_one_graph(copy: World) -> None:
    """Forward and backward of an encoder-decoder, padding included, through AOTAutograd."""
    bricks, checks = copy
    cell = bricks.Cell("encoder_decoder", mixer="normed", position="t5bias", absolute="learned", cross="gqa")
    model = cell.build()
    src, tgt = checks.draw(model, tokens=7, seed=3), checks.draw(model)
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[1, -3:] = False

    def gradients(run: torch.nn.Module) -> list[torch.Tensor]:
        loss = torch.logsumexp(run(src, tgt, valid), -1).square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    counter = CompileCounterWithBackend("aot_eager")
    compiled = gradients(torch.compile(model, fullgraph=True, backend=counter))
    assert counter.frame_count == 1
    for (name, _), got, expected in zip(model.named_parameters(), compiled, gradients(model), strict=True):
        checks.close(got, expected, f"gradient of {name}")


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_sixteen_decode_steps_do_not_compile_sixteen_times(copy: World, family: str) -> None:
    """A prefill, the first step, and one graph for every step after it."""
    bricks, checks = copy
    model = bricks.Cell(family, mixer="gqa", cross="mha" if family == "encoder_decoder" else "none").build()
    with torch.no_grad():
        ids, memory = checks.draw(model, tokens=20), checks.memory_of(model)
        expected = checks.say(model, ids, memory=memory)
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(model if family == "decoder" else model.decode, fullgraph=True, backend=counter)
    with torch.no_grad():
        state, counts = model.init_state(2, 20), []
        for begin, end in [(0, 4), *((i, i + 1) for i in range(4, 20))]:
            piece = ids[:, begin:end]
            got = run(piece, None, state) if memory is None else run(piece, memory, None, state)
            checks.close(got, expected[:, begin:end], f"tokens {begin} to {end - 1}")
            counts.append(counter.frame_count)
    assert counts[0] == 1
    assert counts[-1] <= 3, f"graphs compiled after each call: {counts}"
