"""phi3 (arXiv 2404.14219): llama whose projections are fused in the file as they are here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brickformer.embed import Embed
from brickformer.hf.config import Config
from brickformer.hf.families import llama
from brickformer.hf.family import Family
from brickformer.hf.table import Line, below, linear
from brickformer.hf.words import attention_of, dropout_of, sizes
from brickformer.layers import Layer, pattern
from brickformer.mask import Mask
from brickformer.models import Decoder
from brickformer.norms import RMSNorm


def read(config: Config) -> Decoder:
    """Their configuration as ours. `original_max_position_embeddings` matters to scalings that have no brick."""
    vocab, dim, depth = sizes(config)
    config.only("head_dim", None)
    for name in ("rope_parameters", "rope_scaling"):
        if config.has(name) and config.part(name).get("rope_type|type", str, "default") != "default":
            raise config.refuse(name, "no scaling", "In this family all others mean longrope, which has no brick.")
    attention = llama.attention(config, dim, part=1.0, mask=Mask(window=config.get("sliding_window", int, None)))
    norm, dropout = RMSNorm(config.get("rms_norm_eps", float, 1e-5)), config.get("resid_pdrop", float, 0.0)
    layer = Layer(attention, llama.glu(config), norm=norm, dropout=dropout)
    embed = Embed(dropout=config.get("embd_pdrop", float, 0.0))
    return Decoder(vocab, dim, pattern([layer], depth), embed=embed, head=llama.head(config))


def guess(spec: Decoder) -> dict[str, Any]:
    """Ours as theirs."""
    fields = {name: value for name, value in llama.fields(spec).items() if name != "head_dim"}
    return fields | {
        "sliding_window": attention_of(spec).mask.window,
        "resid_pdrop": dropout_of(spec),
        "embd_pdrop": spec.embed.dropout,
    }


def table(spec: Decoder) -> Iterator[Line]:
    """Names of tensors."""
    for i in range(len(spec.layers)):
        yield from below(
            f"stack.layers.{i}.",
            f"model.layers.{i}.",
            linear("mixer.qkv", "self_attn.qkv_proj"),
            linear("mixer.out", "self_attn.o_proj"),
            linear("ffn.gate_up", "mlp.gate_up_proj"),
            linear("ffn.out", "mlp.down_proj"),
            llama.norm_names(),
        )
    yield from llama.rest(spec)


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    read,
    guess,
    table,
    others=("Phi3Model",),
    silent=("original_max_position_embeddings",),
)
