"""Planted bugs. Mask values, and masks of padding."""

from __future__ import annotations

from typing import Final

from brickformer.doctor.mutants.bug import FILL, Planted, planted

BUGS: Final[list[Planted]] = [
    # ---- mask values
    planted("mask filled with 0", "mask value", "decoder", (FILL, "att.masked_fill(~self.tril[:T, :T], 0.0)")),
    planted("mask filled with -1e-12", "mask value", "seq2seq", ("mask == 0, -1e9", "mask == 0, -1e-12"), cases="R014"),
    planted("mask filled with +1e-9", "mask value", "seq2seq", ("mask == 0, -1e9", "mask == 0, 1e-9"), cases="R016"),
    planted(
        "0 and 1 are added",
        "padding",
        "encoder",
        ("(1.0 - mask[:, None, None, :].to(scores)) * -1e4", "mask[:, None, None, :].to(scores)"),
        cases="R020",
    ),
    planted("mask of -1", "mask value", "rotary", ('float("-inf")', "-1.0")),
    planted("scores are multiplied by the mask", "causality", "decoder", (FILL, "att * self.tril[:T, :T]")),
    # ---- padding
    planted("the mask of padding is dropped", "padding", "encoder", ("if mask is not None:", "if False:"), cases=""),
    planted(
        "its polarity is flipped",
        "padding",
        "encoder",
        ("(1.0 - mask[:, None, None, :].to(scores))", "mask[:, None, None, :].to(scores)"),
        cases="R018",
    ),
    planted(
        "the classifier does not mask",
        "padding",
        "encoder",
        ("self.encoder(x, real)", "self.encoder(x)"),
        make="make_classifier",
        cases="V025",
    ),
    planted(
        "the classifier pools padding",
        "padding",
        "encoder",
        ("(h * real[..., None]).sum(1) / real.sum(1, keepdim=True)", "h.mean(1)"),
        make="make_classifier",
    ),
    planted(
        "source padding is seen in cross-attention",
        "padding",
        "seq2seq",
        (
            "return self.decoder(trg, memory, trg_mask, src_mask)",
            "return self.decoder(trg, memory, trg_mask, torch.ones_like(src_mask))",
        ),
        cases="R062",
    ),
    planted(
        "source padding is seen in the encoder",
        "padding",
        "seq2seq",
        ("memory = self.encoder(src, src_mask)", "memory = self.encoder(src, torch.ones_like(src_mask))"),
    ),
    planted(
        "upside down source mask",
        "padding",
        "seq2seq",
        ("(src != self.src_pad_idx)", "(src == self.src_pad_idx)"),
        cases="R012",
    ),
    planted(
        "the mask is made after positions were added",
        "padding",
        "encoder",
        ("real = x != 0", "real = (self.encoder.words(x) + self.encoder.positions[:, : x.size(1)]).abs().sum(-1) != 0"),
        make="make_classifier",
        cases="R022",
    ),
    planted(
        "memory_key_padding_mask forgotten",
        "padding",
        "library",
        ("            memory_key_padding_mask=src_key_padding_mask,\n", ""),
        make="make_translator",
    ),
]
