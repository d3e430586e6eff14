"""Run by test_recurrent_compile.py in a process of its own: torch.compile cannot trace the shape checker of pytest."""

from __future__ import annotations

import torch
import torch._dynamo
from mixers.recurrences import gradients, shaken
from torch._dynamo.testing import CompileCounterWithBackend

from brickformer.mask import Span
from brickformer.mixers.base import MixerSpec
from brickformer.mixers.delta import GatedDelta
from brickformer.mixers.mamba import Mamba
from brickformer.mixers.mamba2 import Mamba2

DIM, TOKENS = 12, 12


def check(spec: MixerSpec) -> None:
    """One graph forward, one backward, and for a prompt and eight steps no more graphs than for two steps."""
    m, x = shaken(spec.build(DIM)), torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    params, whole = list(m.parameters()), m(x, Span(0, TOKENS))

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    said = torch.compile(m, fullgraph=True, backend=counter)(x, Span(0, TOKENS))
    assert counter.frame_count == 1, counter.frame_count
    torch.testing.assert_close(said, whole)
    for got, expected in zip(gradients(said, params), gradients(whole, params), strict=True):
        torch.testing.assert_close(got, expected)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(m, fullgraph=True, backend=counter)
    state, counts = m.init_state(2, TOKENS, device=x.device, dtype=x.dtype), []
    with torch.no_grad():
        for begin, end in [(0, 4), *((i, i + 1) for i in range(4, TOKENS))]:
            torch.testing.assert_close(run(x[:, begin:end], Span(begin, end - begin), state), whole[:, begin:end])
            counts.append(counter.frame_count)
    assert counts[-1] == counts[2] <= 3, counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for each in (Mamba(state=3), Mamba2(head_dim=6, state=4), GatedDelta(heads=2)):
        check(each)
    print("compiled")
