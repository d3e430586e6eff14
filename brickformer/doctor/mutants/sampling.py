"""Planted bugs. Beams and filters, left padding, half precision, lengths, documents, groups of heads, empty rows."""

from __future__ import annotations

from typing import Final

from brickformer.doctor.mutants.bug import Planted, planted

BEAM: Final = {"beam": "beam"}
FILTERS: Final = {"filters": "=filters"}
READOUT: Final = (
    "weights = scores.softmax(dim=-1)",
    'scores[..., :-1, -1] = float("-inf")\n        weights = scores.softmax(dim=-1)',
)

BUGS: Final[list[Planted]] = [
    # ---- beams and filters
    planted(
        "the cache is not reordered",
        "beam",
        "loop",
        ("        cache = [(k[parents], v[parents]) for k, v in cache]\n", ""),
        says=BEAM,
        cases="R108",
    ),
    planted(
        "the worst beams are kept",
        "beam",
        "loop",
        ("total.flatten().topk(width)", "total.flatten().topk(width, largest=False)"),
        says=BEAM,
        cases="R110",
    ),
    planted(
        "divided by prompt and answer",
        "beam",
        "moe",
        ("s.item() / (step + 1)", "s.item() / (ids.shape[1] + step + 1)"),
        ("s.item() / new", "s.item() / (ids.shape[1] + new)"),
        says={**BEAM, "eos": 2},
        cases="R112",
    ),
    planted(
        "the worst hypothesis is returned",
        "beam",
        "moe",
        ("return max(done", "return min(done"),
        says={**BEAM, "eos": 2},
        cases="R110",
    ),
    planted(
        "min_p looks at id 0",
        "sampling filters",
        "loop",
        ("value * p.amax(-1, keepdim=True)", "value * p[..., [0]]"),
        says=FILTERS,
        cases="R114",
    ),
    planted(
        "min_p takes the best of the batch",
        "sampling filters",
        "loop",
        ("value * p.amax(-1, keepdim=True)", "value * p.max()"),
        says=FILTERS,
    ),
    planted(
        "top_p forgets to sort back",
        "sampling filters",
        "loop",
        ("gone.scatter(-1, order, gone)", "gone"),
        says=FILTERS,
    ),
    planted(
        "top_k keeps one less", "sampling filters", "loop", ("topk(int(value))", "topk(int(value) - 1)"), says=FILTERS
    ),
    # ---- left padding and half precision
    planted(
        "positions count padding",
        "left padding",
        "loop",
        (
            "        if attention_mask is not None:\n            place = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, start:]\n",
            "",
        ),
        cases="R058",
    ),
    planted(
        "the mask of padding ends after the prompt",
        "left padding",
        "loop",
        ("out[:, -1:], valid.long(), cache)", "out[:, -1:], valid.long() if cache is None else None, cache)"),
        says={"decode": "decode"},
        cases="R060",
    ),
    planted(
        "queries on padding see nothing",
        "left padding",
        "loop",
        ("torch.finfo(scores.dtype).min", 'float("-inf")'),
        cases="R024",
    ),
    planted(
        "the sentinel of float32 in half precision",
        "left padding",
        "loop",
        (
            "scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)",
            "scores = scores + torch.where(allowed, 0.0, torch.finfo(torch.float32).min).to(scores.dtype)",
        ),
        cases="R028",
    ),
    planted(
        "rotary angles in the type of the weights",
        "angles",
        "rotary",
        ("torch.arange(start, start + T).float()", "torch.arange(start, start + T).to(x)"),
        ("torch.arange(0, K, 2).float()", "torch.arange(0, K, 2).to(x)"),
        cases="R054",
    ),
    planted(
        "positions in bfloat16",
        "angles",
        "rotary",
        ("torch.arange(start, start + T).float()", "torch.arange(start, start + T).bfloat16()"),
        ("torch.arange(0, K, 2).float() / K)", "torch.arange(0, K, 2).float() / K).bfloat16()"),
    ),
    # ---- rows without a key
    planted(
        "a batch with a row of nothing but padding",
        "masked rows",
        "encoder",
        ("mask[1, 4:] = 0", "mask[1] = 0"),
        (
            "scores = scores + (1.0 - mask[:, None, None, :].to(scores)) * -1e4",
            'scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))',
        ),
        says={"batch": "=batch"},
        cases="R024",
    ),
    planted(
        "a source that is all padding",
        "masked rows",
        "seq2seq",
        ("src[1, 4:] = 0", "src[1] = 0"),
        ("mask == 0, -1e9", 'mask == 0, float("-inf")'),
        says={"batch": "=pair_batch"},
        cases="R026",
    ),
    # ---- lengths
    planted(
        "positions begin after the id of padding",
        "length",
        "encoder",
        ("        self.words = ", "        self.max_len = max_len\n        self.words = "),
        ("self.positions[:, : input_ids.size(1)]", "self.positions[:, 1 : input_ids.size(1) + 1]"),
        cases="R050",
    ),
    planted(
        "an odd width",
        "length",
        "seq2seq",
        ("torch.cos(t * freq)[:, : dim // 2]", "torch.cos(t * freq)"),
        says={"build": "built"},
        cases="R052",
    ),
    planted(
        "generates beyond the table",
        "length",
        "decoder",
        ("self(idx[:, -self.max_len :])", "self(idx)"),
        at="",
    ),
    # ---- documents, tables, groups
    planted(
        "documents see each other",
        "documents",
        "moe",
        ("allowed = allowed & (doc_ids[:, :, None] == doc_ids[:, None, :])", "pass"),
        cases="R122",
    ),
    planted(
        "documents see each other under a mask",
        "documents",
        "moe",
        ("if doc_ids is not None:", "if doc_ids is not None and attention_mask is None:"),
        cases="R122",
    ),
    planted(
        "the readout token is seen",
        "documents",
        "encoder",
        (READOUT[0], READOUT[1].replace("[..., :-1, -1]", "[..., :-1, -2]")),
        says={"kind": "encoder", "allowed": "=readout"},
        cases="R144",
    ),
    planted(
        "key heads are tiled",
        "grouped heads",
        "rotary",
        ("k = k.repeat_interleave(self.heads // self.groups, 1)", "k = k.repeat(1, self.heads // self.groups, 1, 1)"),
        ("v = v.repeat_interleave(self.heads // self.groups, 1)", "v = v.repeat(1, self.heads // self.groups, 1, 1)"),
        cases="R120",
    ),
    planted(
        "key heads are tiled, value heads repeated",
        "grouped heads",
        "rotary",
        ("k = k.repeat_interleave(self.heads // self.groups, 1)", "k = k.repeat(1, self.heads // self.groups, 1, 1)"),
        cases="R120",
    ),
    # ---- scores beyond the mask
    planted(
        "scores beyond the mask of -1e5",
        "mask value",
        "decoder",
        ('float("-inf"))\n        att', "-1e5)\n        att"),
        (
            "self.head.weight = self.tok.weight",
            "self.head.weight = self.tok.weight\n        for b in self.blocks:\n            b.attn.qkv.weight.data[: 2 * dim] *= 5000",
        ),
        cases="R004",
        at="blocks.0.attn",
    ),
    # ---- the target of a translator
    planted(
        "targets of a translator shifted twice",
        "shift",
        "seq2seq",
        ("logits = model(src, trg[:, :-1])", "logits = model(src, trg[:, :-2])"),
        ("trg[:, 1:].flatten(), ignore_index=0)", "trg[:, 2:].flatten(), ignore_index=0)"),
        says={"loss": "pair_loss"},
        cases="R138",
    ),
    planted(
        "targets of a translator not shifted",
        "shift",
        "seq2seq",
        ("logits = model(src, trg[:, :-1])", "logits = model(src, trg)"),
        ("trg[:, 1:].flatten(), ignore_index=0)", "trg.flatten(), ignore_index=0)"),
        says={"loss": "pair_loss"},
        cases="R138",
    ),
]
