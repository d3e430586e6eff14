"""Our own code with one thing broken, and the check that has to notice. Texts are found wherever they stand.

A mutant is worth its place if a person could have written it. `check` names a function of tests/contract/checks.py,
`cell` the model on which it is run: it passes there on the real code, and must fail on the mutant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """old -> new in one place of the core. cell: fields of a `Cell` that differ from its base."""

    name: str
    old: str
    new: str
    check: str
    cell: dict[str, Any] = field(default_factory=dict)


DECODER: dict[str, Any] = {}
WINDOW = {"mixer": "window"}
WRITTEN = {"mixer": "written_out"}
ENCODER = {"family": "encoder"}
BOTH = {"family": "encoder_decoder", "cross": "mha"}

CLONED = "x for name, x in self.__dict__.items()})\n        return other\n\n    def in_int8"
OVER = (
    "return type('Over', (nn.LayerNorm,), {{'forward': lambda self, x: "
    "(x - x.mean({axis}, keepdim=True)) * self.weight}})(dim, bias=self.bias)"
)

MUTANTS = [
    # ---- attention, written out
    Mutant(
        "masked scores are 0",
        "scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)",
        "scores.masked_fill(~allowed, 0.0)",
        "cached_equals_full",
        WRITTEN,
    ),
    Mutant(
        "the mask is not applied after the softmax",
        "[..., : k.shape[2]].masked_fill(~allowed, 0.0)",
        "[..., : k.shape[2]]",
        "nothing_but_padding",
        {**BOTH, "cross": "written_out"},
    ),
    Mutant(
        "no scale",
        "1.0 / math.sqrt(q.shape[-1]) if scale is None else scale",
        "1.0 if scale is None else scale",
        "kernels_agree",
        WRITTEN,
    ),
    Mutant(
        "softmax over the queries",
        "torch.softmax(scores, dim=-1)",
        "torch.softmax(scores, dim=-2)",
        "causal_by_gradient",
        WRITTEN,
    ),
    Mutant(
        "query heads take key heads in turn",
        "x.repeat_interleave(groups, dim=1)",
        "x.repeat(1, groups, 1, 1)",
        "kernels_agree",
        {"mixer": "gqa"},
    ),
    Mutant("dropout in eval", "return self.dropout if self.training else 0.0", "return 0.3", "eval_is_deterministic"),
    Mutant(
        "a capped score goes to a kernel that cannot cap",
        'if self.softcap is None:\n            return "quicker"',
        'if True:\n            return "quicker"',
        "kernels_agree",
        {"mixer": "capped"},
    ),
    Mutant(
        "the sink is forgotten",
        "if sinks is not None:\n            lowered, k, v, bias = with_sink",
        "if False:\n            lowered, k, v, bias = with_sink",
        "kernels_agree",
        {"mixer": "sinks"},
    ),
    # ---- heads
    Mutant(
        "view without transpose",
        "x.view(batch, tokens, joined // width, width).transpose(1, 2)",
        "x.reshape(batch, joined // width, tokens, width)",
        "causal_by_gradient",
    ),
    Mutant(
        "heads joined without transpose",
        "return x.transpose(1, 2).flatten(2)",
        "return x.reshape(len(x), x.shape[2], -1)",
        "causal_by_perturbation",
    ),
    Mutant(
        "rotary turns values too",
        "k = self.position.rotate(self.k_norm(k), at)  # (B, G, T, K)",
        "k, v = self.position.rotate(self.k_norm(k), at), self.position.rotate(v, at)",
        "relative_positions_are_relative",
    ),
    Mutant(
        "the state is asked, and not used",
        'k, v, k_at = expect_cache(state, self.attend.mask, "attention").append(k, v, at)',
        'expect_cache(state, self.attend.mask, "attention").append(k, v, at)',
        "cached_equals_full",
    ),
    # ---- masks
    Mutant("the future is seen", "ok = ok & (k <= q)", "ok = ok & (k <= q + 1)", "causal_by_gradient", WINDOW),
    Mutant("a token does not see itself", "ok = ok & (k <= q)", "ok = ok & (k < q)", "cached_equals_full", WINDOW),
    Mutant("padding is a token", "ok = k != EMPTY", "ok = k == k", "padding_changes_nothing", ENCODER),
    Mutant(
        "the window is one too wide",
        "ok = ok & (q - k < self.window)",
        "ok = ok & (q - k <= self.window)",
        "blind_beyond_its_window",
        WINDOW,
    ),
    Mutant(
        "the window is one too narrow",
        "ok = ok & (q - k < self.window)",
        "ok = ok & (q - k < self.window - 1)",
        "reads_exactly_its_window",
        WINDOW,
    ),
    Mutant(
        "a two-way window is one-way",
        "ok = ok & (k - q < self.window)",
        "ok = ok & (k <= q)",
        "reads_exactly_its_window",
        {**ENCODER, **WINDOW},
    ),
    Mutant(
        "documents see each other",
        "allowed = allowed & (q.doc[:, :, None] == k.doc[:, None, :])",
        "pass",
        "packed_documents_are_apart",
    ),
    Mutant(
        "is_causal for a chunk",
        "mask.causal and first_q == first_k and last_q == last_k",
        "mask.causal and last_q == last_k",
        "cached_equals_full",
    ),
    Mutant(
        "no mask for a chunk",
        "sees_newest = last_k <= first_q if mask.causal",
        "sees_newest = last_k <= last_q if mask.causal",
        "cached_equals_full",
    ),
    Mutant(
        "one token too few in the window",
        "Everything(last=last_k - (last_q - window))",
        "Everything(last=last_k - (last_q - window) - 1)",
        "cached_equals_full",
        {**WINDOW, "stack": "mixed"},
    ),
    Mutant(
        "1 and 0 are added where 0 and -inf were meant",
        "mask = allowed if bias is None else",
        "mask = allowed.to(q.dtype) if bias is None else",
        "causal_by_perturbation",
        WINDOW,
    ),
    Mutant(
        "learning sees the future",
        "hidden.masked_fill(~allowed, torch.finfo(dtype).min / 2)",
        "hidden",
        "causal_by_gradient",
        {},
    ),
    Mutant(
        "a bias comes without its mask",
        "mask = bias.masked_fill(~as_map(lowered, q, k), -torch.inf)",
        "mask = bias",
        "causal_by_perturbation",
        {"position": "alibi"},
    ),
    # ---- where tokens are
    Mutant(
        "padding counts",
        "before = valid.cumsum(-1) - valid.long()",
        "before = torch.arange(ids.shape[1]).expand(ids.shape[:2])",
        "padding_changes_nothing",
        {"position": "none", "absolute": "learned"},
    ),
    Mutant(
        "a document does not start at 0",
        "pos = before - before.masked_fill(~first, 0).cummax(-1).values + start",
        "pos = before + start",
        "packed_documents_are_apart",
        {"position": "none", "absolute": "sinusoid"},
    ),
    Mutant(
        "the clock stands still",
        "self.length = at.end\n        if at.pos",
        "self.length += 0 * at.end\n        if at.pos",
        "cached_equals_full",
    ),
    Mutant(
        "padding of the prompt is forgotten",
        "self.padding = torch.where(newest < 0, before + at.length, at.end - 1 - newest)",
        "self.padding = torch.zeros_like(newest)",
        "padded_prompt_then_decode",
    ),
    # ---- caches
    Mutant(
        "cached keys are one position too far",
        "return Span(first, end - first, None if self.exact",
        "return Span(first + 1, end - first, None if self.exact",
        "cached_equals_full",
    ),
    Mutant(
        "new keys are written one slot too early",
        "self.k[:, :, at.start : at.end] = self._pack(k)",
        "self.k[:, :, max(at.start - 1, 0) : max(at.start - 1, 0) + at.length] = k",
        "cached_equals_full",
    ),
    Mutant(
        "values do not follow their rows",
        "_rows(self.v, rows, self.written)",
        "_rows(self.v, torch.arange(len(rows)) % len(self.v), self.written)",
        "state_select",
    ),
    Mutant("a clone shares its keys", f"x.clone() if isinstance(x, Tensor) else {CLONED}", f"{CLONED}", "state_clone"),
    Mutant(
        "the ring keeps one token too few",
        "self._slide(max(at.start - self.window + 1, self.first), at.start)",
        "self._slide(max(at.start - self.window + 2, self.first), at.start)",
        "cached_equals_full",
        WINDOW,
    ),
    Mutant(
        "the ring lets tokens go before padding",
        "self._sort(at.start - self.first)",
        "pass",
        "padded_prompt_then_decode",
        WINDOW,
    ),
    Mutant(
        "the ring rewinds to what it has let go",
        "if self.first > max(0, to - self.window + 1):",
        "if False:",
        "state_rewind",
        WINDOW,
    ),
    # ---- cross-attention
    Mutant(
        "the memory is ignored",
        "self.around_cross(x, lambda h: cross(h, at, memory, state.cross if state else None))",
        "self.around_cross(x, lambda h: 0 * h)",
        "reads_every_source_token",
        BOTH,
    ),
    Mutant(
        "the padding of the memory is ignored",
        "return k, v, memory.at",
        "return k, v, Span(0, memory.at.length)",
        "source_padding_changes_nothing",
        BOTH,
    ),
    Mutant(
        "the memory does not follow its rows",
        "self.k, self.v, self.at = self.k[rows], self.v[rows], self.at.select(rows)",
        "self.k, self.v, self.at = self.k[rows], self.v.flip(0)[rows], self.at.select(rows)",
        "state_select",
        BOTH,
    ),
    Mutant(
        "an encoder's memory has no padding",
        "return Memory(self.stack(self.embed(ids, at), at), at)",
        "return Memory(self.stack(self.embed(ids, at), at), Span(0, ids.shape[1]))",
        "encoder_takes_valid",
        ENCODER,
    ),
    # ---- positions
    Mutant(
        "rotary does nothing",
        "q = self.position.rotate(self.q_norm(q), at)  # (B, H, T, K)\n        "
        "k = self.position.rotate(self.k_norm(k), at)  # (B, G, T, K)",
        "q, k = self.q_norm(q), self.k_norm(k)",
        "order_matters",
        ENCODER,
    ),
    Mutant(
        "rotary by index",
        "return cos[at.start : at.end], sin[at.start : at.end]",
        "return cos[: at.length], sin[: at.length]",
        "cached_equals_full",
    ),
    Mutant(
        "a table by index",
        "return table[None, at.start : at.end]",
        "return table[None, : at.length]",
        "relative_positions_are_relative",
        {"position": "none", "absolute": "learned"},
    ),
    Mutant(
        "alibi by index",
        "far = (q.positions(device)[:, None, :, None] - key)",
        "far = (torch.arange(q.length)[None, None, :, None] - key)",
        "cached_equals_full",
        {"position": "alibi"},
    ),
    # ---- layers, norms, feed-forward
    Mutant(
        "a norm over time",
        "return nn.LayerNorm(dim, eps=self.eps, bias=self.bias)",
        OVER.format(axis=1),
        "causal_by_gradient",
        {"norm": "layernorm_no_bias"},
    ),
    Mutant(
        "a norm over the batch",
        "return nn.LayerNorm(dim, eps=self.eps, bias=self.bias)",
        OVER.format(axis=0),
        "batch_equals_single",
        {"norm": "layernorm_no_bias"},
    ),
    Mutant(
        "the branch is cut from the graph",
        "self.drop(self.out(f(self.into(x))))",
        "self.drop(self.out(f(self.into(x))).detach())",
        "every_parameter_learns",
    ),
    Mutant("the gate is up", "self.activation(gate) * up", "self.activation(up) * up", "every_parameter_learns"),
    Mutant(
        "dropout without a switch",
        "self.drop(self.out(f(self.into(x))))",
        "nn.functional.dropout(self.out(f(self.into(x))), 0.1, self.training)",
        "train_without_dropout_equals_eval",
    ),
    Mutant(
        "logits of another type",
        "logits = self.project(h if self.scale == 1.0 else h * self.scale)",
        "logits = self.project(h if self.scale == 1.0 else h * self.scale).float()",
        "close_in_lower_precision",
    ),
    # ---- specs, files, starting values
    Mutant(
        "a field is not stored",
        "**{name: plain(getattr(self, name)) for name in fields_of(type(self))}",
        '**{name: plain(getattr(self, name)) for name in fields_of(type(self)) if name != "place"}',
        "spec_survives_text",
        {"place": "post"},
    ),
    Mutant(
        "the head is a copy",
        "project.weight = tokens.weight",
        "project.weight = nn.Parameter(tokens.weight.detach().clone())",
        "weights_survive_a_file",
    ),
    Mutant(
        "logits start large",
        "logits = self.project(h if",
        "logits = 1000.0 * self.project(h if",
        "starts_near_chance",
    ),
]
