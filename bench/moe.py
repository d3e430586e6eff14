"""Mixture of experts beside a dense feed-forward of equal active width: parameters, time, how even the experts are.

    python bench/moe.py [--rounds 15] [--data FILE] [--steps 300]

8 experts, 2 for each token, each of half the dense hidden width: a token meets as many weights in both. Time is that of
the feed-forward by itself, forward and then forward and backward, medians of calls that take turns. The loads are those
of a small decoder after 300 steps on tinyshakespeare, counted on held-out text: 4 layers of width 128, each with such a
mixture, balance loss 0.01 as is the brick's default.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from common import DATA, keep, median, table, take_turns
from torch import nn

from brickformer import GLU, MLP, Attention, Decoder, Layer, RMSNorm, Rope, pattern
from brickformer.feedforward import FeedForward, FeedForwardSpec
from brickformer.moe import MoE, Routing, TopKRouter
from brickformer.recipes.run import FROM_DATA, Run, completed, forward
from brickformer.tasks.text import Text
from brickformer.train import fit
from brickformer.train.optim import AdamW
from brickformer.train.settings import Training

EXPERTS, CHOSEN = 8, 2
SIZES = {  # what: (D, active hidden width, tokens)
    "real": (512, 2048, 4096),
    "small": (128, 512, 768),
}
KINDS: dict[str, Callable[[int], FeedForwardSpec]] = {"MLP": MLP, "GLU": GLU}
LIMIT, EVEN = 1.15, 0.25


def no_gradients(module: FeedForward, x: torch.Tensor) -> None:
    """One call in eval mode."""
    with torch.inference_mode():
        module(x)


def learn(module: FeedForward, x: torch.Tensor) -> None:
    """Forward and backward, in training mode: losses of the router included."""
    module(x).sum().backward()


def timed(dim: int, hidden: int, tokens: int, rounds: int) -> list[tuple[str, str, int, int, float, float]]:
    """(kind, pass, dense parameters, mixture's, dense seconds, mixture's)."""
    torch.manual_seed(0)
    x = torch.randn(1, tokens, dim)
    jobs: dict[str, Callable[[], None]] = {}
    sizes: dict[str, int] = {}
    for kind, make in KINDS.items():
        for name, made in (
            ("dense", make(hidden).build(dim)),
            ("mixture", MoE(EXPERTS, make(hidden // CHOSEN)).build(dim)),
        ):
            sizes[f"{kind}|{name}"] = sum(p.numel() for p in made.parameters())
            quiet = make_quiet(made)
            jobs[f"{kind}|forward|{name}"] = lambda m=quiet: no_gradients(m, x)
            jobs[f"{kind}|forward and backward|{name}"] = lambda m=made: learn(m, x)
    times = {key: median(found) for key, found in take_turns(jobs, rounds, warm=2).items()}
    return [
        (
            kind,
            what,
            sizes[f"{kind}|dense"],
            sizes[f"{kind}|mixture"],
            times[f"{kind}|{what}|dense"],
            times[f"{kind}|{what}|mixture"],
        )
        for kind in KINDS
        for what in ("forward", "forward and backward")
    ]


def make_quiet(module: FeedForward) -> FeedForward:
    """A copy in eval mode that shares the weights."""
    import copy

    shared = {id(p): p for p in module.parameters()}
    return copy.deepcopy(module, shared).eval()


def loads(data: Path, steps: int) -> tuple[list[list[float]], float]:
    """For each layer the share of choices of each expert, 1 = even; and the held-out loss."""
    layer = Layer(Attention(heads=4, position=Rope()), MoE(EXPERTS, GLU(128)), norm=RMSNorm())
    run = Run(
        task=Text(data=str(data), context=64),
        model=Decoder(FROM_DATA, 128, pattern([layer], 4)),
        train=Training(steps=steps, batch=12, optim=AdamW(lr=2e-3)),
    )
    source = run.task.prepare(0)
    torch.manual_seed(0)
    model = completed(run, source).model.build()
    fit(model, run.train, source.batch, forward)
    counted: dict[str, torch.Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, object, Routing], None]:
        def hook(router: nn.Module, args: object, out: Routing) -> None:
            counted[name] = counted.get(name, torch.zeros(EXPERTS)) + out.load

        return hook

    for name, module in model.named_modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(note(name))
    total = tokens = 0.0
    with torch.inference_mode():
        for batch in source.validation(12):
            logits = forward(model, batch)
            total += nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum").item()
            tokens += batch.tokens
    return [(c / c.mean()).tolist() for c in counted.values()], total / tokens


def main() -> None:
    """Measure and keep the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--data", type=Path, default=DATA / "tinyshakespeare" / "input.txt")
    p.add_argument("--steps", type=int, default=300)
    args = p.parse_args()
    rows, said = [], []
    for size, (dim, hidden, tokens) in SIZES.items():
        found = timed(dim, hidden, tokens, args.rounds)
        for kind, what, dense_n, moe_n, dense_s, moe_s in found:
            rows.append(
                (
                    f"{size}: D {dim}, active width {hidden}, {tokens} tokens",
                    kind,
                    what,
                    f"{dense_n:,}",
                    f"{moe_n:,} ({moe_n / dense_n:.2f} ×)",
                    f"{1e3 * dense_s:.2f}",
                    f"{1e3 * moe_s:.2f}",
                    f"**{moe_s / dense_s:.2f}**",
                )
            )
        worst = max(moe_s / dense_s for _, what, _, _, dense_s, moe_s in found if what == "forward")
        if size == "real":
            more = min(moe_n / dense_n for _, _, dense_n, moe_n, _, _ in found)
            verdict = "within" if worst <= LIMIT else "above"
            said.append(
                f"**{more:.1f} × the parameters for {worst:.2f} × the forward time** (the worse of MLP and GLU at the "
                f"real size; {verdict} the {LIMIT} × asked for)."
            )
        else:
            said.append(f"At the {size} size {worst:.2f} ×: there the many small products of the experts count.")
    shares, loss = loads(args.data, args.steps)
    low, high = min(map(min, shares)), max(map(max, shares))
    verdict = "within" if low >= 1 - EVEN and high <= 1 + EVEN else "**not** within"
    load_said = (
        f"After {args.steps} steps the least used expert gets {low:.2f} of an even share, the most used {high:.2f}: "
        f"{verdict} ± {100 * EVEN:.0f} %. Held-out loss {loss:.3f}."
    )
    header = ("size", "experts of", "pass", "dense parameters", "mixture", "dense, ms", "mixture, ms", "÷ dense")
    experts = ("layer", *(f"expert {e}" for e in range(EXPERTS)))
    keep(
        "moe",
        f"Mixture of experts: {EXPERTS} experts, {CHOSEN} a token, beside a dense feed-forward of equal active width",
        [
            " ".join(said),
            table(header, rows),
            "Share of the choices, 1 is even, on the held-out tenth of tinyshakespeare:",
            table(experts, [(i, *(f"{v:.2f}" for v in row)) for i, row in enumerate(shares)]),
            load_said,
        ],
    )


if __name__ == "__main__":
    main()
