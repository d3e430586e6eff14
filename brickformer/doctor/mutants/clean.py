"""Clean variants: what looks suspicious and is right. Every trap of the public reports is among them; none may draw an alarm."""

from __future__ import annotations

from typing import Final

from brickformer.doctor.mutants.accused import ACCUSED
from brickformer.doctor.mutants.bug import Clean
from brickformer.doctor.mutants.sampling import READOUT
from brickformer.doctor.mutants.styles import CLEAN as STYLES

CLEAN: Final[tuple[Clean, ...]] = (
    *ACCUSED,
    *STYLES,
    Clean("decoder make", "decoder", "make", {}),
    Clean("decoder make with loss", "decoder", "make", {"loss": "lm_loss"}),
    Clean("rotary make", "rotary", "make", {}),
    Clean("rotary make with loss", "rotary", "make", {"loss": "lm_loss"}),
    Clean("rotary make with loss, pad", "rotary", "make", {"loss": "padded_loss", "pad": 0}),
    Clean("seq2seq make with loss, decode", "seq2seq", "make", {"loss": "pair_loss", "decode": "greedy"}),
    Clean("seq2seq make with loss", "seq2seq", "make", {"loss": "smoothed_loss"}),
    Clean("encoder make", "encoder", "make", {}),
    Clean("encoder make_classifier", "encoder", "make_classifier", {}),
    Clean("library make_lm", "library", "make_lm", {}),
    Clean("library make_sequence_first", "library", "make_sequence_first", {}),
    Clean("library make_translator", "library", "make_translator", {}),
    Clean("library make_encoder", "library", "make_encoder", {}),
    Clean("library make_forecaster", "library", "make_forecaster", {}),
    Clean("library make_fused", "library", "make_fused", {}),
    Clean("a training step", "loop", "make", {"training": "Step"}),
    Clean("a training step with its loss", "loop", "make", {"training": "Step", "loss": "lm_loss"}),
    Clean("a long warm-up that is stepped", "loop", "make", {"training": "Step"}, (("warmup=10", "warmup=4000"),)),
    Clean("twelve post-norm layers, warmed up", "loop", "make_post", {"training": "Step"}),
    Clean("the schedule of 2017", "loop", "make", {"schedule": "rate", "steps": 2000}),
    Clean("a prompt that is padded on the left", "loop", "make", {"decode": "decode"}),
    Clean("beams over a cache", "loop", "make", {"beam": "beam"}),
    Clean("beams that end, lengths of answers alone", "moe", "make", {"beam": "beam", "eos": 2}),
    Clean("filters of sampling", "loop", "make", {"filters": "=filters"}),
    Clean("an int8 twin", "loop", "make_outliers", {"twins": "=twins"}),
    Clean("a loss in two parts", "loop", "make", {"loss": "lm_loss", "twins": "=parallel"}),
    Clean("a mixture of experts", "moe", "make", {}),
    Clean("a mixture of experts with its loss", "moe", "make", {"loss": "lm_loss"}),
    Clean("every label counts", "encoder", "make_classifier", {"loss": "class_loss"}),
    Clean("a batch with padding", "library", "make_encoder", {"batch": "=encoder_batch"}),
    Clean("pairs with padding", "seq2seq", "make", {"batch": "=pair_batch", "loss": "pair_loss"}),
    Clean("odd widths", "seq2seq", "make", {"build": "built"}),
    Clean(
        "equal vocabularies, one table",
        "seq2seq",
        "make",
        {},
        (
            ("src_vocab=37, trg_vocab=43", "src_vocab=40, trg_vocab=40"),
            (
                "self.decoder = Decoder(trg_vocab, dim, heads, depth, drop)",
                "self.decoder = Decoder(trg_vocab, dim, heads, depth, drop)\n        self.encoder.embed.weight = self.decoder.embed.weight",
            ),
        ),
    ),
    Clean(
        "log-probabilities into cross entropy",
        "decoder",
        "make",
        {"loss": "lm_loss"},
        (("        logits = self.head(x)\n", "        logits = self.head(x).log_softmax(-1)\n"),),
    ),
    Clean(
        "twelve pre-norm layers without warm-up",
        "loop",
        "make_post",
        {"training": "Step"},
        (("warmup=10", "warmup=1"), ("        layer.__class__ = PostLayer", "        pass")),
    ),
    Clean(
        "labels shifted by the caller",
        "decoder",
        "make",
        {"loss": "lm_loss"},
        (
            ("targets=None", "labels=None"),
            ("if targets is None", "if labels is None"),
            ("targets.reshape", "labels.reshape"),
        ),
    ),
    Clean(
        "a readout token that nobody sees", "encoder", "make", {"kind": "encoder", "allowed": "=readout"}, (READOUT,)
    ),
    Clean(
        "scale in the weights of q",
        "encoder",
        "make",
        {},
        (
            ("q, k = q * self.width**-0.25, k * self.width**-0.25", ""),
            (
                "self.dense = nn.Linear(dim, dim)",
                "self.dense = nn.Linear(dim, dim)\n        self.query.weight.data *= self.width**-0.5\n        self.query.bias.data *= self.width**-0.5",
            ),
        ),
    ),
    Clean(
        "scale on q",
        "decoder",
        "make",
        {},
        ((" / math.sqrt(self.width)", ""), ("att = q @", "q = q * self.width**-0.5\n        att = q @")),
    ),
    Clean(
        "norms of q and k, another scale",
        "rotary",
        "make",
        {},
        (
            (
                "q, k = rotate(q, start), rotate(k, start)",
                "q, k = rotate(F.normalize(q, dim=-1), start), rotate(F.normalize(k, dim=-1), start)",
            ),
            ("self.width**-0.5", "10.0"),
        ),
    ),
    Clean("probabilities only at the end", "library", "make_lm", {}, ((".log_softmax(-1)", ""),)),
    Clean("heads untied", "decoder", "make", {}, (("self.head.weight = self.tok.weight", ""),)),
    Clean(
        "biased deviation",
        "decoder",
        "make",
        {},
        (("x.std(-1, keepdim=True)", "x.std(-1, keepdim=True, unbiased=False)"),),
    ),
    Clean(
        "sines in halves",
        "seq2seq",
        "make",
        {},
        (("table[:, 0::2]", "table[:, : dim // 2]"), ("table[:, 1::2]", "table[:, dim // 2 :]")),
    ),
    Clean("mask of -1e4", "decoder", "make", {}, (('float("-inf"))\n        att', "-1e4)\n        att"),)),
    Clean(
        "ALiBi in place of rotation",
        "rotary",
        "make",
        {},
        (
            ("q, k = rotate(q, start), rotate(k, start)", ""),
            (
                "scores = scores + torch",
                "scores = scores - 0.3 * (torch.arange(start, start + T)[:, None] - torch.arange(start + T)).to(x)\n        scores = scores + torch",
            ),
        ),
    ),
    Clean(
        "flat logits",
        "seq2seq",
        "make",
        {},
        (
            (
                "return self.decoder(trg, memory, trg_mask, src_mask)",
                "return self.decoder(trg, memory, trg_mask, src_mask).flatten(0, 1)",
            ),
        ),
    ),
    Clean("one head", "decoder", "make", {}, (("heads=4", "heads=1"),)),
    Clean("one layer", "rotary", "make", {}, (("depth=2", "depth=1"),)),
    Clean(
        "pre-norm",
        "seq2seq",
        "make",
        {},
        (
            (
                "x = self.norm1(x + self.drop(self.attention(x, x, x, mask)))",
                "h = self.norm1(x)\n        x = x + self.drop(self.attention(h, h, h, mask))",
            ),
        ),
    ),
    Clean(
        "cloned layers",
        "seq2seq",
        "make",
        {},
        (
            (
                "nn.ModuleList([EncoderLayer(dim, heads, drop) for _ in range(depth)])",
                "nn.ModuleList([__import__('copy').deepcopy(layer) for layer in [EncoderLayer(dim, heads, drop)] * depth])",
            ),
        ),
    ),
    Clean(
        "a plain tensor that is moved in forward",
        "seq2seq",
        "make",
        {},
        (
            ('self.register_buffer("table", table)', "self.table = table"),
            ("self.table[: x.size(1)]", "self.table[: x.size(1)].to(x.device)"),
        ),
    ),
    Clean(
        "a head that is called elsewhere",
        "rotary",
        "make",
        {},
        (("return self.lm_head(self.norm(x)), kept", "return self.norm(x), kept"),),
    ),
    Clean(
        "hidden vectors as a dict",
        "encoder",
        "make",
        {},
        (
            (
                "        return x\n\n\nclass TextClassifier",
                '        return {"last_hidden_state": x}\n\n\nclass TextClassifier',
            ),
        ),
    ),
    Clean(
        "masks given by the caller, hidden vectors",
        "seq2seq",
        "make",
        {},
        (
            ("def forward(self, src, trg):", "def forward(self, src, tgt, src_mask, tgt_mask):"),
            ("        src_mask, trg_mask = self.make_src_mask(src), self.make_trg_mask(trg)\n", ""),
            ("self.decoder(trg, memory, trg_mask, src_mask)", "self.decoder(tgt, memory, tgt_mask, src_mask)"),
            ("scores = scores.masked_fill(", "mask = mask.unsqueeze(1)\n        scores = scores.masked_fill("),
            ("return self.project(x)", "return x"),
            ("self.project = nn.Linear(dim, vocab)", ""),
        ),
    ),
    Clean(
        "only log-probabilities of a pooled answer",
        "encoder",
        "make_classifier",
        {},
        (("return self.classify(h)", "return self.classify(h).log_softmax(-1)"),),
    ),
    Clean(
        "logits and loss in a dict",
        "decoder",
        "make",
        {},
        (
            ("return logits, loss", 'return {"loss": loss, "logits": logits}'),
            ("return self.head(x[:, [-1]]), None", 'return {"logits": self.head(x), "loss": None}'),
            ("[0][:, -1]", '["logits"][:, -1]'),
        ),
    ),
    Clean(
        "shared rotary table",
        "rotary",
        "make",
        {},
        (
            (
                "self.norm = RMSNorm(dim)",
                "self.norm = RMSNorm(dim)\n        self.register_buffer('cosines', torch.arange(64)[:, None].float().cos(), persistent=False)",
            ),
        ),
    ),
    Clean(
        "a window",
        "decoder",
        "make",
        {},
        (
            (
                "att = F.softmax",
                "att = att.masked_fill(~self.tril[:T, :T].triu(-3), float('-inf'))\n        att = F.softmax",
            ),
        ),
    ),
    Clean(
        "a model that prints and seeds",
        "rotary",
        "make",
        {},
        (("x = self.embed(tokens)", "torch.manual_seed(3)\n        print('step')\n        x = self.embed(tokens)"),),
    ),
    Clean(
        "a stale mask name: True blocks",
        "encoder",
        "make",
        {},
        (
            ("attention_mask=None", "mask=None"),
            ("x = layer(x, attention_mask)", "x = layer(x, None if mask is None else ~mask.bool())"),
        ),
    ),
)
"""Every clean variant."""
