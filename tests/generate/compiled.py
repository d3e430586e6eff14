"""The compiled step: the same tokens, compiled once, and what compiling takes is not called decoding.

torch.compile cannot trace the shape checker, so these tests work on a copy of the package imported without it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from mutants.world import world


@pytest.fixture(scope="module")
def copies() -> Iterator[tuple[Any, Any]]:
    """brickformer.generate and generate.worlds, both unchecked."""
    with world():
        kept = sys.modules.pop("generate.worlds", None)
        yield importlib.import_module("brickformer.generate"), importlib.import_module("generate.worlds")
        del sys.modules["generate.worlds"]
        if kept is not None:
            sys.modules["generate.worlds"] = kept


@pytest.fixture
def gen(copies: tuple[Any, Any]) -> Any:
    torch.compiler.reset()
    return copies[0]


@pytest.fixture
def worlds(copies: tuple[Any, Any]) -> Any:
    return copies[1]


def compiled(gen: Any, writer: Any, backend: str = "eager") -> Any:
    return gen.Writer(writer.model, start=writer.start, compiled=backend)


@pytest.mark.parametrize("kind", ["rope", "encoder-decoder"])
def test_the_same_tokens_from_few_graphs(kind: str, gen: Any, worlds: Any) -> None:
    """Ragged rows, then one row: a graph each, and none for another length."""
    plain = gen.Writer(worlds.decoder(depth=1)) if kind == "rope" else worlds.WRITERS[kind]()
    quick = compiled(gen, plain)
    prompts, one, graphs = worlds.PROMPTS[:2], worlds.PROMPTS[:1], []
    for asked, sampling, most in (
        (prompts, gen.GREEDY, 12),
        (one, gen.Sampling(temperature=1.0), 12),
        (prompts, gen.GREEDY, 9),
        (one, gen.GREEDY, 20),
    ):
        same(gen, quick, plain, asked, sampling, gen.Stop(max_tokens=most))
        graphs.append(quick.compiled.graphs)
    assert graphs == [1, 2, 2, 2]


def test_a_ring_takes_some_graphs_and_keeps_its_tokens(gen: Any, worlds: Any) -> None:
    plain = gen.Writer(worlds.decoder(worlds.Attention(heads=4, mask=worlds.Mask(window=3)), depth=1))
    quick = compiled(gen, plain)
    same(gen, quick, plain, worlds.PROMPTS[1:2], gen.GREEDY, gen.Stop(max_tokens=14))
    assert quick.compiled.graphs > 1


def same(gen: Any, quick: Any, plain: Any, prompts: Any, sampling: Any, stop: Any, abs: float = 1e-9) -> None:
    expected = gen.generate(plain, prompts, sampling, stop).results
    for ours, theirs in zip(gen.generate(quick, prompts, sampling, stop).results, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=abs)


def test_compiling_is_paid_once_and_counted_apart(gen: Any, worlds: Any) -> None:
    quick = compiled(gen, gen.Writer(worlds.decoder(depth=1)))
    first, second = (
        gen.generate(quick, worlds.PROMPTS[:1], gen.GREEDY, gen.Stop(max_tokens=6)).stats for _ in range(2)
    )
    assert quick.compiled.graphs > 0
    assert bool(first.compile_s) and not bool(second.compile_s)
    assert "compiled in" in str(first) and "compiled in" not in str(second)


def test_beams_are_compiled_too(gen: Any, worlds: Any) -> None:
    plain = gen.Writer(worlds.decoder(depth=1))
    quick, beam, stop = compiled(gen, plain), gen.Beam(width=3, best=3), gen.Stop(max_tokens=7)
    ours, theirs = (gen.beam_search(w, worlds.PROMPTS, beam, stop).results for w in (quick, plain))
    assert [r.tokens for r in ours] == [r.tokens for r in theirs]
    assert quick.compiled.graphs > 0


def test_machine_code_gives_the_same_tokens(gen: Any, worlds: Any) -> None:
    """The real backend, on the smallest model."""
    model = worlds.decoder(depth=1).float()
    quick = gen.Writer(model, compiled=True, max_len=8)
    for tokens in (3, 8):  # fewer than there is room for, and all there is room for: the same graph
        stop = gen.Stop(max_tokens=tokens)
        made = gen.generate(quick, [[3, 4, 5]], gen.GREEDY, stop)
        assert made.results[0].tokens == gen.generate(model, [[3, 4, 5]], gen.GREEDY, stop).results[0].tokens[:6]
        assert tokens == 3 or not made.stats.compile_s


def test_a_step_that_cannot_be_compiled_says_so(gen: Any, worlds: Any) -> None:
    """It is no row that is wrong, so it is an error of the call."""
    model = worlds.decoder(depth=1)
    model.stack.layers[0].ffn.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.raises(ValueError, match="compile: .*without compiling") as error:
        gen.generate(gen.Writer(model, compiled="eager"), worlds.PROMPTS, gen.GREEDY, gen.Stop(max_tokens=3))
    assert type(error.value).__name__ == "CompileError" and "\n" not in str(error.value)


def test_what_changes_in_a_model_changes_the_compiled_step(gen: Any, worlds: Any) -> None:
    """Weights set or put in anew are read at once; modules, hooks and types are asked for once a batch of answers."""
    model = worlds.decoder(depth=1)
    quick, stop, head = gen.Writer(model, compiled="eager"), gen.Stop(max_tokens=6), model.head.project
    graphs, logprobs = [], []

    def written() -> None:
        same(gen, quick, gen.Writer(model), worlds.PROMPTS[:1], gen.GREEDY, stop)
        graphs.append(quick.compiled.graphs)
        logprobs.append(gen.generate(model, worlds.PROMPTS[:1], gen.GREEDY, stop).results[0].logprobs)

    written()
    with torch.no_grad():
        head.weight.neg_()
    written()
    head.weight = torch.nn.Parameter(head.weight.detach() * 0.5)
    written()
    watched = head.register_forward_hook(lambda _module, _args, out: -out)
    written()
    watched.remove()
    written()
    model.float()
    same(gen, quick, gen.Writer(model), worlds.PROMPTS[:1], gen.GREEDY, stop, abs=1e-5)
    assert graphs[0] == graphs[1] == graphs[2] < graphs[3] < graphs[4] < quick.compiled.graphs
    assert all(a != b for a, b in pairwise(logprobs))


def test_one_row_in_machine_code_is_the_product(gen: Any) -> None:
    """Spelled out and compiled, in each type, with and without a bias, with inputs that are themselves computed."""
    from brickformer.product import product

    random = torch.Generator().manual_seed(0)
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7), (torch.float64, 1e-12)):
        for outputs, inputs, bias in ((7, 5, False), (33, 130, True)):
            x, w, b = (
                torch.randn(n, generator=random, dtype=torch.float64)
                for n in ((1, 1, inputs), (outputs, inputs), (outputs,))
            )
            exact = torch.nn.functional.linear(x.tanh() * 2, w, b if bias else None)
            x, w, b = x.to(dtype), w.to(dtype), b.to(dtype)
            made = torch.compile(lambda x, w, b: product(x.tanh() * 2, w, b), fullgraph=True)(x, w, b if bias else None)
            assert made.dtype is dtype and made.shape == (1, 1, outputs)
            assert float((made.double() - exact).abs().max()) <= near * float(exact.abs().max()) * 4


@pytest.mark.parametrize("scheme", ["Int8()", "Int4()", "Int4(symmetric=False)", "NF4()"])
def test_coded_weights_are_compiled_too(scheme: str, gen: Any, worlds: Any) -> None:
    """One row of int8 is spelled out, exactly; the others have the products they have anyway."""
    quant = importlib.import_module("brickformer.quant")
    model, stop = worlds.decoder(depth=1).float(), gen.Stop(max_tokens=5)
    made = quant.quantize(model, eval(scheme, vars(quant)))
    assert made
    quick = gen.Writer(model, compiled="eager")
    for prompts in (worlds.PROMPTS[:1], worlds.PROMPTS[:2]):
        ours, theirs = (gen.generate(w, prompts, gen.GREEDY, stop).results for w in (quick, model))
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.tokens == other.tokens
            assert mine.logprobs == pytest.approx(other.logprobs, abs=0.02)


def test_one_row_of_int8_in_machine_code_is_exact(gen: Any) -> None:
    quant = importlib.import_module("brickformer.quant")
    for outputs, inputs, bias in ((7, 5, False), (33, 130, True)):
        linear, x = torch.nn.Linear(inputs, outputs, bias=bias), torch.randn(1, inputs)
        coded = quant.encode(linear.weight, quant.Int8())
        divide = torch.rand(inputs) + 0.5
        ours = quant.QuantLinear(quant.Int8(), (outputs,), inputs, bias=linear.bias, divide=divide, coded=coded)
        exact = torch.nn.functional.linear(
            x.double(), ours.weight.double(), None if linear.bias is None else linear.bias.double()
        )
        with torch.no_grad():
            got = torch.compile(ours, fullgraph=True)(x)
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


def test_other_codes_in_the_same_place_are_read(gen: Any, worlds: Any) -> None:
    """What a product packed of the codes before is out of date, and packed again, lest the slow way be taken."""
    quant = importlib.import_module("brickformer.quant")
    long = [[1 + i % 9 for i in range(12)]]  # more rows than a product takes: reading it packs nothing
    model, other, stop = worlds.decoder(depth=1), worlds.decoder(depth=1, seed=5), gen.Stop(max_tokens=6)
    for m in (model, other):
        quant.quantize(m.float(), quant.Int4())
    quick = gen.Writer(model, compiled="eager")
    same(gen, quick, gen.Writer(model), long, gen.GREEDY, stop, abs=0.02)
    model.load_state_dict(other.state_dict())
    same(gen, quick, gen.Writer(other), long, gen.GREEDY, stop, abs=0.02)
    coded = [m for m in model.modules() if isinstance(m, quant.QuantLinear)]
    assert coded and all(m._kernel.product is not None for m in coded)
