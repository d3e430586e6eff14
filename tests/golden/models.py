"""Golden models: what specs, parameters and outputs were when somebody last looked. To renew, and to read the diff:

    PYTHONPATH=. python tests/golden/models.py && git diff tests/golden

Weights follow a formula of their names and places, so a digest tells of the forward pass alone: new initial values do
not touch it. A digest holds a few statistics and projections in float64, compared with a tolerance, because kernels on
other processors add in another order.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from brickformer.embed import Embed, Head
from brickformer.feedforward import GLU, MLP
from brickformer.layers import Layer
from brickformer.mask import FULL, Mask, Span
from brickformer.mixers.attention import Attention
from brickformer.mixers.delta import GatedDelta
from brickformer.mixers.differential import DifferentialAttention
from brickformer.mixers.latent import LatentAttention
from brickformer.mixers.lstm import LSTM
from brickformer.mixers.mamba import Mamba
from brickformer.mixers.mamba2 import Mamba2
from brickformer.mixers.shortconv import ShortConv
from brickformer.models import (
    AnyModel,
    Decoder,
    DecoderModel,
    Encoder,
    EncoderDecoder,
    EncoderDecoderModel,
    EncoderModel,
    ModelSpec,
)
from brickformer.moe import MoE, Router
from brickformer.norms import DynamicTanh, LayerNorm, ScaleNorm
from brickformer.positions import Alibi, Learned, Randomized, Rope, T5Bias, Yarn
from brickformer.presets import bert, gpt2, llama, vaswani, vaswani_small

FOLDER = Path(__file__).parent / "files"
COMMAND = "PYTHONPATH=. python tests/golden/models.py"
ROWS, TOKENS = 2, 7


def hybrid() -> Decoder:
    """Every mixer once, most norms and placements, experts, over a table of learned positions."""
    mixers = [
        Attention(4, kv_heads=2, position=Rope(), mask=Mask(window=3), qk_norm=LayerNorm(), sinks=True, gate=True),
        Attention(4, position=Alibi(), softcap=2.0, bias=True),
        DifferentialAttention(2, position=Rope(layout="interleaved")),
        LatentAttention(4, rank=6, rope_dim=2, q_rank=5),
        GatedDelta(2),
        Mamba(state=3),
        Mamba2(head_dim=8, state=4),
        LSTM(),
        ShortConv(Attention(4, position=Rope(scaling=Yarn(factor=4.0, original=8)))),
    ]
    options: list[dict[str, Any]] = [
        {"place": "post", "norm": LayerNorm()},
        {"place": "peri", "norm": ScaleNorm()},
        {"place": "branch"},
        {"place": "deep", "norm": DynamicTanh()},
        {"arrange": "parallel"},
        {"layerscale": 0.5},
    ]
    ffns = [MoE(4, GLU(8), Router(2, score="sigmoid"), shared=MLP(8)), GLU(12, activation="gelu"), MLP(12)]
    layers = [Layer(m, ffns[i % len(ffns)], **options[i % len(options)]) for i, m in enumerate(mixers)]
    return Decoder(
        13, 16, tuple(layers), embed=Embed(Learned(64), scaled=True, norm=LayerNorm()), head=Head(softcap=5.0)
    )


def reader() -> Encoder:
    """A looped encoder with T5's bias and places read in strides."""
    layer = Layer(Attention(4, mask=FULL, position=T5Bias(buckets=8, max_distance=16)), MLP(12, activation="silu"))
    embed = Embed(Learned(64), randomized=Randomized(range=64, stride=3))
    return Encoder(13, 16, (layer,), embed=embed, head=Head(tied=False, bias=True), loops=3)


SMALL: dict[str, Any] = {"vocab": 13, "dim": 16, "depth": 2, "heads": 4}
MODELS: dict[str, Callable[[], Decoder | Encoder | EncoderDecoder]] = {
    "bert": lambda: bert(**SMALL, max_len=16),
    "gpt2": lambda: gpt2(**SMALL, max_len=16),
    "llama": lambda: llama(**SMALL, kv_heads=2),
    "vaswani": lambda: vaswani(**SMALL, max_len=16, place="post", shared=True),
    "vaswani_small": lambda: vaswani_small(**SMALL, target_vocab=11),
    "hybrid": hybrid,
    "reader": reader,
}


def fill(model: nn.Module) -> None:
    """Give every parameter values that follow from its name, its shape and nothing else."""
    for name, p in model.named_parameters():
        wave = torch.sin(torch.arange(p.numel(), dtype=torch.float64) * 0.73 + zlib.crc32(name.encode()) % 1000)
        value = wave * 1.5 * p.shape[-1] ** -0.5 if p.ndim > 1 else 0.5 + 0.3 * wave
        p.data = value.view(p.shape)


def say(model: AnyModel) -> Tensor:
    """The model's answer to fixed ids, the second row padded where a source can be."""
    grid = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    src, tgt, valid = (grid * 7 + 3) % 13, (grid * 5 + 1) % 11, torch.ones(ROWS, TOKENS, dtype=torch.bool)
    valid[1, 5:] = False
    match model:
        case DecoderModel():
            return model(src, Span.of(src, valid=valid))[valid]
        case EncoderModel():
            h = model(src, valid)
            return (h if model.head is None else model.logits(h))[valid]
        case EncoderDecoderModel():
            return model(src, tgt, valid)


def digest(out: Tensor) -> dict[str, Any]:
    """A few numbers that change whenever the outputs do."""
    flat = out.detach().flatten()
    steps = torch.arange(len(flat), dtype=torch.float64)
    numbers = {
        "mean": flat.mean(),
        "std": flat.std(),
        "min": flat.min(),
        "max": flat.max(),
        "sin": (flat * torch.sin(steps)).sum(),
        "cos": (flat * torch.cos(1.7 * steps)).sum(),
    }
    return {
        "shape": list(out.shape),
        **{name: round(float(n), 9) for name, n in numbers.items()},
        "first": [round(float(x), 9) for x in flat[:4]],
        "last": [round(float(x), 9) for x in flat[-4:]],
    }


def record(spec: ModelSpec) -> dict[str, Any]:
    """What is kept of a model."""
    model = spec.build().double().eval()
    fill(model)
    with torch.no_grad():
        out = say(model)
    return {
        "spec": spec.to_dict(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "shapes": {name: list(x.shape) for name, x in model.state_dict().items()},
        "digest": digest(out),
    }


def main() -> None:
    """Write every file anew."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name, make in MODELS.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(record(make()), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
