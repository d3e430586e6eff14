"""Planted bugs. The future is seen, and norms that run over time or the batch."""

from __future__ import annotations

from typing import Final

from brickformer.doctor.mutants.bug import MASK, Planted, planted

BUGS: Final[list[Planted]] = [
    # ---- the future
    planted("no causal mask", "causality", "decoder", MASK, cases="R002 R142 R146"),
    planted(
        "transposed causal mask", "causality", "decoder", ("~self.tril[:T, :T]", "~self.tril[:T, :T].T"), cases="R008"
    ),
    planted(
        "the mask hides one too few",
        "causality",
        "decoder",
        ("torch.tril(torch.ones(max_len, max_len))", "torch.tril(torch.ones(max_len, max_len), 1)"),
    ),
    planted("no target mask in the translator", "causality", "seq2seq", ("pad & causal", "pad"), cases="R010"),
    planted(
        "no mask given to torch's layers",
        "causality",
        "library",
        ("self.encoder(x, mask=mask)", "self.encoder(x)"),
        make="make_lm",
    ),
    planted("is_causal forgotten", "causality", "library", ("is_causal=True, ", ""), make="make_fused"),
    planted(
        "keys are mixed along time",
        "causality",
        "rotary",
        ("        keep = (k, v)", "        keep = (k, v)\n        v = v + 0.1 * v.mean(2, keepdim=True)"),
        cases="V021",
    ),
    planted(
        "padding blanks rows of queries",
        "causality",
        "seq2seq",
        ("pad = (trg != self.trg_pad_idx)[:, None, None, :]", "pad = (trg != self.trg_pad_idx)[:, None, :, None]"),
        cases="V001",
    ),
    # ---- norms
    planted(
        "norm over time and features",
        "norm axis",
        "decoder",
        ("x.mean(-1, keepdim=True)", "x.mean((-2, -1), keepdim=True)"),
        cases="R006",
    ),
    planted(
        "norm over time", "norm axis", "rotary", ("x.pow(2).mean(-1, keepdim=True)", "x.pow(2).mean(1, keepdim=True)")
    ),
    planted(
        "norm over the batch",
        "norm axis",
        "decoder",
        ("x.std(-1, keepdim=True)", "x.std(0, keepdim=True, unbiased=False)"),
    ),
    planted(
        "a norm over one feature",
        "norm axis",
        "library",
        ("features=3, dim=32, heads=4", "features=3, dim=1, heads=1"),
        ("torch.cat([angle.sin(), angle.cos()], -1)[None]", "t[None] / 9"),
        make="make_forecaster",
        cases="R152",
    ),
]
