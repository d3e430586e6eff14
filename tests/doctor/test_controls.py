"""Healthy models draw no finding: written by hand, on torch's layers, of the transformers library, our presets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from brickformer import bert, gpt2, llama, vaswani
from brickformer.doctor import Subject, diagnose
from brickformer.doctor.mutants import CLEAN, Clean
from brickformer.presets import vaswani_small

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
        "mixtral": lambda: T.MixtralForCausalLM(
            T.MixtralConfig(
                vocab_size=40,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_local_experts=4,
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


@pytest.mark.parametrize("variant", CLEAN, ids=lambda variant: variant.name)
def test_suspicious_and_right(variant: Clean) -> None:
    healthy(variant.subject())


@pytest.mark.parametrize("name", OURS)
def test_ours(name: str) -> None:
    healthy(OURS[name]().build())


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert", "t5", "bart"])
@pytest.mark.filterwarnings("ignore")
def test_theirs(name: str) -> None:
    torch.manual_seed(0)
    healthy(theirs()[name]())
