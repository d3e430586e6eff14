"""Models that are not ours: what is seen must be what torch and transformers say themselves."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from brickformer.errors import DataError
from brickformer.look import foreign

LETTERS = list("abcda")


def shaken(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model.eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_decoders_of_transformers(kind: str, implementation: str) -> None:
    model, ids = shaken(decoder_of_transformers(kind, implementation)), torch.tensor([[1, 2, 3, 4, 1]])
    view = foreign(model, ids, labels=LETTERS)
    said = eager(model, ids)
    assert len(view.maps) == 2 and all("attn" in m.name for m in view.maps)
    for m, expected in zip(view.maps, said, strict=True):
        torch.testing.assert_close(m.weights, expected[0], rtol=1e-4, atol=1e-5)
    assert view.logits and all(s.removed > 0 for m in view.maps for s in m.stats)


def decoder_of_transformers(kind: str, implementation: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    common: dict[str, Any] = {
        "vocab_size": 20,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": implementation,
    }
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, **common))
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_size=16,
            intermediate_size=16,
            **common,
        )
    )


def eager(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(ids, output_attentions=True).attentions


def test_removal_is_a_zero_where_the_head_enters_its_projection() -> None:
    model, ids = shaken(decoder_of_transformers("gpt2", "sdpa")), torch.tensor([[1, 2, 3, 4, 1]])
    view = foreign(model, ids, labels=LETTERS)
    project = model.transformer.h[1].attn.c_proj.weight
    with torch.no_grad():
        before = model(ids).logits.double().log_softmax(-1)
        project[8:16] = 0.0  # transformers keeps it as (in, out)
        after = model(ids).logits.double().log_softmax(-1)
    expected = float((before.exp() * (before - after)).sum(-1).mean())
    assert view.maps[1].stats[1].removed == pytest.approx(expected, rel=1e-3)


def test_an_encoder_decoder_of_transformers() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(num_layers=1, num_heads=2, d_model=16, d_kv=8, d_ff=16, vocab_size=20, decoder_start_token_id=0)
    model = shaken(T5ForConditionalGeneration(config))
    src, tgt = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 2]])
    view = foreign(model, named={"input_ids": src, "decoder_input_ids": tgt}, labels=["<s>", "b"], source=list("wxyz"))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(input_ids=src, decoder_input_ids=tgt, output_attentions=True)
    said = [out.encoder_attentions[0], out.decoder_attentions[0], out.cross_attentions[0]]
    sides = [(m.kind, m.side, m.key_side) for m in view.maps]
    assert sides == [("self", "source", "source"), ("self", "target", "target"), ("cross", "target", "source")]
    for m, expected in zip(view.maps, said, strict=True):
        torch.testing.assert_close(m.weights, expected[0], rtol=1e-4, atol=1e-5)


def test_torch_own_transformer() -> None:
    model = shaken(nn.Transformer(16, 2, 1, 1, 32, batch_first=True))
    x, y = torch.randn(1, 5, 16), torch.randn(1, 3, 16)
    view = foreign(model, x, y, labels=list("xyz"), source=LETTERS)
    assert [(m.kind, tuple(m.weights.shape)) for m in view.maps] == [
        ("self", (2, 5, 5)),
        ("self", (2, 3, 3)),
        ("cross", (2, 3, 5)),
    ]
    with torch.no_grad():
        _, said = model.encoder.layers[0].self_attn(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(view.maps[0].weights, said[0], rtol=1e-4, atol=1e-5)
    assert all(s.removed > 0 for m in view.maps for s in m.stats)


def test_torch_own_removal() -> None:
    model = shaken(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1, enable_nested_tensor=False)
    )
    x = torch.randn(1, 5, 16)
    view = foreign(model, x, labels=LETTERS)
    with torch.no_grad():
        before = model(x)
        model.layers[0].self_attn.out_proj.weight[:, 4:8] = 0.0
        after = model(x)
    assert view.maps[0].stats[1].removed == pytest.approx(float((before - after).norm() / before.norm()), rel=1e-4)


class ByHand(nn.Module):
    """Attention written out, its heads in an axis of their own or none at all; a softmax over words at the end."""

    def __init__(self, heads: int | None) -> None:
        super().__init__()
        self.embed, self.qkv, self.out, self.heads = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 9), heads

    def weights(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        if self.heads:
            q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in (q, k, v))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        ahead = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        return F.softmax(scores.masked_fill(ahead, -1e9), dim=-1), v

    def forward(self, ids: Tensor) -> Tensor:
        w, v = self.weights(ids)
        y = w @ v
        y = y.transpose(1, 2).flatten(2) if self.heads else y
        return torch.softmax(self.out(y), dim=-1)


@pytest.mark.parametrize("heads", [None, 2])
def test_attention_written_out(heads: int | None) -> None:
    model, ids = shaken(ByHand(heads)), torch.tensor([[1, 2, 3, 4, 1]])
    view = foreign(model, ids, labels=LETTERS)
    (m,) = view.maps  # not the softmax over words
    with torch.no_grad():
        expected = model.weights(ids)[0][0]
    torch.testing.assert_close(m.weights, expected if heads else expected[None])
    assert m.stats[0].removed > 0 and m.stats[0].same_token > 0


class Einsum(ByHand):
    """One head, its weights given to einsum: as the first factor, as the second, or in a list."""

    def __init__(self, form: str) -> None:
        super().__init__(None)
        self.form = form

    def forward(self, ids: Tensor) -> Tensor:
        w, v = self.weights(ids)
        if self.form == "second":
            y = torch.einsum("bsd,bts->btd", v, w)
        else:
            y = torch.einsum("bts,bsd->btd", [w, v]) if self.form == "list" else torch.einsum("bts,bsd->btd", w, v)
        return self.out(y)


@pytest.mark.parametrize("form", ["first", "second", "list"])
def test_attention_written_with_einsum(form: str) -> None:
    model, ids = shaken(Einsum(form)), torch.tensor([[1, 2, 3, 4, 1]])
    (m,) = foreign(model, ids, labels=LETTERS).maps
    with torch.no_grad():
        torch.testing.assert_close(m.weights, model.weights(ids)[0])
        before, (w, v) = model(ids), model.weights(ids)
        after = model.out(0.0 * (w @ v))
    assert m.stats[0].removed == pytest.approx(float((before - after).norm() / before.norm()), rel=1e-4)


class OneHead(nn.Module):
    """A fused call on three axes, with a mask of its own for each row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), attn_mask=mask)


def test_a_fused_call_on_three_axes_with_a_mask_of_three() -> None:
    model, x = shaken(OneHead()), torch.randn(2, 5, 8)
    mask = torch.rand(2, 5, 5) < 0.5
    mask |= torch.eye(5, dtype=torch.bool)
    (m,) = foreign(model, x, mask, labels=LETTERS).maps
    with torch.no_grad():
        q, k, _ = model.qkv(x).chunk(3, -1)
    expected = (q @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(m.weights, expected[:1])


class Counting(TorchFunctionMode):
    """How often torch's own attention is called."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is F.multi_head_attention_forward
        return func(*args, **(kwargs or {}))


def test_a_removal_is_one_call() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    with Counting() as counting:
        foreign(model, torch.randn(1, 5, 16), labels=LETTERS)
    assert counting.calls == 2 * (2 + 8), "two layers: twice to see the weights, once for each of eight heads"


def test_inputs_by_any_name() -> None:
    class Named(ByHand):
        def forward(self, labels: Tensor, title: Tensor | None = None) -> Tensor:
            return super().forward(labels)

    view = foreign(shaken(Named(2)), named={"labels": torch.tensor([[1, 2, 3, 4, 1]])}, labels=LETTERS)
    assert view.labels == LETTERS and len(view.maps) == 1


def test_only_some_rows_and_modules() -> None:
    model, ids = shaken(decoder_of_transformers("gpt2", "sdpa")), torch.tensor([[1, 2, 3, 4, 1]])
    view = foreign(model, ids, labels=LETTERS, rows=(2, 4), only=["transformer.h.1"])
    (m,) = view.maps
    assert m.rows == m.keys == range(2, 4) and m.name == "transformer.h.1.attn"
    torch.testing.assert_close(m.weights, eager(model, ids)[1][0][:, 2:4, 2:4], rtol=1e-4, atol=1e-5)


def test_only_some_heads() -> None:
    model, ids = shaken(decoder_of_transformers("llama", "sdpa")), torch.tensor([[1, 2, 3, 4, 1]])
    whole = foreign(model, ids, labels=LETTERS)
    (some,) = foreign(model, ids, labels=LETTERS, only=["model.layers.1:4,2"]).maps
    assert some.labels == ["2", "4"]
    torch.testing.assert_close(some.weights, whole.maps[1].weights[[1, 3]])
    assert [s.removed for s in some.stats] == [whole.maps[1].stats[h].removed for h in (1, 3)]
    with pytest.raises(DataError, match=r"got 'model.layer.1' to look at.*did you mean 'model.layers.1.self_attn'"):
        foreign(model, ids, labels=LETTERS, only=["model.layer.1"])


def test_what_cannot_be_seen_is_said_with_a_reason() -> None:
    with pytest.raises(DataError, match="no attention was seen in Linear.*attn_implementation"):
        foreign(nn.Linear(3, 3), torch.zeros(2, 3), labels=["a", "b"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that TorchScript is old
        scripted = torch.jit.script(nn.Linear(3, 3))
    with pytest.raises(DataError, match="TorchScript"):
        foreign(scripted, torch.zeros(2, 3), labels=["a", "b"])


def test_a_compiled_model_is_looked_at_uncompiled() -> None:
    model, ids = shaken(ByHand(2)), torch.tensor([[1, 2, 3, 4, 1]])
    compiled = torch.compile(model, backend="eager")
    a, b = foreign(compiled, ids, labels=LETTERS).maps[0], foreign(model, ids, labels=LETTERS).maps[0]
    assert torch.equal(a.weights, b.weights)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1, enable_nested_tensor=False
    )
    foreign(model.train(), torch.randn(1, 5, 16), labels=LETTERS)
    assert model.training and not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("source", [list("wxyz"), list("vwxyz")])
def test_cross_attention_is_told_by_a_name_in_any_case_and_by_its_lengths(source: list[str]) -> None:
    """T5's is called EncDecAttention; here the source is no longer than what is written."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(num_layers=1, num_heads=2, d_model=16, d_kv=8, d_ff=16, vocab_size=20, decoder_start_token_id=0)
    model, ids = shaken(T5ForConditionalGeneration(config)), torch.tensor([[0, 2, 3, 4, 5]])
    named = {"input_ids": torch.arange(len(source))[None], "decoder_input_ids": ids}
    view = foreign(model, named=named, labels=LETTERS, source=source, remove=False)
    sides = [(m.kind, m.side, m.key_side) for m in view.maps]
    assert sides == [("self", "source", "source"), ("self", "target", "target"), ("cross", "target", "source")]


def test_a_decoder_whose_parts_are_called_encoder_reads_its_own_text() -> None:
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**sizes, vocab_size=20, is_decoder=True, add_cross_attention=True)
    named = {"input_ids": torch.tensor([[1, 2, 3, 4, 1]]), "encoder_hidden_states": torch.randn(1, 4, 16)}
    view = foreign(shaken(BertLMHeadModel(config)), named=named, labels=LETTERS, source=list("wxyz"), remove=False)
    assert [(m.kind, m.side, m.key_side) for m in view.maps] == [
        ("self", "target", "target"),
        ("cross", "target", "source"),
    ]


def test_a_sink_that_is_joined_to_the_scores_is_no_token() -> None:
    class Sunk(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = (x @ x.mT)[:, None] + torch.full((5, 5), -torch.inf).triu(1)
            sink = torch.zeros(1, 1, 5, 1)
            return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ x[:, None]

    x = torch.randn(1, 5, 4)
    (m,) = foreign(Sunk(), x, labels=LETTERS).maps
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    e = (x[0] @ x[0].mT).exp().masked_fill(~allowed, 0.0)
    assert (m.kind, m.rows, m.keys) == ("self", range(5), range(5))
    torch.testing.assert_close(m.weights[0], e / (1.0 + e.sum(-1, keepdim=True)), rtol=1e-5, atol=1e-6)


def test_attention_without_a_batch() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ x

    x = torch.randn(5, 4)
    (m,) = foreign(Bare(), x, labels=LETTERS).maps
    e = (x @ x.mT).exp()
    torch.testing.assert_close(m.weights[0], e / e.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)
    assert m.stats[0].removed == pytest.approx(1.0), "nothing is left of it"


def test_labels_that_are_too_few_are_said_and_nothing_grows() -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    view = foreign(encoder, torch.randn(1, 400, 16), labels=LETTERS, remove=False)
    assert view.maps[0].weights.shape == (2, 384, 384) and view.maps[0].rows == range(16, 400)
    assert any("5 for 400" in english for english, _ in view.left_out)
