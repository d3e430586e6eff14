"""Mixture of experts: a feed-forward of many, of which each token uses a few.

    s = softmax(x W_r) or sigmoid(x W_r)            scores of E experts
    chosen = the k largest of s + b                 b only chooses; it never weighs
    y = Σ_chosen g_e · expert_e(x) [+ shared(x)],   g = s of the chosen, by default made to sum to 1

No token is dropped: tokens are sorted by expert, and each expert makes one product over all of its own.

What keeps the experts evenly used (all act in training only):
    balance   E · Σ_e f_e P_e, f share of choices, P mean score; 1 when even          arXiv 2101.03961, eq. 4
    z         mean (log Σ_e exp logit_e)²: keeps logits small                         arXiv 2202.08906, eq. 5
    bias_rate b_e moves by this much against the load of its expert; no loss at all   arXiv 2408.15664

Each acts at every pass through the router. A stack that is looped n times, or a step of n accumulated batches, passes
n times, as n layers would: divide by n what should act once a step.

The losses are attached to the gradient of the output, so no signature changes: their gradient is that of a loss
`training loss + balance · (...) + z · (...)`, in each forward and backward.
Routing is read by hooks on `TopKRouter`.

Shapes: x (B, T, D); N = B·T tokens; E experts; k chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from brickformer.feedforward import FeedForward, FeedForwardSpec
from brickformer.ranges import MOST, check_positive, check_width
from brickformer.spec import Spec, spec


@spec("router")
class Router(Spec):
    """Who goes where.

    top_k: experts a token uses. groups, top_groups: experts lie in groups, and only those of the best few groups can
    be chosen, a group being as good as its two best (arXiv 2412.19437, 2.1.2). score: softmax over experts (Mixtral)
    or a sigmoid each (DeepSeek-V3). normalize: the weights of the chosen sum to 1; scale: times this. balance, z,
    bias_rate: see above; 0 turns each off.
    """

    top_k: int = 2
    groups: int = 1
    top_groups: int = 1
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    balance: float = 0.01
    z: float = 0.001
    bias_rate: float = 0.0

    def check(self) -> None:
        """At least one expert a token; weights of losses are not negative."""
        check_width(self, "top_k", self.top_k)
        check_width(self, "groups", self.groups)
        check_positive(self, "scale", self.scale)
        if not 1 <= self.top_groups <= self.groups:
            raise self.refuse("top_groups", f"from 1 to groups={self.groups}")
        for name, value in (("balance", self.balance), ("z", self.z), ("bias_rate", self.bias_rate)):
            if value < 0.0:
                raise self.refuse(name, "0 (off) or more")

    def build(self, dim: int, experts: int) -> TopKRouter:
        """The module for `experts` experts of vectors of width `dim`."""
        limits = self.groups, self.top_groups
        rule = Rule(*limits, self.score, self.normalize, self.scale, self.balance, self.z, self.bias_rate)
        return TopKRouter(nn.Linear(dim, experts, bias=False), self.top_k, rule)


@spec("moe")
class MoE(FeedForwardSpec):
    """A mixture of experts (arXiv 1701.06538). expert: what one of them is. shared: one more, for every token."""

    experts: int
    expert: FeedForwardSpec
    router: Router = Router()
    shared: FeedForwardSpec | None = None

    def check(self) -> None:
        """As many experts as a token needs."""
        check_width(self, "experts", self.experts, MOST)
        if self.router.top_k > self.experts:
            raise self.refuse("experts", f"at least router.top_k = {self.router.top_k}", "Add experts or lower top_k.")
        groups, chosen = self.router.groups, self.router.top_groups
        if self.experts % groups:
            raise self.refuse("experts", f"a multiple of router.groups = {groups}")
        if groups > 1 and self.experts // groups < 2:
            raise self.refuse("experts", f"at least two in each of router.groups = {groups}")
        if self.router.top_k > self.experts // groups * chosen:
            raise self.refuse("experts", f"router.top_k = {self.router.top_k} in {chosen} of {groups} groups")

    def build(self, dim: int) -> FeedForward:
        """The module."""
        return MoEFeedForward(
            self.router.build(dim, self.experts),
            [self.expert.build(dim) for _ in range(self.experts)],
            self.shared.build(dim) if self.shared else None,
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """How a router scores and what keeps it even; fields as in `Router`."""

    groups: int
    top_groups: int
    score: Literal["softmax", "sigmoid"]
    normalize: bool
    scale: float
    balance: float
    z: float
    bias_rate: float


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """What a router decides. experts, weights: (N, k). load: (E,) choices of each expert. loss: its own, or None."""

    experts: Int[Tensor, "N k"]
    weights: Float[Tensor, "N k"]
    load: Int[Tensor, " E"]
    loss: Float[Tensor, ""] | None


@final
class TopKRouter(nn.Module):
    """Scores in float32 whatever the model's type: close calls must not depend on rounding."""

    bias: Tensor

    def __init__(self, project: nn.Linear, top_k: int, rule: Rule) -> None:
        super().__init__()
        self.project, self.top_k, self.rule = project, top_k, rule
        self.register_buffer("bias", torch.zeros(project.out_features))

    def forward(self, x: Float[Tensor, "N D"]) -> Routing:
        """(N, D) -> who goes where."""
        rule, count = self.rule, self.project.out_features
        logits = self.project(x)
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits  # (N, E)
        scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()
        experts = self._among(scores.detach() + self.bias).topk(self.top_k, dim=-1).indices  # (N, k)
        weights = scores.gather(1, experts)
        if rule.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        load = torch.zeros(count, dtype=torch.long, device=x.device).index_add_(
            0, experts.flatten(), torch.ones_like(experts.flatten())
        )
        loss = self._loss(logits, scores, load) if self.training and torch.is_grad_enabled() else None
        if self.training and rule.bias_rate > 0.0:
            with torch.no_grad():
                self.bias += rule.bias_rate * torch.sign(load.float().mean() - load)
        return Routing(experts, (weights * rule.scale).to(x.dtype), load, loss)

    def _among(self, choice: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
        """(N, E), -inf at the experts of groups that are not among the best."""
        rule = self.rule
        if rule.groups == rule.top_groups:
            return choice
        by_group = choice.unflatten(-1, (rule.groups, -1))  # (N, groups, E / groups)
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(rule.top_groups, dim=-1).indices
        kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, True)
        return by_group.masked_fill(~kept[..., None], -torch.inf).flatten(-2)

    def _loss(self, logits: Tensor, scores: Tensor, load: Tensor) -> Tensor | None:
        terms = []
        if self.rule.balance > 0.0:
            share = load / load.sum().clamp_min(1)
            mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
            terms.append(self.rule.balance * len(load) * (share * mean).sum())
        if self.rule.z > 0.0:
            terms.append(self.rule.z * logits.logsumexp(-1).square().mean())
        return torch.stack(terms).sum() if terms else None


@final
class MoEFeedForward(FeedForward):
    """Sort tokens by expert, let each expert do its own, put them back, weigh and add."""

    def __init__(self, router: TopKRouter, experts: Sequence[FeedForward], shared: FeedForward | None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, nn.ModuleList(experts), shared

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D)."""
        tokens = x.flatten(0, 1)  # (N, D)
        routing = self.router(tokens)
        k = routing.experts.shape[1]
        order = routing.experts.flatten().argsort(stable=True)  # (N·k,) choices, by expert
        sorted_tokens = F.embedding(order // k, tokens)
        done = []
        for expert, own in zip(self.experts, sorted_tokens.split(routing.load.tolist()), strict=True):
            if len(own) or torch.is_grad_enabled():  # an idle expert still gets a gradient, of zeros
                done.append(expert(own[None])[0])
        by_expert = torch.cat(done)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        # one pass over the results: gathered, weighed and added
        y = F.embedding_bag(back.view(-1, k), by_expert, per_sample_weights=routing.weights, mode="sum").view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        return y if routing.loss is None else _WithLoss.apply(y, routing.loss)  # type: ignore[no-untyped-call]


class _WithLoss(torch.autograd.Function):
    """y, unchanged; backward also sends 1 into the loss, as if it had been added to the training loss."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        """y as it is."""
        ctx.like = loss.detach()
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of y as it is, and 1 for the loss."""
        return grad, torch.ones_like(ctx.like)
