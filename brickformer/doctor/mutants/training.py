"""Planted bugs. The training step, its schedule, resuming, initial values, mixtures of experts, twins."""

from __future__ import annotations

from typing import Final

from brickformer.doctor.mutants.bug import LM, Planted, planted

STEP: Final = {"training": "Step"}
NOAM: Final = {"schedule": "rate", "steps": 2000}
LABELLED: Final = {"loss": "class_loss"}

BUGS: Final[list[Planted]] = [
    # ---- the step
    planted("zero_grad is missing", "training step", "loop", ("        self.optimizer.zero_grad()\n", ""), says=STEP),
    planted(
        "the optimizer knows the head alone",
        "training step",
        "loop",
        ("torch.optim.AdamW(model.parameters(), rate)", "torch.optim.AdamW(model.head.parameters(), rate)"),
        says=STEP,
    ),
    planted(
        "one layer is in neither of two optimizers",
        "training step",
        "loop",
        (
            "        self.count = 0\n",
            "        self.count = 0\n        head = list(model.head.parameters())\n"
            "        self.optimizer.param_groups[0]['params'] = list(model.layers.parameters())\n"
            "        self.other = torch.optim.SGD(head, rate)\n",
        ),
        ("        self.optimizer.step()\n", "        self.optimizer.step()\n        self.other.step()\n"),
        ("self.optimizer.zero_grad()", "self.model.zero_grad()"),
        says=STEP,
    ),
    planted(
        "zero_grad is missing, clipped by value",
        "training step",
        "loop",
        ("        self.optimizer.zero_grad()\n", ""),
        ("clip_grad_norm_(self.model.parameters(), 1.0)", "clip_grad_value_(self.model.parameters(), 1e-3)"),
        says=STEP,
    ),
    planted("trained in eval()", "training step", "loop", ("self.model.train()", "self.model.eval()"), says=STEP),
    planted(
        "no gradient is left when it steps",
        "training step",
        "loop",
        (
            "        self.optimizer.step()\n        self.optimizer.zero_grad()\n",
            "        self.optimizer.zero_grad()\n        self.optimizer.step()\n",
        ),
        says=STEP,
    ),
    planted(
        "accumulated losses are added, not averaged",
        "training step",
        "loop",
        ("(lm_loss(self.model, part) / 2).backward()", "lm_loss(self.model, part).backward()"),
        says={**STEP, **LM},
    ),
    planted(
        "the schedule is stepped once an epoch",
        "training step",
        "loop",
        ("warmup=10", "warmup=4000"),
        ("        self.schedule.step()\n", ""),
        says=STEP,
        cases="R090",
    ),
    planted(
        "what the optimizer knew is not loaded",
        "resume",
        "loop",
        ('self.optimizer.load_state_dict(state["optimizer"])', "pass"),
        says=STEP,
        cases="R100",
    ),
    planted(
        "the schedule begins again",
        "resume",
        "loop",
        ('        self.schedule.load_state_dict(state["schedule"])\n', ""),
        says=STEP,
        cases="R100",
    ),
    # ---- the schedule
    planted(
        "twelve post-norm layers without warm-up",
        "schedule",
        "loop",
        ("warmup=10", "warmup=1"),
        make="make_post",
        says=STEP,
        cases="R088",
    ),
    planted("the schedule counts from 0", "schedule", "loop", ("    step = step + 1\n", ""), says=NOAM),
    planted("a warm-up that never ends", "schedule", "loop", ("warmup=400)", "warmup=40000)"), says=NOAM),
    planted("the larger of the two", "schedule", "loop", ("width**-0.5 * min(", "width**-0.5 * max("), says=NOAM),
    # ---- initial values
    planted(
        "the row of padding is drawn again",
        "initial weights",
        "loop",
        ("        self.pos = ", "        nn.init.normal_(self.tok.weight, std=0.02)\n        self.pos = "),
        cases="R084",
    ),
    planted(
        "the scaled initial value hits the first matrix",
        "initial weights",
        "moe",
        ('("to_out.weight", "w2.weight")', '("to_out.weight", "w1.weight")'),
        cases="R086",
    ),
    planted(
        "the encoder gets the decoder's table",
        "initial weights",
        "seq2seq",
        (
            "self.decoder = Decoder(trg_vocab, dim, heads, depth, drop)",
            "self.decoder = Decoder(trg_vocab, dim, heads, depth, drop)\n"
            "        self.encoder.embed.weight = self.decoder.embed.weight",
        ),
        cases="V004",
        at="encoder.embed",
    ),
    planted(
        "the same with a smaller table",
        "initial weights",
        "seq2seq",
        ("src_vocab=37, trg_vocab=43", "src_vocab=60, trg_vocab=40"),
        (
            "self.decoder = Decoder(trg_vocab, dim, heads, depth, drop)",
            "self.decoder = Decoder(trg_vocab, dim, heads, depth, drop)\n"
            "        self.encoder.embed.weight = self.decoder.embed.weight",
        ),
        cases="V004",
        at="encoder.embed",
    ),
    # ---- labels
    planted(
        "one loss for two tasks ignores label 0",
        "ignored labels",
        "encoder",
        ("F.cross_entropy(model(ids), labels)", "F.cross_entropy(model(ids), labels, ignore_index=0)"),
        make="make_classifier",
        says=LABELLED,
        cases="R094",
    ),
    planted(
        "an id that means something is ignored",
        "ignored labels",
        "rotary",
        (
            "ids[:, 1:].flatten(), ignore_index=0)",
            "ids[:, 1:].flatten() * (ids[:, 1:].flatten() != 5), ignore_index=0)",
        ),
        says={"loss": "padded_loss", "pad": 0},
    ),
    # ---- mixtures of experts
    planted(
        "the balance has no gradient",
        "routing",
        "moe",
        ("return y.view_as(x), balance", "return y.view_as(x), balance.detach()"),
        says=LM,
        cases="R116",
    ),
    planted(
        "its weight is never applied",
        "routing",
        "moe",
        ("return logits, loss + self.balance_coef * total", "return logits, loss + 0.0 * total"),
        says=LM,
        cases="R116",
    ),
    planted(
        "the balance is not added",
        "routing",
        "moe",
        ("return logits, loss + self.balance_coef * total", "return logits, loss"),
        says=LM,
        cases="R118",
    ),
    planted(
        "experts are not weighted",
        "routing",
        "moe",
        ("weight[row, slot, None] * expert", "expert"),
        at="layers.0.mixture",
    ),
    planted(
        "the router's weights are detached",
        "routing",
        "moe",
        ("weight, which = p.topk", "weight, which = p.detach().topk"),
        at="layers.0.mixture",
    ),
    planted(
        "one expert is forgotten",
        "routing",
        "moe",
        ("enumerate(self.experts):\n            row", "list(enumerate(self.experts))[:3]:\n            row"),
        at="layers.0.mixture",
        cases="R146",
    ),
    planted(
        "always the first experts",
        "routing",
        "moe",
        (
            "weight, which = p.topk(self.chosen, dim=-1)",
            "weight, which = p[:, : self.chosen], torch.arange(self.chosen).expand(len(p), -1)",
        ),
        at="layers.0.mixture",
    ),
    # ---- twins
    planted(
        "an outlier takes the grid of int8",
        "twins",
        "loop",
        (
            "model.head.weight.mul_(8.0)",
            "model.head.weight.mul_(8.0)\n        model.norm.weight[3] = 300.0\n        model.head.weight[:, 3] /= 300.0",
        ),
        make="make_outliers",
        says={"twins": "=twins"},
        cases="R124",
        at="head",
    ),
    planted(
        "one scale for activations of a wide range",
        "twins",
        "loop",
        (
            "model.head.weight.mul_(8.0)",
            "model.head.weight.mul_(8.0)\n        layer = model.layers[1]\n        layer.norm2.weight[5] = 2000.0\n"
            "        layer.mlp[0].weight[:, 5] /= 2000.0\n        layer.mlp[2].weight.mul_(8.0)",
        ),
        make="make_outliers",
        says={"twins": "=twins"},
        cases="R126",
        at="layers.1.mlp.0",
    ),
    planted(
        "a softmax over a part of the vocabulary",
        "twins",
        "loop",
        (".logsumexp(-1) for part in parts]).logsumexp(0)", ".logsumexp(-1) for part in parts]).mean(0)"),
        says={**LM, "twins": "=parallel"},
        cases="R128",
    ),
]
