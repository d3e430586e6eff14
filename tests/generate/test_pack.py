"""Packed weights: the same numbers up to the order of sums, for one row; never those of earlier weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from generate.worlds import DECODERS, PROMPTS, Letters, encoder_decoder, lively
from torch import Tensor, nn

from brickformer import GLU, Attention, Decoder, Head, Layer, Rope, llama
from brickformer.errors import BrickError
from brickformer.generate import Beam, Sampling, Stop, Writer, beam_search, generate, read_prompt, stream
from brickformer.generate.pack import Packed, _product
from brickformer.models import DecoderModel

STOP = Stop(max_tokens=8)


def both(writer: Writer) -> tuple[Writer, Writer]:
    """The writer in float32, packed and not."""
    writer.model.float()
    return Writer(writer.model, start=writer.start, packed=True), Writer(writer.model, start=writer.start)


def used(model: nn.Module) -> list[Callable[[Tensor], Tensor]]:
    """The products that a model calls instead of nn.Linear's own."""
    return [m.__dict__["forward"] for m in model.modules() if "forward" in m.__dict__]


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (40, 4), (1, 9)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@torch.no_grad()
def test_a_packed_product_is_the_product(
    shape: tuple[int, int], bias: bool, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # each takes a share of the columns
    outputs, inputs = shape
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    product = _product(linear)
    if product is None:
        assert dtype is torch.bfloat16
        pytest.skip("oneDNN has no bfloat16 on this processor")
    for size in ((1, 1, inputs), (inputs,), (3, 1, inputs), (1, 2, inputs), (2, 2, inputs)):
        x = torch.randn(size).to(dtype)
        expected = nn.functional.linear(x.double(), linear.weight.double(), None if not bias else linear.bias.double())
        got = product(x)
        assert got.dtype is dtype
        near = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(got.double(), expected, rtol=near, atol=near)


def test_what_is_not_known_to_be_faster_is_left_alone() -> None:
    assert _product(nn.Linear(3, 3, dtype=torch.float64)) is None
    assert _product(nn.Linear(3, 3, dtype=torch.float16)) is None
    assert _product(nn.Linear(3, 9, device="meta")) is None


WRITERS = {
    **{name: (lambda make=make: Writer(make())) for name, make in DECODERS.items()},
    "encoder-decoder": lambda: Writer(encoder_decoder(), start=[1]),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_the_same_tokens(kind: str) -> None:
    packed, plain = both(WRITERS[kind]())
    drawn = Sampling(temperature=0.7, seed=2)
    for sampling in (Sampling(), drawn):
        for prompt in PROMPTS[:2]:
            ours, theirs = (generate(w, [prompt], sampling, STOP).results[0] for w in (packed, plain))
            assert ours.tokens == theirs.tokens
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    together = [r.tokens for r in generate(packed, PROMPTS, stop=STOP).results]
    assert together == [r.tokens for r in generate(plain, PROMPTS, stop=STOP).results]
    one = beam_search(packed, PROMPTS[:1], Beam(width=1), STOP).results[0].tokens
    assert one == together[0]
    assert packed.packed is not None and used(packed.packed.fresh())


def test_the_twin_shares_all_but_its_products() -> None:
    model = llama(vocab=50, dim=32, depth=2, heads=4).build().eval()
    twin = Packed(model).fresh()
    assert type(twin) is DecoderModel and twin is not model
    ours, theirs = dict(twin.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)
    made = 2 * (4 + 2) + 1
    assert len(used(twin)) == made and not used(model), "four maps and two residuals a layer, and the head"
    seen: list[int] = []
    model.stack.layers[0].mixer.attend.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        twin(torch.tensor([[1]]))
    assert seen, "a hook set on the model sees its twin"


def test_weights_that_change_are_packed_again() -> None:
    """A step of training, other weights loaded, a parameter replaced: the next answer is of the new ones."""
    spec = Decoder(17, 16, (Layer(Attention(heads=4, position=Rope()), GLU(24)),), head=Head(tied=False))
    writer, plain = both(Writer(lively(spec.build(), 0)))
    other = lively(spec.build(), 1).float()

    def differs() -> None:
        before = generate(writer, PROMPTS[:1], stop=STOP).results[0].logprobs
        yield
        now, expected = (generate(w, PROMPTS[:1], stop=STOP).results[0] for w in (writer, plain))
        assert now.logprobs != pytest.approx(before, abs=1e-3), "nothing was changed: this test says nothing"
        assert now.logprobs == pytest.approx(expected.logprobs, abs=1e-4)

    def train() -> None:
        optimizer = torch.optim.SGD(writer.model.parameters(), lr=1.0)
        writer.model(torch.tensor([[1, 2, 3]])).square().mean().backward()
        optimizer.step()

    def replace() -> None:
        writer.model.stack.layers[0].ffn.out.weight.data = torch.randn(16, 24)

    for change in (train, lambda: writer.model.load_state_dict(other.state_dict()), replace):
        check = differs()
        next(check)
        change()
        next(check, None)


def test_prompts_and_streams_go_on_from_packed_weights() -> None:
    model = DECODERS["rope"]().float()
    writer, plain = Writer(model, Letters(), packed=True), Writer(model, Letters())
    whole = generate(plain, [PROMPTS[0]], stop=STOP).results[0]
    assert "".join(stream(writer, PROMPTS[0], stop=STOP)) == whole.text
    prefix = read_prompt(plain, PROMPTS[0])
    writer = Writer(model, Letters(), packed=True)
    assert generate(writer, [[]], stop=STOP, prefix=prefix).results[0].tokens == whole.tokens
    assert used(writer._single)


def test_it_is_not_compiled_too() -> None:
    with pytest.raises(BrickError, match="compiled or packed, not both"):
        Writer(DECODERS["rope"](), compiled="eager", packed=True)
