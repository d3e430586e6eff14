"""A decoder with rotary positions, RMS norms, grouped heads, a gated feed-forward and a cache that is passed around."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotate(x, start):
    T, K = x.shape[-2], x.shape[-1]
    freq = 10000.0 ** (-torch.arange(0, K, 2).to(x) / K)
    angle = torch.arange(start, start + T).to(x)[:, None] * freq
    angle = torch.cat([angle, angle], -1)
    a, b = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()


class Attention(nn.Module):
    def __init__(self, dim, heads, groups):
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, groups * self.width, bias=False)
        self.wv = nn.Linear(dim, groups * self.width, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, past=None):
        B, T, D = x.shape
        q = self.wq(x).view(B, T, self.heads, self.width).transpose(1, 2)
        k = self.wk(x).view(B, T, self.groups, self.width).transpose(1, 2)
        v = self.wv(x).view(B, T, self.groups, self.width).transpose(1, 2)
        start = 0 if past is None else past[0].shape[2]
        q, k = rotate(q, start), rotate(k, start)
        if past is not None:
            k = torch.cat([past[0], k], 2)
            v = torch.cat([past[1], v], 2)
        keep = (k, v)
        k = k.repeat_interleave(self.heads // self.groups, 1)
        v = v.repeat_interleave(self.heads // self.groups, 1)
        scores = torch.einsum("bhtk,bhsk->bhts", q, k) * self.width**-0.5
        at = torch.arange(start, start + T)[:, None]
        scores = scores + torch.zeros(T, start + T).masked_fill(torch.arange(start + T) > at, float("-inf"))
        y = torch.einsum("bhts,bhsk->bhtk", scores.softmax(-1), v)
        return self.wo(y.transpose(1, 2).flatten(2)), keep


class Layer(nn.Module):
    def __init__(self, dim, heads, groups):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, heads, groups)
        self.gate, self.up = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x, past=None):
        y, keep = self.attention(self.attention_norm(x), past)
        x = x + y
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), keep


class TinyLlama(nn.Module):
    def __init__(self, vocab=41, dim=32, heads=4, groups=2, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, groups) for _ in range(depth))
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, cache=None):
        x = self.embed(tokens)
        kept = []
        for i, layer in enumerate(self.layers):
            x, keep = layer(x, None if cache is None else cache[i])
            kept.append(keep)
        return self.lm_head(self.norm(x)), kept


def lm_loss(model, ids):
    logits, _ = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def padded_loss(model, ids):
    logits, _ = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


def make():
    torch.manual_seed(0)
    return TinyLlama()
