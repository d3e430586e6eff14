"""Planted bugs. Positions, memory, randomness."""

from __future__ import annotations

from typing import Final

from brickformer.doctor.mutants.bug import Planted, planted

BUGS: Final[list[Planted]] = [
    # ---- positions
    planted("no positions", "positions", "decoder", (" + self.pos(torch.arange(T))", ""), cases=""),
    planted(
        "one row for all positions", "positions", "seq2seq", ("self.table[: x.size(1)]", "self.table[1]"), cases="V022"
    ),
    planted(
        "frequencies of each column",
        "positions",
        "seq2seq",
        ("torch.cos(t * freq)", "torch.cos(t * freq * 10000.0 ** (-1 / dim))"),
        cases="V031",
    ),
    planted("exponent doubled", "positions", "seq2seq", ("-math.log(10000.0)", "-2 * math.log(10000.0)"), cases="R042"),
    planted(
        "exponent of integers",
        "positions",
        "seq2seq",
        (
            "torch.exp(-math.log(10000.0) * torch.arange(0, dim, 2).float() / dim)",
            "torch.exp((-torch.arange(0, dim, 2) // (10 * dim)).clamp(0).float())",
        ),
        cases="R044",
    ),
    planted(
        "positions counted over the batch",
        "positions",
        "seq2seq",
        ("self.table[: x.size(1)]", "self.table[: x.size(0), None]"),
        cases="R048",
    ),
    planted("rotation left out", "positions", "rotary", ("q, k = rotate(q, start), rotate(k, start)", "q, k = q, k")),
    planted(
        "pairs of two angles",
        "positions",
        "rotary",
        ("angle = torch.cat([angle, angle], -1)", "angle = angle.repeat_interleave(2, -1)"),
        cases="R056",
    ),
    # ---- memory
    planted(
        "memory not passed",
        "memory",
        "seq2seq",
        ("self.cross(x, memory, memory, memory_mask)", "self.cross(x, x, x, mask)"),
    ),
    planted(
        "memory asks",
        "memory",
        "seq2seq",
        (
            "self.cross(x, memory, memory, memory_mask)",
            "F.pad(self.cross(memory, x, x, mask[:, :, -1:]), (0, 0, 0, 9))[:, : x.size(1)]",
        ),
        cases="R064",
    ),
    planted(
        "positions written into the memory",
        "aliasing",
        "seq2seq",
        (
            "        x = self.pos(self.embed(trg))\n",
            "        x = self.pos(self.embed(trg))\n        memory.add_(0.5)\n",
        ),
        cases="V014",
    ),
    planted(
        "decoder fed zeros",
        "input",
        "seq2seq",
        ("x = self.pos(self.embed(trg))", "x = self.pos(torch.zeros_like(self.embed(trg)))"),
        cases="R154",
    ),
    # ---- randomness
    planted("dropout left on", "eval", "encoder", ("self.drop, self.training", "self.drop, True"), cases="R070"),
    planted(
        "the kernel drops in eval",
        "eval",
        "library",
        ("self.dropout if self.training else 0.0", "self.dropout"),
        make="make_fused",
        cases="R068",
    ),
    planted(
        "a layer built in forward",
        "eval",
        "decoder",
        ("return self.drop(self.down(F.gelu(self.up(x))))", "return nn.Linear(x.shape[-1], x.shape[-1]).to(x)(x)"),
        cases="R072",
    ),
    planted(
        "eval takes another way",
        "eval",
        "encoder",
        (
            "        return x\n",
            "        return x if self.training else x.mean(1, keepdim=True).expand_as(x) * 0.5 + x\n",
        ),
        cases="R066",
    ),
]
