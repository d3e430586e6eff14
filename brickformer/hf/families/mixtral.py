"""mixtral (arXiv 2401.04088): mistral with a mixture of experts; the weights of the chosen sum to 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.feedforward import GLU
from brickformer.hf.config import Config
from brickformer.hf.families import llama
from brickformer.hf.family import Family, first
from brickformer.hf.table import Line, below, linear
from brickformer.hf.words import attention_of, sizes
from brickformer.layers import Layer, pattern
from brickformer.mask import Mask
from brickformer.models import Decoder
from brickformer.moe import MoE, Router
from brickformer.norms import RMSNorm


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab, dim, depth = sizes(config)
    mask = Mask(window=config.get("sliding_window", int, None))
    attention = llama.attention(config, dim, theta=1e6, groups=8, mask=mask)
    router = Router(config.get("num_experts_per_tok", int, 2), balance=config.get("router_aux_loss_coef", float, 0.001))
    moe = MoE(config.count("num_local_experts|num_experts"), llama.glu(config), router)
    layer = Layer(attention, moe, norm=RMSNorm(config.get("rms_norm_eps", float, 1e-5)))
    return Decoder(vocab, dim, pattern([layer], depth), head=llama.head(config))


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    return llama.fields(spec) | expert_fields(spec) | {"sliding_window": attention_of(spec).mask.window}


def expert_fields(spec: Decoder) -> dict[str, Any]:
    """How many experts there are and how many a token uses."""
    moe = first(spec, MoE, MoE(2, GLU(1)))
    return {
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.router.top_k,
        "router_aux_loss_coef": moe.router.balance,
    }


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    for i, layer in enumerate(spec.layers):
        yield from below(
            f"stack.layers.{i}.",
            f"model.layers.{i}.",
            llama.attention_names(layer),
            llama.norm_names(),
            linear("ffn.router.project", "block_sparse_moe.gate"),
            *(expert_names(e, f"block_sparse_moe.experts.{e}", "w1", "w3", "w2") for e in range(experts(layer))),
        )
    yield from llama.rest(spec)


def experts(layer: Layer) -> int:
    """How many there are in a layer."""
    assert isinstance(layer.ffn, MoE)
    return layer.ffn.experts


def expert_names(e: int, theirs: str, gate: str, up: str, down: str) -> Iterator[Line]:
    """One gated expert."""
    yield from linear(f"ffn.experts.{e}.gate_up", f"{theirs}.{gate}", f"{theirs}.{up}")
    yield from linear(f"ffn.experts.{e}.out", f"{theirs}.{down}")


FAMILY = Family("mixtral", "MixtralForCausalLM", read, guess, table, others=("MixtralModel",))
