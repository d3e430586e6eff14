"""Planted bugs: our hand-written models with one thing broken, the probe that has to find it, the public case it tells.

`source` names a file of tests/doctor/models; old -> new are changes of its text. Nothing is written to disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from brickformer.doctor import Subject

MODELS = Path(__file__).parent / "models"


def module_of(source: str, *changes: tuple[str, str]) -> ModuleType:
    """A model file as a module, with its changes; every old text must stand in it."""
    text = (MODELS / f"{source}.py").read_text("utf-8")
    for old, new in changes:
        assert old in text, f"{source}: {old!r} is not in it"
        text = text.replace(old, new)
    module = ModuleType(source)
    exec(compile(text, f"{source} (planted)", "exec"), module.__dict__)
    return module


@dataclass(frozen=True)
class Planted:
    """name; cases: of the public list; probe: that must name it first. says: more about the subject, by names."""

    name: str
    probe: str
    source: str
    changes: tuple[tuple[str, str], ...]
    cases: tuple[str, ...] = ()
    make: str = "make"
    says: dict[str, Any] = field(default_factory=dict)

    def subject(self) -> Subject:
        """The broken model with what is said of it; strings name functions of its file."""
        module = module_of(self.source, *self.changes)
        said = {k: getattr(module, v) if isinstance(v, str) and k in CALLED else v for k, v in self.says.items()}
        return Subject(getattr(module, self.make)(), **said)


CALLED = ("loss", "decode", "call")
LM, PAIR, PADDED = {"loss": "lm_loss"}, {"loss": "pair_loss"}, {"loss": "padded_loss", "pad": 0}
MASK = ('att.masked_fill(~self.tril[:T, :T], float("-inf"))', "att")
FILL = 'att.masked_fill(~self.tril[:T, :T], float("-inf"))'
SPLIT = "view(B, T, self.heads, self.width).transpose(1, 2)"


def planted(name: str, probe: str, source: str, *changes: tuple[str, str], cases: str = "", **more: Any) -> Planted:
    """A planted bug on one line."""
    return Planted(name, probe, source, changes, tuple(cases.split()), **more)


PLANTED = [
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
        "memory",
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
    planted("a table that is too large", "first loss", "decoder", ("std=0.02", "std=1.0"), says=LM, cases=""),
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
