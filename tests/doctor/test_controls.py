"""Healthy models draw no finding: written by hand, on torch's layers, of the transformers library, our presets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from doctor.planted import module_of
from torch import nn

from brickformer import bert, gpt2, llama, vaswani
from brickformer.doctor import Subject, diagnose
from brickformer.presets import vaswani_small

HAND = [
    ("decoder", "make", {}),
    ("decoder", "make", {"loss": "lm_loss"}),
    ("rotary", "make", {}),
    ("rotary", "make", {"loss": "lm_loss"}),
    ("rotary", "make", {"loss": "padded_loss", "pad": 0}),
    ("seq2seq", "make", {"loss": "pair_loss", "decode": "greedy"}),
    ("seq2seq", "make", {"loss": "smoothed_loss"}),
    ("encoder", "make", {}),
    ("encoder", "make_classifier", {}),
    ("library", "make_lm", {}),
    ("library", "make_sequence_first", {}),
    ("library", "make_translator", {}),
    ("library", "make_encoder", {}),
    ("library", "make_forecaster", {}),
    ("library", "make_fused", {}),
]
# what looks suspicious and is right: (name, file, make, changes)
SUSPICIOUS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("scale in the weights of q", "encoder", "make", [("q, k = q * self.width**-0.25, k * self.width**-0.25", ""), ("self.dense = nn.Linear(dim, dim)", "self.dense = nn.Linear(dim, dim)\n        self.query.weight.data *= self.width**-0.5\n        self.query.bias.data *= self.width**-0.5")]),
    ("scale on q", "decoder", "make", [(" / math.sqrt(self.width)", ""), ("att = q @", "q = q * self.width**-0.5\n        att = q @")]),
    ("norms of q and k, another scale", "rotary", "make", [("q, k = rotate(q, start), rotate(k, start)", "q, k = rotate(F.normalize(q, dim=-1), start), rotate(F.normalize(k, dim=-1), start)"), ("self.width**-0.5", "10.0")]),
    ("probabilities only at the end", "library", "make_lm", [(".log_softmax(-1)", "")]),
    ("heads untied", "decoder", "make", [("self.head.weight = self.tok.weight", "")]),
    ("biased deviation", "decoder", "make", [("x.std(-1, keepdim=True)", "x.std(-1, keepdim=True, unbiased=False)")]),
    ("sines in halves", "seq2seq", "make", [("table[:, 0::2]", "table[:, : dim // 2]"), ("table[:, 1::2]", "table[:, dim // 2 :]")]),
    ("mask of -1e4", "decoder", "make", [('float("-inf"))\n        att', "-1e4)\n        att")]),
    ("ALiBi in place of rotation", "rotary", "make", [("q, k = rotate(q, start), rotate(k, start)", ""), ("scores = scores + torch", "scores = scores - 0.3 * (torch.arange(start, start + T)[:, None] - torch.arange(start + T)).to(x)\n        scores = scores + torch")]),
    ("flat logits", "seq2seq", "make", [("return self.decoder(trg, memory, trg_mask, src_mask)", "return self.decoder(trg, memory, trg_mask, src_mask).flatten(0, 1)")]),
    ("one head", "decoder", "make", [("heads=4", "heads=1")]),
    ("one layer", "rotary", "make", [("depth=2", "depth=1")]),
    ("pre-norm", "seq2seq", "make", [("x = self.norm1(x + self.drop(self.attention(x, x, x, mask)))", "h = self.norm1(x)\n        x = x + self.drop(self.attention(h, h, h, mask))")]),
    ("cloned layers", "seq2seq", "make", [("nn.ModuleList([EncoderLayer(dim, heads, drop) for _ in range(depth)])", "nn.ModuleList([__import__('copy').deepcopy(layer) for layer in [EncoderLayer(dim, heads, drop)] * depth])")]),
    ("a plain tensor that is moved in forward", "seq2seq", "make", [('self.register_buffer("table", table)', "self.table = table"), ("self.table[: x.size(1)]", "self.table[: x.size(1)].to(x.device)")]),
    ("a head that is called elsewhere", "rotary", "make", [("return self.lm_head(self.norm(x)), kept", "return self.norm(x), kept")]),
    ("hidden vectors as a dict", "encoder", "make", [("        return x\n\n\nclass TextClassifier", '        return {"last_hidden_state": x}\n\n\nclass TextClassifier')]),
    ("masks given by the caller, hidden vectors", "seq2seq", "make", [("def forward(self, src, trg):", "def forward(self, src, tgt, src_mask, tgt_mask):"), ("        src_mask, trg_mask = self.make_src_mask(src), self.make_trg_mask(trg)\n", ""), ("self.decoder(trg, memory, trg_mask, src_mask)", "self.decoder(tgt, memory, tgt_mask, src_mask)"), ("scores = scores.masked_fill(", "mask = mask.unsqueeze(1)\n        scores = scores.masked_fill("), ("return self.project(x)", "return x"), ("self.project = nn.Linear(dim, vocab)", "")]),
    ("only log-probabilities of a pooled answer", "encoder", "make_classifier", [("return self.classify(h)", "return self.classify(h).log_softmax(-1)")]),
    ("logits and loss in a dict", "decoder", "make", [("return logits, loss", 'return {"loss": loss, "logits": logits}'), ("return self.head(x[:, [-1]]), None", 'return {"logits": self.head(x), "loss": None}'), ("[0][:, -1]", '["logits"][:, -1]')]),
    ("shared rotary table", "rotary", "make", [("self.norm = RMSNorm(dim)", "self.norm = RMSNorm(dim)\n        self.register_buffer('cosines', torch.arange(64)[:, None].float().cos(), persistent=False)")]),
    ("a window", "decoder", "make", [("att = F.softmax", "att = att.masked_fill(~self.tril[:T, :T].triu(-3), float('-inf'))\n        att = F.softmax")]),
    ("a model that prints and seeds", "rotary", "make", [("x = self.embed(tokens)", "torch.manual_seed(3)\n        print('step')\n        x = self.embed(tokens)")]),
    ("a stale mask name: True blocks", "encoder", "make", [("attention_mask=None", "mask=None"), ("x = layer(x, attention_mask)", "x = layer(x, None if mask is None else ~mask.bool())")]),
]  # fmt: skip
SIZES: dict[str, Any] = {"vocab": 40, "dim": 32, "depth": 2, "heads": 4}
OURS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: gpt2(**SIZES, max_len=32),
    "llama": lambda: llama(**SIZES, kv_heads=2),
    "llama tied": lambda: llama(**SIZES, tied=True),
    "bert": lambda: bert(**SIZES, max_len=32),
    "vaswani": lambda: vaswani(**SIZES, place="post"),
    "vaswani_small": lambda: vaswani_small(**SIZES, shared=True),
}


def theirs() -> dict[str, Callable[[], nn.Module]]:
    """Tiny random models of the transformers library."""
    T: Any = transformers
    return {
        "gpt2": lambda: T.GPT2LMHeadModel(
            T.GPT2Config(vocab_size=40, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
        ),
        "llama": lambda: T.LlamaForCausalLM(
            T.LlamaConfig(
                vocab_size=40,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                pad_token_id=0,
            )
        ),
        "bert": lambda: T.BertForMaskedLM(
            T.BertConfig(
                vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
            )
        ),
        "t5": lambda: T.T5ForConditionalGeneration(
            T.T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
        ),
        "bart": lambda: T.BartForConditionalGeneration(
            T.BartConfig(
                vocab_size=40,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=48,
                decoder_ffn_dim=48,
                max_position_embeddings=32,
            )
        ),
    }


def healthy(subject: Subject | nn.Module) -> None:
    report = diagnose(subject)
    assert report.ok, str(report)
    untested = [v for v in report.verdicts if v.outcome == "untested"]
    assert not untested, untested


@pytest.mark.parametrize(("source", "make", "says"), HAND, ids=lambda x: str(x))
def test_by_hand(source: str, make: str, says: dict[str, Any]) -> None:
    module = module_of(source)
    said = {k: getattr(module, v) if isinstance(v, str) else v for k, v in says.items()}
    healthy(Subject(getattr(module, make)(), **said))


@pytest.mark.parametrize(("name", "source", "make", "changes"), SUSPICIOUS, ids=[s[0] for s in SUSPICIOUS])
def test_suspicious_and_right(name: str, source: str, make: str, changes: list[tuple[str, str]]) -> None:
    healthy(getattr(module_of(source, *changes), make)())


@pytest.mark.parametrize("name", OURS)
def test_ours(name: str) -> None:
    healthy(OURS[name]().build())


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "bart"])
@pytest.mark.filterwarnings("ignore")
def test_theirs(name: str) -> None:
    torch.manual_seed(0)
    healthy(theirs()[name]())
