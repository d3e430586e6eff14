"""What a model costs: floating-point operations and cache bytes of one token, by one formula a brick.

    linear map           2 · in · out                        a multiply and an add a weight
    self-attention       its linear maps + 4 · H·K · S       scores q·k and sums over v, for S keys
    cross-attention      queries and output as above; keys and values once a source token: 2 · D · 2·G·K
    feed-forward, head   their linear maps                   embedding, norms, activations: not counted
    value residual       the first layer's q, k, v once more, for their values
    mixture of experts   router + k experts                   the k that a token uses
    LSTM                  8 · H·(in + H)                      four gates
    cache                2 · G·K · bytes of a number         keys and values

Counted are matrix products and attention, as `torch.utils.flop_counter` does: the rest is bound by memory. A brick
without a formula here (one of your own) is measured with that counter on a device without data: one token, read after
all others.

Shapes: H heads, G key/value heads, K head width, D model width, S keys: at most the window of the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from brickformer.attend import Attend
from brickformer.feedforward import FeedForward, GLUFeedForward, MLPFeedForward
from brickformer.layers import Stack
from brickformer.mask import Span
from brickformer.mixers.attention import AttentionMixer
from brickformer.mixers.base import Mixer
from brickformer.mixers.cross import CrossAttention
from brickformer.mixers.lstm import LSTMMixer
from brickformer.mixers.shortconv import ShortConvMixer
from brickformer.moe import MoEFeedForward
from brickformer.state import KV, State


@dataclass(frozen=True)
class Cost:
    """Costs of one token. flops, kv_bytes: of a token of the sequence; source_*: of a token of the memory it reads.

    known: False when a part could not be counted, so that the numbers are a lower bound.
    """

    flops: int = 0
    kv_bytes: int = 0
    source_flops: int = 0
    source_kv_bytes: int = 0
    known: bool = True

    def __add__(self, other: Cost) -> Cost:
        """Both."""
        return Cost(
            self.flops + other.flops,
            self.kv_bytes + other.kv_bytes,
            self.source_flops + other.source_flops,
            self.source_kv_bytes + other.source_kv_bytes,
            self.known and other.known,
        )


def cost(module: nn.Module, tokens: int, dim: int) -> Cost:
    """The cost of one token in any part of a model, parts included, when it stands at the end of `tokens` tokens.

    tokens: how many keys it meets, in the sequence and in the memory alike. dim: D. The bytes are those of the model's
    own number format.
    """
    match module:
        case nn.Linear():
            return Cost(flops=2 * module.in_features * module.out_features)
        case AttentionMixer():
            heads_width = module.qkv.parts[0]
            scores = Cost(
                flops=4 * heads_width * _keys(module.attend, tokens),
                kv_bytes=2 * module.kv_heads * module.width * _bytes(module) if module.causal else 0,
            )
            return scores + _parts(module, tokens, dim)
        case CrossAttention():
            once = cost(module.kv, tokens, dim)
            return Cost(
                flops=4 * module.q.out_features * _keys(module.attend, tokens)
                + cost(module.q, tokens, dim).flops
                + cost(module.out, tokens, dim).flops,
                source_flops=once.flops,
                source_kv_bytes=module.kv.out_features * _bytes(module),
            )
        case nn.LSTM():
            weights = (p for name, p in module.named_parameters() if name.startswith("weight"))
            return Cost(flops=sum(2 * w.numel() for w in weights))
        case MLPFeedForward() | GLUFeedForward() | ShortConvMixer() | LSTMMixer():
            return _parts(module, tokens, dim)
        case MoEFeedForward():
            k, expert = module.router.top_k, cost(module.experts[0], tokens, dim)
            shared = Cost() if module.shared is None else cost(module.shared, tokens, dim)
            chosen = replace(expert, flops=k * expert.flops)
            return cost(module.router, tokens, dim) + chosen + shared
        case Stack() if module.tells:
            first = module.mixers()[0]
            again = cost(first.qkv, tokens, dim) if isinstance(first, AttentionMixer) else Cost(known=False)
            return _parts(module, tokens, dim) + again
        case Mixer() | FeedForward():
            return _measured(module, tokens, dim)
        case _:
            return _parts(module, tokens, dim)


def _parts(module: nn.Module, tokens: int, dim: int) -> Cost:
    return sum((cost(child, tokens, dim) for child in module.children()), Cost())


def _keys(attend: Attend, tokens: int) -> int:
    """How many of `tokens` keys a query meets; both sides of a window when the mask sees both."""
    mask = attend.mask
    if mask.window is None:
        return tokens
    return min(tokens, mask.window if mask.causal else 2 * mask.window - 1)


def _bytes(module: nn.Module) -> int:
    return next(module.parameters()).element_size()


def _measured(module: Mixer | FeedForward, tokens: int, dim: int) -> Cost:
    """A brick without a formula: its last token is read and counted, after `tokens` - 1 others; its cache is what one
    token more takes. A mixer that sees both ways reads them all at once, and a token costs its share.
    """
    first = next(module.parameters(), torch.empty(0))
    kind: dict[str, Any] = {"device": first.device, "dtype": first.dtype}
    try:
        with torch.no_grad():
            x = torch.empty(1, tokens, dim, **kind)
            if isinstance(module, FeedForward):
                return Cost(flops=_counted(lambda: module(x[:, -1:])))
            if not module.causal:
                return Cost(flops=_counted(lambda: module(x, Span(0, tokens))) // tokens)
            state = module.init_state(1, tokens, **kind)
            if tokens > 1:
                module(x[:, :-1], Span(0, tokens - 1), state)
            flops = _counted(lambda: module(x[:, -1:], Span(tokens - 1, 1), state))
            one, two = (_held(module.init_state(1, n, **kind)) for n in (1, 2))
            return Cost(flops=flops, kv_bytes=two - one)
    except Exception:  # whatever somebody else's brick raises: its cost is unknown, and the report says so
        return Cost(known=False)


def _held(state: State) -> int:
    """Bytes of what is kept of tokens; a cache also notes where they are."""
    return state.nbytes - (state.pos.nbytes if isinstance(state, KV) else 0)


def _counted(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()
