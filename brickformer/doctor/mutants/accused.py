"""Clean variants that an earlier doctor accused: healthy ways of writing that a probe had taken for a bug."""

from __future__ import annotations

from typing import Final

from brickformer.doctor.mutants.bug import Clean

ACCUSED: Final[tuple[Clean, ...]] = (
    Clean(
        "positions added in place, one tensor as q, k and v",
        "seq2seq",
        "make",
        {},
        (("x = self.pos(self.embed(src))", "x = self.embed(src)\n        x += self.pos.table[: x.size(1)]"),),
    ),
    Clean(
        "gradients clipped by value",
        "loop",
        "make",
        {"training": "Step"},
        (("clip_grad_norm_(self.model.parameters(), 1.0)", "clip_grad_value_(self.model.parameters(), 1e-3)"),),
    ),
    Clean(
        "a smoothing nobody has to give",
        "rotary",
        "make",
        {"loss": "lm_loss"},
        (
            ("def lm_loss(model, ids):", "def lm_loss(model, ids, smoothing=0.0):"),
            ("ids[:, 1:].flatten())", "ids[:, 1:].flatten(), label_smoothing=smoothing)"),
        ),
    ),
    Clean(
        "two optimizers",
        "loop",
        "make",
        {"training": "Step"},
        (
            (
                "        self.count = 0\n",
                "        self.count = 0\n        head = list(model.head.parameters())\n"
                "        self.optimizer.param_groups[0]['params'] = list(model.parameters())[: -len(head)]\n"
                "        self.other = torch.optim.SGD(head, rate)\n",
            ),
            ("        self.optimizer.step()\n", "        self.optimizer.step()\n        self.other.step()\n"),
            ("self.optimizer.zero_grad()", "self.model.zero_grad()"),
        ),
    ),
)
