"""Training throughput on a CPU: tokens a second of forward + backward + AdamW, ours beside the peers.

    NANOGPT=path/to/nanoGPT/model.py python bench/train.py [--rounds 30]

Two shapes: small (nanoGPT's CPU recipe: 4 layers, 4 heads, width 128, context 64, batch 12), base (6, 6, 384, 256, 8).
All take turns, step by step, in one process, with the same fused AdamW; eager and compiled are told apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import keep, median, table, take_turns
from torch import Tensor, nn

from brickformer import GLU, MLP, Attention, Decoder, Embed, Layer, LayerNorm, Learned, Rope, pattern

warnings.filterwarnings("ignore")
SHAPES = {"small": (4, 4, 128, 64, 12), "base": (6, 6, 384, 256, 8)}
VOCAB = 65
Logits = Callable[[Tensor], Tensor]


def ours(layers: int, heads: int, dim: int, context: int) -> dict[str, nn.Module]:
    """Two models of ours: the parts of GPT-2, as nanoGPT has them, and the parts of Llama."""
    gpt = Layer(Attention(heads=heads), MLP(4 * dim, activation="gelu", bias=False), norm=LayerNorm(bias=False))
    llama = Layer(Attention(heads=heads, position=Rope()), GLU(dim * 8 // 3))
    return {
        "brickformer, parts of GPT-2": Decoder(
            vocab=VOCAB, dim=dim, layers=pattern([gpt], layers), embed=Embed(position=Learned(max_len=context))
        ).build(),
        "brickformer, parts of Llama": Decoder(vocab=VOCAB, dim=dim, layers=pattern([llama], layers)).build(),
    }


class TorchEncoder(nn.Module):
    """torch's own layers, under a causal mask."""

    def __init__(self, layers: int, heads: int, dim: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, dim), nn.Embedding(context, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
        self.stack = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, VOCAB)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, V)."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.stack(x, mask=self.mask, is_causal=True))


def peers(layers: int, heads: int, dim: int, context: int) -> tuple[dict[str, nn.Module], dict[str, Logits], list[str]]:
    """Models, how to get logits from those that don't just return them, and what could not be had."""
    models: dict[str, nn.Module] = {"nn.TransformerEncoder": TorchEncoder(layers, heads, dim, context)}
    logits: dict[str, Logits] = {}
    missing = []
    path = os.environ.get("NANOGPT", "")
    if os.path.exists(path):
        found = importlib.util.spec_from_file_location("nanogpt_model", path)
        assert found is not None and found.loader is not None
        nano = importlib.util.module_from_spec(found)
        sys.modules["nanogpt_model"] = nano  # where torch.compile looks for it
        found.loader.exec_module(nano)
        config = nano.GPTConfig(context, VOCAB, layers, heads, dim, dropout=0.0, bias=False)
        models["nanoGPT"] = nano.GPT(config)
        logits["nanoGPT"] = lambda ids: models["nanoGPT"](ids, ids)[0]
    else:
        missing.append("nanoGPT (set NANOGPT to its model.py)")
    try:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=dim,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=dim * 8 // 3,
            vocab_size=VOCAB,
            max_position_embeddings=context,
            attn_implementation="sdpa",
            tie_word_embeddings=True,
        )
        models["transformers Llama"] = LlamaForCausalLM(config)
        logits["transformers Llama"] = lambda ids: models["transformers Llama"](input_ids=ids, use_cache=False).logits
    except ImportError:
        missing.append("transformers")
    try:
        from x_transformers import Decoder as Layers
        from x_transformers import TransformerWrapper

        parts = Layers(
            dim=dim,
            depth=layers,
            heads=heads,
            attn_dim_head=dim // heads,
            attn_flash=True,
            rotary_pos_emb=True,
            use_rmsnorm=True,
            ff_glu=True,
            ff_mult=8 / 3,
        )
        models["x-transformers"] = TransformerWrapper(num_tokens=VOCAB, max_seq_len=context, attn_layers=parts)
    except ImportError:
        missing.append("x-transformers")
    return models, logits, missing


def measure(shape: str, rounds: int, compiled: bool) -> tuple[str, str, list[str]]:
    """The table of one shape, the ratio in a sentence, what is missing."""
    layers, heads, dim, context, batch = SHAPES[shape]
    torch.manual_seed(0)
    mine = ours(layers, heads, dim, context)
    others, logits, missing = peers(layers, heads, dim, context)
    models = {**mine, **others}
    calls: dict[str, Logits] = {name: logits.get(name, model) for name, model in models.items()}
    parameters = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    steps = {name: training_step(models[name], call, batch, context) for name, call in calls.items()}
    if compiled:
        for name in [*mine, *(n for n in ("nanoGPT",) if n in models)]:
            fresh = f"{name}, compiled"
            parameters[fresh] = parameters[name]
            steps[fresh] = training_step(models[name], torch.compile(calls[name]), batch, context)
    times = take_turns(steps, rounds, warm=4)
    speed = {name: batch * context / median(t) for name, t in times.items()}
    best = max(v for name, v in speed.items() if not name.startswith("brickformer"))
    rows = [
        (name, f"{parameters[name]:,}", f"{v:,.0f}", f"{v / best:.2f}")
        for name, v in sorted(speed.items(), key=lambda item: -item[1])
    ]
    top = max((v, name) for name, v in speed.items() if name.startswith("brickformer"))
    best_name = max((v, name) for name, v in speed.items() if not name.startswith("brickformer"))[1]
    said = f"**{shape}**: {top[1]} is {top[0] / best:.2f} × the best peer ({best_name})."
    return table(("model", "parameters", "tokens a second", "÷ best peer"), rows), said, missing


def training_step(model: nn.Module, logits: Logits, batch: int, context: int) -> Callable[[], None]:
    """One step on fixed data."""
    ids = torch.randint(VOCAB, (batch, context), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss = F.cross_entropy(logits(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    """Measure both shapes and keep the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=30)
    p.add_argument("--no-compile", action="store_true")
    args = p.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    parts, absent = [], []
    for shape, rounds in (("small", args.rounds), ("base", max(5, args.rounds // 4))):
        made, said, missing = measure(shape, rounds, not args.no_compile)
        size = "{} layers, {} heads, width {}, context {}, batch {}".format(*SHAPES[shape])
        parts += [f"## {shape}: {size}", said, made]
        absent += missing
    if absent:
        parts.append("Not measured: " + ", ".join(sorted(set(absent))) + ".")
    intro = "Forward, backward and a fused AdamW step in float32; medians; the models take turns step by step."
    keep("train", "Training throughput on a CPU", [intro, *parts], "transformers", "x-transformers")


if __name__ == "__main__":
    main()
