"""Planted bugs. Weights: registered, shared, tied, dead, copied."""

from __future__ import annotations

from typing import Final

from brickformer.doctor.mutants.bug import Planted, planted

BUGS: Final[list[Planted]] = [
    # ---- weights
    planted(
        "layers in a list",
        "registration",
        "rotary",
        (
            "nn.ModuleList(Layer(dim, heads, groups) for _ in range(depth))",
            "[Layer(dim, heads, groups) for _ in range(depth)]",
        ),
        cases="R074",
    ),
    planted(
        "a table that is no buffer",
        "registration",
        "seq2seq",
        ('self.register_buffer("table", table)', "self.table = table"),
        cases="V002",
    ),
    planted(
        "a tensor that is no parameter",
        "registration",
        "encoder",
        ("nn.Parameter(torch.randn(1, max_len, dim) * 0.02)", "(torch.randn(1, max_len, dim) * 0.02).requires_grad_()"),
    ),
    planted(
        "one block for all",
        "sharing",
        "seq2seq",
        (
            "nn.ModuleList([EncoderLayer(dim, heads, drop) for _ in range(depth)])",
            "nn.ModuleList([EncoderLayer(dim, heads, drop)] * depth)",
        ),
        cases="R076",
    ),
    planted(
        "one feed-forward for all",
        "sharing",
        "decoder",
        (
            "self.apply(self.init)",
            "for block in self.blocks:\n            block.ffn = self.blocks[0].ffn\n        self.apply(self.init)",
        ),
        cases="R078",
    ),
    planted(
        "tied on one memory",
        "tying",
        "decoder",
        ("self.head.weight = self.tok.weight", "self.head.weight = nn.Parameter(self.tok.weight)"),
        cases="V012",
    ),
    planted(
        "copied instead of tied",
        "tying",
        "decoder",
        ("self.head.weight = self.tok.weight", "self.head.weight.data.copy_(self.tok.weight.data)"),
        cases="R080 R082",
    ),
    planted(
        "a parameter without use",
        "dead parameters",
        "rotary",
        ("self.wo = ", "self.extra = nn.Linear(dim, dim)\n        self.wo = "),
        cases="R130",
    ),
    planted(
        "a detached branch",
        "dead parameters",
        "decoder",
        ("x = x + self.attn(self.norm1(x))", "x = x + self.attn(self.norm1(x)).detach()"),
    ),
    planted(
        "a lambda closes over self",
        "copies",
        "decoder",
        (
            "self.ffn = FeedForward(dim, drop)",
            "self.ffn = FeedForward(dim, drop)\n        self.fed = lambda x: self.ffn(self.norm2(x))",
        ),
        ("return x + self.ffn(self.norm2(x))", "return x + self.fed(x)"),
        cases="V009",
    ),
    planted(
        "squeeze takes the batch",
        "batch",
        "encoder",
        ("return self.classify(h)", "return self.classify(h).squeeze()"),
        make="make_classifier",
    ),
]
