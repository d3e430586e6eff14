"""Planted bugs and clean models in further styles: raw parameters, complex rotations, a module a head, linear attention."""

from __future__ import annotations

from typing import Any, Final

from brickformer.doctor.mutants.bug import Clean, Planted, planted

LOGP: Final[dict[str, Any]] = {"loss": "lm_loss", "pad": 0}

BUGS: Final[list[Planted]] = [
    # ---- raw parameters and einsum
    planted("scaled by the length, in einsum", "scale", "einsum", ("q.shape[-1] ** 0.5", "q.shape[2] ** 0.5")),
    planted(
        "the smallest positive number as a mask",
        "mask value",
        "einsum",
        ("torch.finfo(s.dtype).min", "torch.finfo(s.dtype).tiny"),
    ),
    planted("the triangle of the future", "causality", "einsum", (".tril()", ".triu()")),
    planted(
        "queries and keys exchanged in einsum", "softmax axis", "einsum", ('"bhts,bhsk->bhtk"', '"bhst,bhsk->bhtk"')
    ),
    # ---- complex rotation
    planted(
        "queries turned and keys not",
        "positions",
        "complex",
        ("k = turned(self.k(x).view(b, t, self.groups, self.width), by)", "k = self.k(x).view(b, t, self.groups, -1)"),
    ),
    planted(
        "keys turned backwards",
        "positions",
        "complex",
        ("(b, t, self.groups, self.width), by)", "(b, t, self.groups, self.width), by.conj())"),
    ),
    planted(
        "turned by the number of the head",
        "positions",
        "complex",
        ("by[None, :, None, :]", "by[: z.shape[2]][None, None]"),
        at="blocks.0.attention",
    ),
    planted(
        "one frequency for all pairs",
        "positions",
        "complex",
        ("torch.arange(0, width, 2).float() / width", "(torch.arange(0, width, 2) // width).float()"),
        at="turns",
    ),
    planted(
        "complex rotation, key heads tiled",
        "grouped heads",
        "complex",
        ("k = k.repeat_interleave(self.heads // self.groups, 2)", "k = k.repeat(1, 1, self.heads // self.groups, 1)"),
    ),
    planted(
        "root mean square over tokens as well",
        "norm axis",
        "complex",
        ("x.square().mean(-1, keepdim=True)", "x.square().mean((1, 2), keepdim=True)"),
    ),
    # ---- sums in place of a softmax
    planted(
        "the denominator sees the future",
        "causality",
        "linear",
        ("k.cumsum(2))", "k.sum(2, keepdim=True).expand_as(k))"),
    ),
    planted("sums over the batch", "batch", "linear", ("v).cumsum(2)", "v).cumsum(0)")),
    # ---- scores as (query, key, row, head)
    planted("softmax over the first axis", "softmax axis", "relative", ("dim=1)", "dim=0)")),
    planted("softmax over rows, masked", "softmax axis", "relative", ("dim=1)", "dim=2)")),
    # ---- a module for each head
    planted(
        "heads in a list",
        "registration",
        "heads",
        ("nn.ModuleList([Head(d, d // h, p) for _ in range(h)])", "[Head(d, d // h, p) for _ in range(h)]"),
    ),
    planted(
        "one head four times",
        "sharing",
        "heads",
        ("nn.ModuleList([Head(d, d // h, p) for _ in range(h)])", "nn.ModuleList([Head(d, d // h, p)] * h)"),
    ),
    planted("padding or the past", "causality", "heads", ("[:, None, :] & torch", "[:, None, :] | torch"), at=""),
    planted(
        "log_softmax over time", "softmax axis", "heads", ("self.norm(x)), dim=-1)", "self.norm(x)), dim=1)"), at=""
    ),
    planted("nll of probabilities", "loss", "heads", ("F.log_softmax(self", "F.softmax(self"), says=LOGP),
    # ---- lengths, and masks given by the caller
    planted(
        "the mask of a longer row, shifted",
        "padding",
        "lengths",
        ("[torch.zeros(B, 1, dtype=torch.bool), blocked]", "[blocked, torch.zeros(B, 1, dtype=torch.bool)]"),
        at="",
    ),
    planted(
        "padding of the memory not passed on",
        "padding",
        "tutorial",
        (
            "            tgt_padding_mask,\n            memory_key_padding_mask,",
            "            tgt_padding_mask,\n            None,",
        ),
        at="transformer.decoder",
    ),
    planted(
        "the target's mask not passed on",
        "causality",
        "tutorial",
        ("            tgt_mask,\n            None,", "            None,\n            None,"),
        at="transformer.decoder",
    ),
    # ---- other rows, and generate()
    planted(
        "the first row's memory for all rows",
        "batch",
        "seq2seq",
        ("memory = self.encoder(src, src_mask)", "memory = self.encoder(src, src_mask)[:1].expand(len(src), -1, -1)"),
        at="",
    ),
    planted(
        "generate() reads the oldest ids",
        "length",
        "decoder",
        ("idx[:, -self.max_len :]", "idx[:, : self.max_len]"),
        at="",
    ),
]

CLEAN: Final[tuple[Clean, ...]] = (
    Clean("raw parameters and einsum", "einsum"),
    Clean("complex rotation", "complex"),
    Clean("sums in place of a softmax", "linear"),
    Clean("scores as (query, key, row, head)", "relative"),
    Clean("a module for each head", "heads"),
    Clean("a module for each head, with its loss", "heads", says=LOGP),
    Clean("lengths in place of a mask", "lengths"),
    Clean("every mask given by the caller", "tutorial"),
    Clean(
        "positions added to queries and keys alone",
        "encoder",
        changes=(
            (
                "self.dense = nn.Linear(dim, dim)",
                "self.dense = nn.Linear(dim, dim)\n        self.place = nn.Parameter(torch.randn(32, dim) * 0.1)",
            ),
            ("self.query(x)", "self.query(x + self.place[:T])"),
            ("self.key(x)", "self.key(x + self.place[:T])"),
            (" + self.positions[:, : input_ids.size(1)]", ""),
            ("        self.positions = nn.Parameter(torch.randn(1, max_len, dim) * 0.02)\n", ""),
        ),
    ),
)
