"""Our layers and models against torch.nn's: pre and post norm, masks, padding, cross-attention; float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract.checks import close
from torch import Tensor, nn

from brickformer.attend import Attend
from brickformer.feedforward import MLP
from brickformer.layers import Layer, Stack
from brickformer.mask import CAUSAL, FULL, Mask, Span
from brickformer.mixers.attention import Attention, AttentionMixer
from brickformer.mixers.cross import Cross, Memory
from brickformer.norms import LayerNorm

DIM, HEADS, HIDDEN, B, T, S = 16, 4, 24, 3, 7, 6
VALID = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0, 0] + [1] * 5]).bool()
SOURCE_VALID = torch.tensor([[1] * 6, [1] * 2 + [0] * 4, [0] + [1] * 5]).bool()
EXACT = 1e-12


def shaken(module: nn.Module) -> nn.Module:
    """Every parameter random, biases and gains too (torch starts many at 0 or 1)."""
    for p in module.parameters():
        p.data = torch.randn_like(p, dtype=torch.float64) * (0.3 if p.ndim > 1 else 0.5)
    return module.double()


def later(t: int) -> Tensor:
    """torch's mask: True where a key may not be seen."""
    return torch.ones(t, t, dtype=torch.bool).triu(1)


def take_attention(mine: AttentionMixer, theirs: nn.MultiheadAttention) -> None:
    mine.qkv.weight.data, mine.qkv.bias.data = theirs.in_proj_weight.data, theirs.in_proj_bias.data
    mine.out.weight.data, mine.out.bias.data = theirs.out_proj.weight.data, theirs.out_proj.bias.data


def take_cross(mine: Any, theirs: nn.MultiheadAttention) -> None:
    mine.q.weight.data, mine.q.bias.data = theirs.in_proj_weight.data[:DIM], theirs.in_proj_bias.data[:DIM]
    mine.kv.weight.data, mine.kv.bias.data = theirs.in_proj_weight.data[DIM:], theirs.in_proj_bias.data[DIM:]
    mine.out.weight.data, mine.out.bias.data = theirs.out_proj.weight.data, theirs.out_proj.bias.data


def take(mine: nn.Module, theirs: nn.Module) -> None:
    mine.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("mask", [CAUSAL, FULL, Mask(window=3), Mask(False, 2)], ids=repr)
def test_multihead_attention(mask: Mask) -> None:
    theirs = shaken(nn.MultiheadAttention(DIM, HEADS, batch_first=True)).eval()
    mine = Attention(HEADS, mask=mask, bias=True).build(DIM).double()
    assert isinstance(mine, AttentionMixer) and isinstance(theirs, nn.MultiheadAttention)
    take_attention(mine, theirs)
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    hidden = ~mask.allowed(torch.arange(T)[:, None], torch.arange(T)).expand(T, T)
    expected, maps = theirs(x, x, x, attn_mask=hidden, average_attn_weights=False)
    close(mine(x, Span(0, T)), expected, "output", EXACT)
    seen: list[Tensor] = []
    mine.attend.register_forward_pre_hook(lambda attend, args: seen.append(attend.weights(*args[:2], *args[3:5])))
    mine(x, Span(0, T))
    close(seen[0], maps, "attention map", EXACT)


def layers_of(theirs: Any, *, first: bool, cross: bool) -> nn.Module:
    """Our layer with the weights of one of torch's."""
    place = "pre" if first else "post"
    mask = CAUSAL if cross else FULL
    activation = "relu" if theirs.activation is nn.functional.relu else "gelu"
    spec = Layer(
        Attention(HEADS, mask=mask, bias=True),
        MLP(HIDDEN, activation=activation),  # type: ignore[arg-type]
        cross=Cross(HEADS, bias=True) if cross else None,
        norm=LayerNorm(eps=1e-5),
        place=place,  # type: ignore[arg-type]
    )
    mine: Any = spec.build(DIM, 1).double()
    where = "into" if first else "after"
    take_attention(mine.mixer, theirs.self_attn)
    take(mine.ffn.into, theirs.linear1)
    take(mine.ffn.out, theirs.linear2)
    take(getattr(mine.around_mixer, where), theirs.norm1)
    if cross:
        take_cross(mine.cross, theirs.multihead_attn)
        take(getattr(mine.around_cross, where), theirs.norm2)
    take(getattr(mine.around_ffn, where), theirs.norm3 if cross else theirs.norm2)
    return mine  # type: ignore[no-any-return]


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("first", [True, False], ids=["pre", "post"])
def test_encoder_layer(first: bool, activation: str) -> None:
    theirs = shaken(nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, 0.0, activation, norm_first=first, batch_first=True))
    mine = layers_of(theirs, first=first, cross=False)
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    close(mine(x, Span(0, T)), theirs(x), "no padding", EXACT)
    got, expected = mine(x, Span.of(x, valid=VALID)), theirs(x, src_key_padding_mask=~VALID)
    close(got[VALID], expected[VALID], "padding", EXACT)


@pytest.mark.parametrize("first", [True, False], ids=["pre", "post"])
def test_decoder_layer(first: bool) -> None:
    theirs = shaken(nn.TransformerDecoderLayer(DIM, HEADS, HIDDEN, 0.0, norm_first=first, batch_first=True))
    mine = layers_of(theirs, first=first, cross=True)
    x = torch.randn(B, T, DIM, dtype=torch.float64, requires_grad=True)
    value = torch.randn(B, S, DIM, dtype=torch.float64, requires_grad=True)
    memory = Memory(value, Span.of(value, valid=SOURCE_VALID))
    got = mine(x, Span(0, T), None, memory)
    expected = theirs(x, value, tgt_mask=later(T), memory_key_padding_mask=~SOURCE_VALID)
    close(got, expected, "output", EXACT)
    weight = torch.randn(B, T, DIM, dtype=torch.float64)
    grads = [torch.autograd.grad((y * weight).sum(), (x, value)) for y in (got, expected)]
    for name, g, e in zip(("target", "source"), *grads, strict=True):
        close(g, e, f"gradient of the {name}", 1e-11)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("first", [True, False], ids=["pre", "post"])
def test_whole_transformer(first: bool) -> None:
    """nn.Transformer ends both stacks with a norm, whatever the placement; ours does where the stream is unnormed."""
    theirs = shaken(nn.Transformer(DIM, HEADS, 2, 2, HIDDEN, 0.0, norm_first=first, batch_first=True))
    assert isinstance(theirs, nn.Transformer)
    stacks = []
    for side, cross in ((theirs.encoder, False), (theirs.decoder, True)):
        stack = Stack([layers_of(one, first=first, cross=cross) for one in side.layers], nn.LayerNorm(DIM))  # type: ignore
        take(stack.norm.double(), side.norm)  # type: ignore[arg-type]
        stacks.append(stack)
    src, tgt = torch.randn(B, S, DIM, dtype=torch.float64), torch.randn(B, T, DIM, dtype=torch.float64)
    at = Span.of(src, valid=SOURCE_VALID)
    got = stacks[1](tgt, Span(0, T), None, Memory(stacks[0](src, at), at))
    hidden = ~SOURCE_VALID
    expected = theirs(
        src, tgt, tgt_mask=later(T), src_key_padding_mask=hidden, memory_key_padding_mask=hidden, tgt_is_causal=True
    )
    close(got, expected, "output", 1e-11)


def test_scaled_dot_product_attention_with_its_own_formula() -> None:
    """F.scaled_dot_product_attention with the mask spelled as a float, against Attend with the mask as a predicate."""
    q, k, v = torch.randn(3, B, HEADS, T, 4, dtype=torch.float64)
    hidden = torch.zeros(T, T, dtype=torch.float64).masked_fill(later(T), -torch.inf)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=hidden)
    for backend in ("sdpa", "reference"):
        close(Attend(CAUSAL, backend=backend)(q, k, v, Span(0, T), Span(0, T)), expected, backend, EXACT)  # type: ignore
