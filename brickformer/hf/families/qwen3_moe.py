"""qwen3_moe (arXiv 2505.09388): qwen3 with a mixture of many small experts in all layers, or in every n-th."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.feedforward import GLU, FeedForwardSpec
from brickformer.hf.config import Config
from brickformer.hf.families import llama, mixtral
from brickformer.hf.family import Family, first
from brickformer.hf.table import Line, below, linear
from brickformer.hf.words import ACTIVATIONS, attention_of, glu_of, sizes
from brickformer.layers import Layer
from brickformer.mask import Mask
from brickformer.models import Decoder
from brickformer.moe import MoE, Router
from brickformer.norms import RMSNorm


def read(config: Config) -> Decoder:
    """Their configuration as ours."""
    vocab, dim, depth = sizes(config)
    norm = RMSNorm(config.get("rms_norm_eps", float, 1e-6))
    windowed, window = config.get("use_sliding_window", bool, False), config.optional("sliding_window", int, 4096)
    bias = config.get("attention_bias", bool, False)
    config.skip("max_window_layers")  # every layer has the window, or none
    attention = llama.attention(
        config, dim, bias=bias, groups=4, qk_norm=norm, mask=Mask(window=window if windowed else None)
    )
    router = Router(
        config.get("num_experts_per_tok", int, 8),
        normalize=config.get("norm_topk_prob", bool, False),
        balance=config.get("router_aux_loss_coef", float, 0.001),
    )
    expert = GLU(config.get("moe_intermediate_size", int), config.choice("hidden_act", ACTIVATIONS, "silu"))
    moe = MoE(config.count("num_local_experts|num_experts", 128), expert, router)
    dense, every = config.get("mlp_only_layers", list, None) or [], config.get("decoder_sparse_step", int, 1)
    config.skip("intermediate_size")  # of no layer where all are mixtures
    layers = []
    for i in range(depth):
        sparse = i not in dense and every > 0 and (i + 1) % every == 0
        ffn: FeedForwardSpec = moe if sparse else llama.glu(config)
        layers.append(Layer(attention, ffn, norm=norm))
    return Decoder(vocab, dim, tuple(layers), head=llama.head(config))


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    a, moe = attention_of(spec), first(spec, MoE, MoE(2, GLU(1)))
    dense = [i for i, layer in enumerate(spec.layers) if not isinstance(layer.ffn, MoE)]
    plain = next((layer.ffn for layer in spec.layers if isinstance(layer.ffn, GLU)), glu_of(spec))
    return (
        llama.fields(spec)
        | mixtral.expert_fields(spec)
        | {
            "num_experts": moe.experts,
            "attention_bias": a.bias,
            "use_sliding_window": a.mask.window is not None,
            "sliding_window": a.mask.window,
            "intermediate_size": plain.hidden,
            "moe_intermediate_size": moe.expert.hidden if isinstance(moe.expert, GLU) else 1,
            "norm_topk_prob": moe.router.normalize,
            "mlp_only_layers": dense,
            "decoder_sparse_step": 1,
        }
    )


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    for i, layer in enumerate(spec.layers):
        ours, theirs = f"stack.layers.{i}.", f"model.layers.{i}."
        yield from below(ours, theirs, llama.attention_names(layer), llama.norm_names(), ffn_names(layer))
    yield from llama.rest(spec)


def ffn_names(layer: Layer) -> Iterator[Line]:
    """A mixture, or one gated network."""
    if not isinstance(layer.ffn, MoE):
        yield from llama.glu_names(layer)
        return
    yield from linear("ffn.router.project", "mlp.gate")
    for e in range(layer.ffn.experts):
        yield from mixtral.expert_names(e, f"mlp.experts.{e}", "gate_proj", "up_proj", "down_proj")


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", read, guess, table, others=("Qwen3MoeModel",))
