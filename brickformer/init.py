"""Initial values: every one of them, in one function.

The first loss of every model is ln V: nothing is known, so nothing is preferred. Less easy than it sounds. With a
tied head the stream still holds the input token's own vector, so the logit of the INPUT token starts near std·D·(its
share of the stream), and small tables cure that only while positions do not drown what is left. So each value follows
from a few sizes. D model width, F fan-in, n branches of the stack, σ standard deviation:

    u = 1 where the embedding is multiplied by √D, else 1/√D       the size of the stream
    s = u · n^(-1/2) · (0.3 after a position table, else 1)         the size of one branch

    token table                     σ = min(0.8 · D^(-3/4), 0.2 · D^(-1/2))      own logit about 1, other logits 0.2
    learned position table          σ = u / √2, like a sinusoid on a stream of size u
    head of its own                 σ = 0.2 · D^(-1/2)
    projections inside a branch     σ = F^(-1/2)
    projections out of a branch     σ = F^(-1/2) · s after a pre-norm; F^(-1/2) before a norm that sets the size
    norm at the end of a branch     gain s (peri, branch)
    DeepNorm                        values, feed-forward and output: σ · √½ / α                     arXiv 2203.00555
    last norm of a post-norm stack  gain D^(-1/4) where head and table are tied and nothing was added to the token
    other norms, biases, T5's bias  gain 1, 0, σ = 0.02

Parameters that a mixer holds itself (decays, step sizes, sinks, gains) keep what its constructor gave them.
"""

from __future__ import annotations

import torch
from torch import nn

from brickformer.embed import Embedding, HeadTransform, LogitHead, TokenEmbedding
from brickformer.layers import Stack
from brickformer.linear import BranchOut
from brickformer.norms import OffsetRootMeanSquare, ScaledLength, Squash

LOGIT = 0.2
"""Size of the first logits of tokens that have nothing to do with the input: costs LOGIT²/2 = 0.02 nat."""


@torch.no_grad()
def initialize(embed: Embedding, stack: Stack, head: LogitHead | None) -> None:
    """Set every parameter of one side of a model, in place."""
    dim = embed.tokens.embedding_dim
    unit = 1.0 if embed.scale != 1.0 else dim**-0.5
    added = embed.position is not None
    branches = stack.branches()
    size = unit * max(1, len(branches)) ** -0.5 * (0.3 if added else 1.0)

    for module in [*embed.modules(), *stack.modules()]:
        match module:
            case TokenEmbedding():
                nn.init.normal_(module.weight, std=min(0.8 * dim**-0.75, LOGIT * dim**-0.5))
            case nn.Embedding():
                nn.init.normal_(module.weight, std=0.02)
            case nn.Linear():
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    if embed.position is not None:
        for module in embed.position.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=unit * 0.5**0.5)

    for around, branch in branches:
        ends_normed = _set_gain(around.out, size)
        is_last = isinstance(around.after, nn.Identity)
        for module in branch.modules():
            if isinstance(module, BranchOut) and is_last and not ends_normed:
                module.weight.mul_(size)
            elif isinstance(module, nn.Linear) and around.skip != 1.0:
                module.weight.mul_(0.5**0.5 / around.skip)

    if head is not None and head.project.bias is not None:
        nn.init.zeros_(head.project.bias)
    if head is not None and isinstance(head.transform, HeadTransform):
        nn.init.normal_(head.transform.dense.weight, std=head.transform.dense.in_features**-0.5)
        if head.transform.dense.bias is not None:
            nn.init.zeros_(head.transform.dense.bias)
    if head is not None and head.project.weight is not embed.tokens.weight:
        nn.init.normal_(head.project.weight, std=LOGIT * dim**-0.5)
    elif head is not None and not added and branches and isinstance(head.transform, nn.Identity):
        _set_gain(branches[-1][0].after, dim**-0.25)


def _set_gain(norm: nn.Module, gain: float) -> bool:
    """Give a norm its gain; whether there was a norm. A `Sequential` is a norm and what follows it."""
    match norm:
        case nn.Sequential():
            return _set_gain(norm[0], gain)
        case nn.LayerNorm() | nn.RMSNorm():
            norm.weight.fill_(gain)
        case OffsetRootMeanSquare():
            norm.weight.fill_(gain - 1.0)
        case ScaledLength():
            norm.gain.mul_(gain)
        case Squash():
            norm.gain.fill_(gain)
        case _:
            return False
    return True
