"""Properties of what a model learns with and is kept as: gradients, the first loss, files.

Each returns what it tried, and raises `Broken` with the numbers otherwise.
Shapes: ids (B, T); logits (B, T, V).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from brickformer.linear import FusedLinear
from brickformer.moe import Routing, TopKRouter
from brickformer.proof.subject import Broken, Subject, number, off_flex, short, worst

CHANCE: Final = 0.1
"""How far the first loss may be from ln V, as a part of it: 0.02 nat by design, the rest for a few hundred tokens."""
CHOSEN: Final = 8
"""Tokens that have to choose an expert before it owes a gradient."""


def gradients(s: Subject) -> str:
    """Every parameter, and each projection inside a fused one, gets a finite gradient that is not all zero."""
    named = [(name, p) for name, p in s.model.named_parameters() if p.requires_grad]
    reached: dict[str, bool] = {name: False for name, _ in named}
    with _choices(s.model) as choices, torch.enable_grad():
        for seed in range(4):  # what one draw of tokens does not reach, another may
            out = s.say(s.ids(8, seed=seed))
            weight = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(9), dtype=torch.float64)
            got = torch.autograd.grad((out * weight.to(out)).sum(), [p for _, p in named], allow_unused=True)
            for (name, _), grad in zip(named, got, strict=True):
                if grad is not None and not bool(grad.isfinite().all()):
                    raise Broken(f"the gradient of {short(name)} is not finite")
                reached[name] = reached[name] or (grad is not None and _all_parts(s.model, name, grad))
            if all(reached.values()):
                break
    idle = tuple(name for name, count in choices.items() if count < CHOSEN)
    dead = [name for name, ok in reached.items() if not ok and not name.startswith(idle)]
    if dead:
        more = f" (and {len(dead) - 1} more)" if len(dead) > 1 else ""
        raise Broken(f"{short(dead[0])}{more} gets no gradient, or one of zeros only")
    return f"{len(named)} parameters, {sum(p.numel() for _, p in named):,} numbers"


def _all_parts(model: nn.Module, name: str, grad: Tensor) -> bool:
    owner = model.get_submodule(name.rpartition(".")[0])
    pieces = grad.split(owner.parts) if isinstance(owner, FusedLinear) and grad.ndim == 2 else (grad,)
    return all(bool(piece.any()) for piece in pieces)


@contextmanager
def _choices(model: nn.Module) -> Iterator[dict[str, int]]:
    """How many tokens chose each expert while this was open, by the beginning of its parameters' names."""
    chosen: dict[str, int] = {}

    def note(name: str, routing: Routing) -> None:
        for e, load in enumerate(routing.load.tolist()):
            chosen[f"{name}.experts.{e}."] = chosen.get(f"{name}.experts.{e}.", 0) + load

    hooks = [
        m.register_forward_hook(lambda router, args, out, name=name: note(name.removesuffix(".router"), out))
        for name, m in model.named_modules()
        if isinstance(m, TopKRouter)
    ]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def saved(s: Subject) -> str:
    """Written to safetensors and read into another model, built from the text of the spec: the same bits."""
    read = type(s.spec).from_json(s.spec.to_json())
    if read != s.spec:
        raise Broken("the spec comes back from JSON as another one")
    torch.manual_seed(4)  # not the seed of the model: what is not in the file must not come back by chance
    other = read.build().to(next(s.model.parameters()).dtype).eval()
    off_flex(other)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_model(s.model, str(path))
        size = path.stat().st_size
        missing, unexpected = load_model(other, path, strict=False)
    if missing or unexpected:
        raise Broken(f"in the model but not in the file: {sorted(missing)}, in the file only: {sorted(unexpected)}")
    ids = s.ids(2)
    off, at = worst(s.say(ids, model=other), s.say(ids), "the loaded model")
    if off > 0.0:
        raise Broken(
            f"the loaded model is off by {number(off)} at token {at}, allowed 0: a tensor is not in the file. Register "
            "it as a parameter or a buffer"
        )
    return f"{size:,} bytes of safetensors into another model: the same bits"


@torch.no_grad()
def first_loss(s: Subject) -> str:
    """Fresh from its spec, the loss on random targets is near ln V: nothing is preferred before anything is learnt."""
    model = s.fresh()
    ids, targets = s.ids(8), s.ids(8, seed=7)
    loss = float(F.cross_entropy(s.say(ids, model=model).flatten(0, 1), targets.flatten()))
    chance = math.log(s.side.spec.vocab)
    if not abs(loss / chance - 1.0) <= CHANCE:
        raise Broken(
            f"the first loss is {loss:.4g}, ln {s.side.spec.vocab} is {chance:.4f}, allowed {CHANCE:.0%} apart"
        )
    return f"{loss:.3f}, ln {s.side.spec.vocab} is {chance:.3f}"
