"""Planted bugs. The loss: shifts, padding, what it is given."""

from __future__ import annotations

from typing import Final

from brickformer.doctor.mutants.bug import LM, PADDED, Planted, planted

BUGS: Final[list[Planted]] = [
    # ---- loss
    planted(
        "targets not shifted",
        "shift",
        "decoder",
        ("model(ids[:, :-1], ids[:, 1:])", "model(ids, ids)"),
        says=LM,
        cases="",
    ),
    planted(
        "targets shifted twice",
        "shift",
        "rotary",
        ("logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())", "logits[:, :-2].flatten(0, 1), ids[:, 2:].flatten())"),
        says=LM,
        cases="R132 R134 R140",
    ),
    planted(
        "shifted after flattening",
        "shift",
        "rotary",
        ("logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())", "logits.flatten(0, 1)[:-1], ids.flatten()[1:])"),
        says=LM,
        cases="R136",
    ),
    planted(
        "shifted the wrong way",
        "shift",
        "rotary",
        ("logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())", "logits[:, 1:].flatten(0, 1), ids[:, :-1].flatten())"),
        says=LM,
    ),
    planted(
        "softmax before cross entropy",
        "loss",
        "decoder",
        ("        logits = self.head(x)\n", "        logits = self.head(x).softmax(-1)\n"),
        says=LM,
        cases="R092",
    ),
    planted("nll_loss of raw scores", "loss", "decoder", ("F.cross_entropy(", "F.nll_loss("), says=LM),
    planted("padding is a target", "label padding", "rotary", (", ignore_index=0", ""), says=PADDED, cases="R096"),
    planted(
        "label smoothing counts padding",
        "label padding",
        "seq2seq",
        ("((0.9 * hit + 0.1 * logp.mean(-1)) * real)", "(0.9 * hit * real + 0.1 * logp.mean(-1))"),
        says={"loss": "smoothed_loss"},
        cases="R098",
    ),
    planted(
        "the end is padding",
        "label padding",
        "rotary",
        ("vocab=41", "vocab=42"),
        says={**PADDED, "eos": 0},
        cases="R156",
    ),
    planted(
        "only the easier half of the tokens counts",
        "random labels",
        "rotary",
        (
            "logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())",
            "logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction='none')"
            ".sort().values[: ids[:, 1:].numel() // 2].mean()",
        ),
        says=LM,
    ),
    planted("a table that is too large", "first loss", "decoder", ("std=0.02", "std=1.0"), says=LM, cases=""),
]
