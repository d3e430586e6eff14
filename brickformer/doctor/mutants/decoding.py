"""Planted bugs. Caches and decoding."""

from __future__ import annotations

from typing import Final

from brickformer.doctor.mutants.bug import Planted, planted

BUGS: Final[list[Planted]] = [
    # ---- caches and decoding
    planted(
        "positions start again",
        "cached",
        "rotary",
        ("start = 0 if past is None else past[0].shape[2]", "start = 0"),
        ("T, start + T", "T, k.shape[2]"),
        ("torch.arange(start + T) > at", "torch.arange(k.shape[2]) > at + k.shape[2] - T"),
        cases="",
    ),
    planted(
        "one position too far",
        "cached",
        "rotary",
        ("q, k = rotate(q, start), rotate(k, start)", "q, k = rotate(q, start + (start > 0)), rotate(k, start)"),
        cases="R104",
    ),
    planted(
        "a single query sees the first key",
        "cached",
        "rotary",
        ("at = torch.arange(start, start + T)", "at = torch.arange(T)"),
        cases="R106",
    ),
    planted(
        "only the last keys are kept",
        "cached",
        "rotary",
        ("        keep = (k, v)", "        keep = (k[:, :, -1:], v[:, :, -1:])"),
        cases="R148",
    ),
    planted(
        "another scale when decoding",
        "cached",
        "seq2seq",
        ("logits[:, -1].argmax", "(logits[:, -1] * torch.linspace(0.5, 2, logits.size(-1))).argmax"),
        says={"decode": "greedy"},
        cases="V003",
    ),
    planted(
        "another mask when decoding",
        "cached",
        "seq2seq",
        ("trg, memory, model.make_trg_mask(trg), model", "trg, memory, model.make_trg_mask(trg).triu(1), model"),
        says={"decode": "greedy"},
        cases="R012",
    ),
    planted(
        "the least likely is taken",
        "cached",
        "seq2seq",
        ("logits[:, -1].argmax", "logits[:, -1].argmin"),
        says={"decode": "greedy"},
        cases="R110",
    ),
    planted(
        "generates with one token of context",
        "cached",
        "decoder",
        ("self(idx[:, -self.max_len :])", "self(idx[:, -1:])"),
        cases="",
    ),
]
