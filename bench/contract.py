"""The contract matrix: how many models of bricks keep every promise, and how many x-transformers of as many options do.

    python bench/contract.py

Ours: every cell of the contract suite (tests/contract/bricks.py: every brick in every family under every placement, and
a list in which every option meets every brick), every check that its family owes (tests/contract/checks.py), float64.
x-transformers: 8 kinds of position x 8 forms of attention, three of those checks, float32: no token depends on a later
one; decoding with its cache says what a full pass says; a row padded on the left (`seq_start_pos`, as its own
`generate` pads) says what it says alone. All parameters are shaken on both sides, so that each of them matters.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from common import ROOT, keep, table
from torch import Tensor, nn

sys.path.pop(0)  # this folder, whose contract.py would hide the suite of that name
sys.path.insert(0, str(ROOT / "tests"))
from contract.bricks import SLOTS, pairs, stars
from contract.checks import failures, owed

warnings.filterwarnings("ignore")
VOCAB, TOKENS, FIRST, PADDING = 11, 10, 4, 3
TOLERANCE = 1e-4

POSITIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the layers, of the model
    "none": ({}, {"use_abs_pos_emb": False}),
    "learned table": ({}, {}),
    "sinusoid": ({}, {"scaled_sinu_pos_emb": True}),
    "rotary": ({"rotary_pos_emb": True}, {}),
    "xPos": ({"rotary_xpos": True}, {}),
    "ALiBi": ({"alibi_pos_bias": True}, {}),
    "T5 bias": ({"rel_pos_bias": True}, {}),
    "dynamic bias": ({"dynamic_pos_bias": True}, {}),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped (2 key heads)": {"attn_kv_heads": 2},
    "QK-norm": {"attn_qk_norm": True},
    "window of 4": {"attn_max_attend_past": 3},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "2 memory keys": {"attn_num_mem_kv": 2},
    "shifted tokens": {"shift_tokens": 1},
    "learned sinks": {"attn_head_learned_sink": True},
}


def ours() -> tuple[str, list[str]]:
    """A table of our cells by family, and what fails."""
    cells = list(dict.fromkeys([*stars(), *pairs()]))
    models: Counter[str] = Counter()
    checks: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    found = []
    began = time.perf_counter()
    for i, cell in enumerate(cells):
        model = cell.build()
        wrong = failures(model)
        models[cell.family] += 1
        checks[cell.family] += len(owed(model))
        failed[cell.family] += bool(wrong)
        found += [f"`{cell}`: {line}" for line in wrong]
        if sys.stderr.isatty():
            print(f"\r{i + 1} of {len(cells)} models", end="", file=sys.stderr)
    seconds = time.perf_counter() - began
    rows = [(f, models[f], checks[f], failed[f]) for f in models]
    rows.append(("**all**", f"**{models.total()}**", f"**{checks.total()}**", f"**{failed.total()}**"))
    entries = sum(map(len, SLOTS.values()))
    said = (
        f"**{models.total()} models, {failed.total()} fail.** {entries} entries in {len(SLOTS)} slots; {seconds:.0f} s."
    )
    return said + "\n\n" + table(("family", "models", "checks made", "models that fail"), rows), found


def build(layers: type[nn.Module], wrapper: type[nn.Module], position: str, form: str) -> nn.Module:
    """A tiny decoder of x-transformers, its parameters shaken."""
    torch.manual_seed(0)
    of_layers, of_model = POSITIONS[position]
    stack = layers(dim=16, depth=2, heads=4, attn_dim_head=8, verbose=False, **of_layers, **FORMS[form])
    model = wrapper(num_tokens=VOCAB, max_seq_len=32, attn_layers=stack, **of_model).eval()
    noise = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data += torch.randn(p.shape, generator=noise) * (p.shape[-1] ** -0.5 if p.ndim > 1 else 0.3)
    return model


@torch.no_grad()
def broken(model: nn.Module) -> list[str]:
    """Which of the three promises it breaks, by how much."""
    ids = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    full = model(ids)

    def causal() -> Tensor:
        other = torch.cat([ids[:, :6], (ids[:, 6:] + 1) % VOCAB], 1)
        return model(other)[:, :6] - full[:, :6]

    def cached() -> Tensor:
        logits, cache = model(ids[:, :FIRST], return_intermediates=True)
        said = [logits]
        for end in range(FIRST + 1, TOKENS + 1):
            logits, cache = model(ids[:, :end], cache=cache, return_intermediates=True)
            said.append(logits[:, -1:])
        return torch.cat(said, 1) - full

    def padded() -> Tensor:
        ahead = torch.cat([ids.new_zeros(2, PADDING), ids], 1)
        return model(ahead, seq_start_pos=torch.full((2,), PADDING))[:, PADDING:] - full

    checks: dict[str, Callable[[], Tensor]] = {"causality": causal, "cache": cached, "left padding": padded}
    found = []
    for name, check in checks.items():
        try:
            off = check().abs().max().item()
        except Exception as e:  # whatever it raises is the finding
            found.append(f"{name}: {type(e).__name__}")
            continue
        if not off <= TOLERANCE:
            found.append(f"{name}: off by {off:.2g}")
    return found


def theirs() -> str:
    """The same of x-transformers, or why not."""
    try:
        from x_transformers import Decoder, TransformerWrapper
    except ImportError:
        return "x-transformers is not installed: not checked."
    rows, wrong, raised = [], 0, 0
    for form in FORMS:
        cells = []
        for position in POSITIONS:
            found = broken(build(Decoder, TransformerWrapper, position, form))
            silent = any("off by" in line for line in found)
            wrong, raised = wrong + silent, raised + (bool(found) and not silent)
            cells.append("; ".join(found) or "holds")
        rows.append((form, *cells))
    count = len(FORMS) * len(POSITIONS)
    said = (
        f"**{count} decoders, {wrong + raised} fail**: {wrong} give other numbers without a word, {raised} raise. "
        f"Tolerance {TOLERANCE:g}, logits of the order of 1."
    )
    return said + "\n\n" + table(("attention", *POSITIONS), rows)


def main() -> None:
    """Check both and keep the tables."""
    made, found = ours()
    parts = ["## brickformer", made, *(["\n".join(f"- {line}" for line in found)] if found else [])]
    keep("contract", "The contract matrix", [*parts, "## x-transformers", theirs()], "x-transformers")


if __name__ == "__main__":
    main()
