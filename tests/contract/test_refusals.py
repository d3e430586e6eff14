"""What cannot be done is refused when it is built or called: where, what was found, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract.bricks import Cell
from contract.checks import draw, memory_of, say

from brickformer.embed import Embed, Head
from brickformer.errors import BrickError, SpecError, StateError
from brickformer.feedforward import GLU, MLP
from brickformer.layers import Layer, pattern
from brickformer.mask import FULL, Mask, Span
from brickformer.mixers.attention import Attention
from brickformer.mixers.cross import Cross
from brickformer.mixers.delta import GatedDelta
from brickformer.mixers.latent import LatentAttention
from brickformer.mixers.lstm import LSTM
from brickformer.mixers.mamba2 import Mamba2
from brickformer.models import Decoder, DecoderModel, Encoder, EncoderDecoder, EncoderDecoderModel
from brickformer.moe import MoE, Router
from brickformer.norms import DynamicTanh, LayerNorm, OffsetRMSNorm, RMSNorm, ScaleNorm
from brickformer.positions import Alibi, Learned, Llama3, Ntk, Randomized, Rope, Sinusoid, Yarn
from brickformer.shapes import shapes_of

LAYER = Layer(Attention(4), MLP(8))
TWO_WAY = Layer(Attention(4, mask=FULL), MLP(8))
READER = Layer(Attention(4), MLP(8), cross=Cross(4))
HUGE = 2**31 - 1
WIDE = Attention(HUGE, head_dim=HUGE)  # more rows than any tensor may have
RESIDUAL = Attention(4, value_residual=True)
ENCODER, READING = Encoder(11, 16, (TWO_WAY,)), Decoder(11, 16, (READER,))

BUILDS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Attention(0), "attention.heads: got 0, expected at least 1"),
    (lambda: Attention(4, kv_heads=3), "attention.kv_heads: got 3, expected a divisor of heads=4: 1, 2, 4"),
    (lambda: Attention(4, kv_heads=0), "attention.kv_heads: got 0"),
    (lambda: Attention(4, dropout=1.0), "attention.dropout: got 1.0, expected a probability from 0 to below 1"),
    (lambda: Attention(4, softcap=0.0), "attention.softcap: got 0.0, expected a cap above 0"),
    (lambda: Attention(4, mask=Mask(window=-1)), "mask.window: got -1, expected at least 1"),
    (lambda: Attention(4, mask=Mask(window=0)), "mask.window: got 0, expected at least 1 (the token itself)"),
    (lambda: MoE(2, GLU(8), Router(top_k=3)), "moe.experts: got 2, expected at least router.top_k = 3. Add experts"),
    (lambda: MoE(0, GLU(8)), "moe.experts: got 0, expected at least 1"),
    (lambda: Router(top_k=0), "router.top_k: got 0, expected at least 1"),
    (lambda: Rope(width=3), "rope.width: got 3, expected an even number, at least 2: rotary turns pairs"),
    (lambda: Attention(4, position=Rope(width=6)).build(16), "rope.width: got 6, expected at most the head width, 4"),
    (lambda: Attention(2, head_dim=3, position=Rope()).build(16), "rope: got a head width of 3, expected an even one"),
    (lambda: Attention(4, position=Learned(9)), "attention.position: got Learned(max_len=9)"),  # type: ignore[arg-type]
    (lambda: Embed(position=Rope()), "embed.position: got Rope()"),  # type: ignore[arg-type]
    (
        lambda: Decoder(11, 16, (LAYER,), embed=Embed(randomized=Randomized(range=64))).build(),
        "decoder.embed.randomized: got Randomized(range=64), but no brick reads places",
    ),
    (
        lambda: Encoder(
            11, 16, (Layer(Attention(4, mask=FULL, position=Alibi()), MLP(8)),), Embed(randomized=Randomized(range=64))
        ).build(),
        "encoder.embed.randomized: got Randomized(range=64), but no brick reads places",
    ),
    (
        lambda: Decoder(11, 16, (Layer(LSTM(), MLP(8)), Layer(RESIDUAL, MLP(8)))).build(),
        "layers.1.mixer: takes values of 4 heads of width 4; the first layer gives no values",
    ),
    (
        lambda: Decoder(11, 16, (Layer(Attention(4, kv_heads=2), MLP(8)), Layer(RESIDUAL, MLP(8)))).build(),
        "the first layer gives 2 heads of width 4. Give the first layer such an attention",
    ),
    (
        lambda: Layer(Attention(4), MLP(8), place="post", arrange="parallel_norms"),
        "layer.place: got 'post', expected 'pre' when arrange is 'parallel_norms'",
    ),
    (lambda: Layer(Attention(4), MLP(8), cross=Cross(4), arrange="parallel_norms"), "layer.arrange: got 'parallel_n"),
    (
        lambda: Attention(3).build(16),
        "attention.heads: got 3, expected a divisor of dim=16 (1, 2, 4, 8), or give head_dim",
    ),
    (lambda: Attention(4, head_dim=0).build(16), "attention.head_dim: got 0, expected at least 1"),
    (lambda: Attention(4, softcap=2.0, backend="sdpa").build(16), "'sdpa' cannot cap scores"),
    (lambda: Attention(4, dropout=0.1, backend="flex").build(16), "'flex' cannot drop weights"),
    (lambda: Attention(16, position=Rope()).build(16), "rope: got a head width of 1, expected an even one"),
    (lambda: Cross(3, kv_heads=2), "cross.kv_heads: got 2, expected a divisor of heads=3"),
    (lambda: Cross(3).build(16), "cross.heads: got 3, expected a divisor of dim=16"),
    (lambda: MLP(0), "mlp.hidden: got 0, expected at least 1"),
    (lambda: MLP(8, activation="swish"), "mlp.activation: got 'swish'"),  # type: ignore[arg-type]
    (lambda: GLU(8, dropout=-0.1), "glu.dropout: got -0.1"),
    (lambda: Layer(Attention(4), MLP(8), place="post", arrange="parallel"), "layer.place: got 'post', expected 'pre'"),
    (lambda: Layer(Attention(4), MLP(8), cross=Cross(4), arrange="parallel"), "layer.arrange: got 'parallel'"),
    (lambda: pattern([LAYER, LAYER], 3), "pattern(): got depth=3 for a unit of 2, expected a positive multiple"),
    (lambda: pattern([LAYER], 0), "pattern(): got depth=0"),
    (lambda: pattern([], 2), "pattern(): got depth=2 for a unit of 0"),
    (lambda: Head(softcap=-1.0), "head.softcap: got -1.0, expected a cap above 0"),
    (lambda: Embed(dropout=2.0), "embed.dropout: got 2.0"),
    (lambda: Decoder(0, 16, (LAYER,)), "decoder.vocab: got 0, expected at least 1"),
    (lambda: Decoder(11, 0, (LAYER,)), "decoder.dim: got 0, expected at least 1"),
    (
        lambda: Decoder(11, 16, ()).build(),
        "layers: got none, expected at least one. Use pattern([Layer(...)], depth=...)",
    ),
    (lambda: Decoder(11, 18, (LAYER, LAYER)).build(), "layers.0: attention.heads: got 4, expected a divisor of dim=18"),
    (
        lambda: Decoder(11, 16, (LAYER, TWO_WAY)).build(),
        "decoder.layers.1.mixer: sees the future, which a decoder must not",
    ),
    (lambda: Decoder(11, 16, (LAYER, READER)).build(), "decoder.layers.1.cross: there is no memory to read"),
    (
        lambda: Encoder(11, 16, (TWO_WAY, LAYER)).build(),
        "encoder.layers.1.mixer: sees the past only. Give it mask=FULL",
    ),
    (
        lambda: Encoder(11, 16, (READER,)).build(),
        "encoder.layers.0.cross: an encoder has no memory to read. Remove it.",
    ),
    (
        lambda: EncoderDecoder(ENCODER, Decoder(11, 8, (READER,))),
        "encoder.dim is 16, decoder.dim 8; expected one width",
    ),
    (lambda: EncoderDecoder(ENCODER, Decoder(9, 16, (READER,)), shared=True), "the vocabularies differ (11 and 9)"),
    (
        lambda: EncoderDecoder(ENCODER, Decoder(11, 16, (LAYER,))),
        "no layer has cross-attention, so the source would be",
    ),
    (lambda: EncoderDecoder(Encoder(11, 16, (LAYER,)), READING).build(), "encoder.layers.0.mixer: sees the past only"),
    (
        lambda: EncoderDecoder(ENCODER, Decoder(11, 16, (Layer(Attention(4, mask=FULL), MLP(8), Cross(4)),))).build(),
        "decoder.layers.0.mixer: sees the future",
    ),
    # numbers of which a model would make NaN, inf or an error of a kernel
    (lambda: LayerNorm(eps=-1e-5), "layernorm.eps: got -1e-05, expected above 0, such as 1e-6"),
    (lambda: RMSNorm(eps=0.0), "rmsnorm.eps: got 0.0, expected above 0"),
    (lambda: OffsetRMSNorm(eps=-1.0), "offset_rmsnorm.eps: got -1.0"),
    (lambda: ScaleNorm(eps=-1.0), "scalenorm.eps: got -1.0"),
    (lambda: GatedDelta(2, eps=-1.0), "gated_delta.eps: got -1.0"),
    (lambda: Mamba2(eps=-1.0), "mamba2.eps: got -1.0"),
    (lambda: DynamicTanh(alpha=1e9), "dynamictanh.alpha: got 1000000000.0, expected above 0, from 1e-06 to 1,000,000"),
    (lambda: Attention(4, softcap=1e20), "attention.softcap: got 1e+20, expected a cap above 0, from 1e-06 to 1,000,0"),
    (lambda: Head(softcap=1e-20), "head.softcap: got 1e-20, expected a cap above 0, from 1e-06"),
    (lambda: Attention(4, scale=-1e20), "attention.scale: got -1e+20, expected a size of at most 1,000,000"),
    (lambda: Cross(4, scale=1e20), "cross.scale: got 1e+20, expected a size of at most 1,000,000"),
    (lambda: LatentAttention(4, 8, 4, scale=1e20), "latent.scale: got 1e+20, expected a size of at most 1,000,000"),
    (lambda: Layer(Attention(4), layerscale=1e20), "layer.layerscale: got 1e+20, expected a size of at most 1,000,0"),
    (lambda: Router(scale=0.0), "router.scale: got 0.0, expected above 0"),
    (lambda: Rope(theta=1e20), "rope.theta: got 1e+20, expected a base above 1, at most 1e+15"),
    (lambda: Ntk(1e20), "ntk.factor: got 1e+20, expected at least 1 (1 changes nothing), at most 1,000,000"),
    (lambda: Yarn(4.0, 64, sharpening=1e20), "yarn.sharpening: got 1e+20, expected above 0, from 1e-06 to 1,000,000"),
    (lambda: Yarn(4.0, 64, slow=1e-20), "yarn.slow: got 1e-20, expected above 0, from 1e-06"),
    (lambda: Llama3(original=0), "llama3.original: got 0, expected at least 1"),
    (
        lambda: Attention(4, scale=1e-320),
        "attention.scale: got 1e-320 (float), expected 0, or a size from 1e-30 to 1e+3",
    ),
    (lambda: Attention(4, scale=10**400), "attention.scale: got 1000000000"),
    (
        lambda: MLP(2**70),
        "mlp.hidden: got 1180591620717411303424 (int), expected an integer below 2 to the power of 63",
    ),
    (lambda: MLP(2**40), "mlp.hidden: got 1099511627776, expected at most 2,147,483,647"),
    (lambda: Attention(2**40, kv_heads=3), "attention.heads: got 1099511627776, expected at most 2,147,483,647"),
    (lambda: Attention(4, kv_heads=-(2**70)), "attention.kv_heads: got -11805916207174113034"),
    (lambda: Sinusoid(2**40), "sinusoid.max_len: got 1099511627776, expected at most 16,777,216"),
    (lambda: Randomized(2**40), "randomized.range: got 1099511627776, expected at most 16,777,216"),
    (lambda: Decoder(11, 16, (LAYER,), loops=2**40), "decoder.loops: got 1099511627776, expected at most 10,000"),
    (lambda: pattern([LAYER], 2**40), "pattern(): got depth=1099511627776 for a unit of 1, expected a positive multi"),
    (lambda: MoE(2**40, MLP(8)), "moe.experts: got 1099511627776, expected at most 10,000"),
    (lambda: Decoder(HUGE, HUGE, (LAYER,)).build(), "decoder: got sizes for which there is not enough memory"),
    (lambda: Encoder(11, 16, (Layer(WIDE),)).build(), "encoder: got sizes for which there is not enough memory"),
    (lambda: shapes_of(Decoder(11, 16, (Layer(WIDE),))), "decoder: got sizes for which there is not enough memory"),
    (
        lambda: EncoderDecoder(Encoder(HUGE, HUGE, (TWO_WAY,)), Decoder(11, HUGE, (READER,))).build(),
        "encoder_decoder: got sizes for which there is not enough memory, expected what fits. Lower vocab, dim",
    ),
]


@pytest.mark.parametrize(("build", "says"), BUILDS, ids=[says[:50] for _, says in BUILDS])
def test_what_does_not_fit_is_refused_when_built(build: Callable[[], Any], says: str) -> None:
    with pytest.raises(SpecError) as refused:
        build()
    assert says in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 240


def test_what_is_allowed_on_purpose() -> None:
    one_way = Encoder(11, 16, (LAYER,), one_way=True).build()
    assert not torch.equal(one_way(torch.tensor([[1, 2, 3]])), one_way(torch.tensor([[1, 2, 4]])))
    assert EncoderDecoder(ENCODER, Decoder(11, 16, (LAYER, READER))).build()


# ---- calls ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def decoder() -> DecoderModel:
    """A decoder of two layers."""
    model = Cell().build()
    assert isinstance(model, DecoderModel)
    return model


@pytest.fixture
def both() -> EncoderDecoderModel:
    """An encoder-decoder of two layers."""
    model = Cell("encoder_decoder", cross="mha").build()
    assert isinstance(model, EncoderDecoderModel)
    return model


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.tensor([1, 2]), "decoder: got shape (2,) of torch.int64, expected (batch, tokens) of integers"),
        (torch.ones(1, 2), "decoder: got shape (1, 2) of torch.float32"),
        (torch.empty(1, 0, dtype=torch.long), "of integers, at least one token"),
        (torch.zeros(1, 2, 3, dtype=torch.long), "decoder: got shape (1, 2, 3)"),
    ],
)
@pytest.mark.unchecked
def test_ids_of_another_shape_are_refused(decoder: DecoderModel, ids: torch.Tensor, says: str) -> None:
    with pytest.raises(BrickError) as refused:
        decoder(ids)
    assert says in str(refused.value)


@pytest.mark.parametrize(("wrong", "says"), [(11, "got id 11 in row 1 at token 2"), (-100, "got id -100 in row 1")])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_id_that_no_row_of_the_table_stands_for(wrong: int, says: str, dtype: torch.dtype) -> None:
    ids, good = torch.zeros(2, 4, dtype=dtype), torch.zeros(2, 4, dtype=dtype)
    ids[1, 2] = wrong
    both = EncoderDecoder(ENCODER, READING).build()
    calls: dict[str, list[Callable[[], Any]]] = {
        "decoder": [lambda: Decoder(11, 16, (LAYER,)).build()(ids), lambda: both(good, ids)],
        "encoder": [lambda: ENCODER.build()(ids), lambda: both(ids, good)],
    }
    for side, each in calls.items():
        for call in each:
            with pytest.raises(BrickError, match=f"{side}: {says}.*expected 0 to 10. Use the tokenizer"):
                call()


def test_a_segment_that_no_row_stands_for() -> None:
    encoder = ENCODER.but(embed=Embed(segments=2)).build()
    with pytest.raises(BrickError, match=r"embed: got segment 2 in row 0 at token 1, expected 0 to 1. Raise Embed"):
        encoder(torch.tensor([[1, 2]]), None, torch.tensor([[0, 2]]))


def test_flex_has_no_gradient_on_a_cpu() -> None:
    model = Decoder(11, 16, (Layer(Attention(4, backend="flex"), MLP(8)),)).build()
    with pytest.raises(SpecError, match=r"backend 'flex' with gradients on a CPU.* Use backend='auto', a GPU"):
        model(torch.tensor([[1, 2]]))
    with torch.no_grad():
        plain = model.spec.but(**{"layers.0.mixer.backend": "auto"}).build()
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(torch.tensor([[1, 2]])), plain(torch.tensor([[1, 2]])))


def test_a_full_cache_says_how_to_make_it_longer(decoder: DecoderModel) -> None:
    state = decoder.init_state(2, 4)
    decoder(draw(decoder, tokens=4), state=state)
    with pytest.raises(StateError, match=r"KV holds 4 tokens; asked to store token 5. Raise max_len in init_state\(\)"):
        decoder(draw(decoder, tokens=1), state=state)


def test_the_state_of_another_model_is_refused(decoder: DecoderModel) -> None:
    ids = draw(decoder, tokens=2)
    one_layer = Decoder(11, 16, (LAYER,)).build().double()
    with pytest.raises(
        StateError, match=r"the state has 1 layers, the model 2. Make it with this model's init_state\(\)"
    ):
        decoder(ids, state=one_layer.init_state(2, 4))
    gqa = Cell(mixer="gqa").build()
    assert isinstance(gqa, DecoderModel)
    with pytest.raises(StateError, match=r"KV holds 2 heads of width 4; got 4 of 4"):
        decoder(ids, state=gqa.init_state(2, 4))
    with pytest.raises(StateError, match=r"KV holds 3 rows; got 2. Make the state with init_state\(2, ...\)"):
        decoder(ids, state=decoder.init_state(3, 4))
    recurrent = Cell(mixer="mamba", position="none").build()
    assert isinstance(recurrent, DecoderModel)
    with pytest.raises(StateError, match="attention: got a MambaState, expected a KV"):
        decoder(ids, state=recurrent.init_state(2, 4))
    with pytest.raises(StateError, match="got a KV, expected a MambaState"):
        recurrent(ids, state=decoder.init_state(2, 4))


def test_a_ring_does_not_serve_a_mask_that_looks_further() -> None:
    """Their sizes are alike, so only the mask tells: what the ring lets go of would be missed without a word."""
    near, far, whole = (
        Decoder(11, 16, (Layer(Attention(4, mask=Mask(window=w)), MLP(8)),)).build() for w in (2, 3, None)
    )
    ids = torch.tensor([[1, 2, 3]])
    for model, sees in ((far, "a window of 3"), (whole, "every token")):
        with pytest.raises(StateError, match=f"RingKV keeps the last 2 tokens; the mask sees {sees}. The state"):
            model(ids, state=near.init_state(1, 9))
    torch.testing.assert_close(near(ids, state=whole.init_state(1, 9)), near(ids))  # what keeps more serves


def test_a_state_of_no_size() -> None:
    model = Decoder(11, 16, (LAYER,)).build()
    for rows, tokens in ((-1, 4), (1, -4)):
        with pytest.raises(StateError, match=rf"init_state\(\): got {rows} rows of {tokens} tokens, expected 0"):
            model.init_state(rows, tokens)
    with pytest.raises(StateError, match=r"init_state\(\): got sizes for which there is not enough memory.*Lower"):
        model.init_state(1, 2**60)


@pytest.mark.unchecked
def test_a_span_of_other_tokens(decoder: DecoderModel) -> None:
    ids, encoder = draw(decoder, tokens=3), ENCODER.but(embed=Embed(segments=2)).build()
    with pytest.raises(StateError, match="Span: got start 0 and length 5 for 3 tokens, expected a start of 0 or more"):
        decoder(ids, Span(0, 5))
    with pytest.raises(StateError, match="Span: got start -2 and length 3 for 3 tokens"):
        decoder(ids, Span(-2, 3))
    with pytest.raises(StateError, match=r"Span: pos has shape \(2, 2\), expected \(2, 3\) like the ids"):
        decoder(ids, Span(0, 3, torch.zeros(2, 2, dtype=torch.long)))
    with pytest.raises(StateError, match=r"Span: segment has shape \(2, 2\), expected \(2, 3\)"):
        encoder(ids, None, torch.zeros(2, 2, dtype=torch.long))
    with pytest.raises(StateError, match=r"valid is torch.int64, expected torch.bool. Use valid.bool\(\)"):
        encoder(ids, torch.ones(2, 3, dtype=torch.long))


@pytest.mark.unchecked
def test_ids_that_are_no_tensor(decoder: DecoderModel) -> None:
    with pytest.raises(BrickError, match="decoder: got a list, expected a tensor of ids"):
        decoder([[1, 2]])


def test_tokens_that_do_not_follow_on_are_refused_and_nothing_is_lost(decoder: DecoderModel) -> None:
    ids = draw(decoder)
    whole = say(decoder, ids)
    state = decoder.init_state(2, 10)
    decoder(ids[:, :4], state=state)
    for at in (Span(0, 2), Span(5, 2)):
        with pytest.raises(StateError, match=f"has 4 slots written; the call starts at slot {at.start}"):
            decoder(ids[:, 4:6], at, state)
    torch.testing.assert_close(decoder(ids[:, 4:], state=state), whole[:, 4:])


def test_packed_documents_are_not_decoded(decoder: DecoderModel) -> None:
    ids = draw(decoder, tokens=4)
    at = Span.of(ids, doc=torch.tensor([[0, 0, 1, 1]] * 2))
    with pytest.raises(StateError, match="Decode each document in a row of its own"):
        decoder(ids, at, decoder.init_state(2, 4))


def test_an_encoder_keeps_no_state() -> None:
    encoder = Cell("encoder").build()
    with pytest.raises(StateError, match=r"layers\.0\.attention: sees the future, so it cannot decode step by step"):
        encoder.stack.init_state(1, 4, device=torch.device("cpu"), dtype=torch.float64)


def test_logits_of_an_encoder_without_a_head_are_refused() -> None:
    encoder = ENCODER.build()
    with pytest.raises(SpecError, match=r"encoder\.head: this encoder has none. Build it with head=Head\(\)"):
        encoder.logits(encoder(torch.tensor([[1, 2]])))


def test_a_decoder_without_its_memory_does_not_talk_to_itself(both: EncoderDecoderModel) -> None:
    tgt = draw(both)
    for state in (None, both.init_state(2, 10)):
        with pytest.raises(
            StateError, match=r"got no memory, and the state holds none. Pass memory=model.encode\(src\)"
        ):
            both.decode(tgt, None, state=state)
    with pytest.raises(StateError, match="2 target rows for a memory of 3; expected as many"):
        both.decode(tgt, memory_of(both, 3))


def test_a_memory_of_other_rows_is_refused(both: EncoderDecoderModel) -> None:
    state = both.init_state(2, 10)
    both.decode(draw(both, tokens=2), memory_of(both), state=state)
    cross = state.layers[0].cross
    assert cross is not None
    cross.select(torch.tensor([0]))
    with pytest.raises(StateError, match="CrossKV holds the memory of 1 rows; asked for 2. Select its rows first"):
        both.decode(draw(both, tokens=1), None, state=state)


def test_a_table_that_ends_is_named_with_its_limit() -> None:
    model = Decoder(11, 16, (LAYER,), embed=Embed(position=Learned(max_len=5))).build()
    state = model.init_state(1, 9)
    model(torch.zeros(1, 5, dtype=torch.long), state=state)
    with pytest.raises(BrickError, match="Learned position holds 5 positions; the input reaches position 5"):
        model(torch.zeros(1, 1, dtype=torch.long), state=state)
    with pytest.raises(BrickError, match="the input reaches position 6"):
        model(torch.zeros(1, 7, dtype=torch.long))
