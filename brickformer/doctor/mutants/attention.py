"""Planted bugs. Attention itself: the axis of the softmax, the scale, the heads."""

from __future__ import annotations

from typing import Final

from brickformer.doctor.mutants.bug import SPLIT, Planted, planted

BUGS: Final[list[Planted]] = [
    # ---- attention
    planted(
        "softmax over queries",
        "softmax axis",
        "decoder",
        ("F.softmax(att, dim=-1)", "F.softmax(att, dim=-2)"),
        cases="R030",
    ),
    planted(
        "softmax over heads",
        "softmax axis",
        "encoder",
        ("scores.softmax(dim=-1)", "scores.softmax(dim=1)"),
        cases="R032",
    ),
    planted(
        "softmax over the batch",
        "softmax axis",
        "seq2seq",
        ("torch.softmax(scores, dim=-1)", "torch.softmax(scores, dim=0)"),
    ),
    planted("softmax twice", "softmax axis", "decoder", ("att = self.drop(att)", "att = self.drop(att.softmax(-1))")),
    planted("no scale", "scale", "decoder", (" / math.sqrt(self.width)", ""), cases=""),
    planted(
        "scaled by the width of the model", "scale", "decoder", ("math.sqrt(self.width)", "math.sqrt(D)"), cases="R034"
    ),
    planted(
        "heads and widths swapped", "scale", "decoder", (SPLIT, "view(B, T, self.width, self.heads).transpose(1, 2)")
    ),
    planted("scaled by the length", "scale", "seq2seq", ("self.width**0.5", "q.size(2) ** 0.5"), cases="V013"),
    planted("multiplied by the root", "scale", "rotary", ("self.width**-0.5", "self.width**0.5")),
    planted(
        "scaled twice",
        "scale",
        "library",
        ("p = self.dropout if", "q = q / math.sqrt(q.shape[-1])\n        p = self.dropout if"),
        make="make_fused",
    ),
    planted(
        "view without transpose", "heads", "decoder", (SPLIT, "reshape(B, self.heads, T, self.width)"), cases="R036"
    ),
    planted(
        "view without transpose in an encoder",
        "heads",
        "seq2seq",
        ("x.view(B, T, self.heads, self.width).permute(0, 2, 1, 3)", "x.view(B, self.heads, T, self.width)"),
        cases="R038",
    ),
    planted(
        "merged without moving heads back",
        "heads",
        "decoder",
        ("y.transpose(1, 2).reshape(B, T, D)", "y.reshape(B, T, D)"),
        cases="V011",
    ),
    planted(
        "one head written back",
        "heads",
        "rotary",
        ("y.transpose(1, 2).flatten(2)", "y[:, :1].expand(-1, self.heads, -1, -1).transpose(1, 2).flatten(2)"),
        cases="R150",
    ),
    planted(
        "heads and rows mixed",
        "batch",
        "encoder",
        (
            "out.reshape(B, T, D)",
            "out.permute(0, 2, 1, 3).reshape(self.heads, B, T, -1).permute(1, 2, 0, 3).reshape(B, T, D)",
        ),
        cases="R040",
    ),
    planted(
        "attention over the batch",
        "batch",
        "library",
        (
            "nn.TransformerEncoderLayer(dim, heads, 64, 0.1, batch_first=True)\n        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)\n        self.decoder",
            "nn.TransformerEncoderLayer(dim, heads, 64, 0.1)\n        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)\n        self.decoder",
        ),
        (
            "mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1], dtype=self.decoder.weight.dtype)",
            "mask = None",
        ),
        make="make_lm",
        says={"batch_first": True},
        cases="R046",
    ),
]
