"""A decoder as people write it in one file: learned positions, a triangle kept as a buffer, a loss, a generate()."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim, heads, max_len, drop):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.drop = nn.Dropout(drop)
        self.register_buffer("tril", torch.tril(torch.ones(max_len, max_len)).bool())

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(B, T, self.heads, self.width).transpose(1, 2)
        k = k.view(B, T, self.heads, self.width).transpose(1, 2)
        v = v.view(B, T, self.heads, self.width).transpose(1, 2)
        att = q @ k.transpose(-2, -1) / math.sqrt(self.width)
        att = att.masked_fill(~self.tril[:T, :T], float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.drop(att)
        y = att @ v
        y = y.transpose(1, 2).reshape(B, T, D)
        return self.out(y)


class FeedForward(nn.Module):
    def __init__(self, dim, drop):
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.drop(self.down(F.gelu(self.up(x))))


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.gain * (x - mean) / (std + 1e-6) + self.shift


class Block(nn.Module):
    def __init__(self, dim, heads, max_len, drop):
        super().__init__()
        self.norm1, self.norm2 = Norm(dim), Norm(dim)
        self.attn = SelfAttention(dim, heads, max_len, drop)
        self.ffn = FeedForward(dim, drop)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class TinyGPT(nn.Module):
    def __init__(self, vocab=41, dim=32, heads=4, depth=2, max_len=16, drop=0.1):
        super().__init__()
        self.max_len = max_len
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList([Block(dim, heads, max_len, drop) for _ in range(depth)])
        self.norm = Norm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(self.init)
        self.head.weight = self.tok.weight

    def init(self, m):
        if isinstance(m, nn.Linear | nn.Embedding):
            nn.init.normal_(m.weight, std=0.02)

    def forward(self, idx, targets=None):
        B, T = idx.shape
        x = self.tok(idx) + self.pos(torch.arange(T))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, top_k=None):
        self.eval()
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.max_len :])[0][:, -1]
            if top_k is not None:
                best = logits.topk(top_k).values[:, [-1]]
                logits = logits.masked_fill(logits < best, float("-inf"))
            idx = torch.cat([idx, torch.multinomial(logits.softmax(-1), 1)], 1)
        return idx


def lm_loss(model, ids):
    logits, loss = model(ids[:, :-1], ids[:, 1:])
    return loss


def make():
    torch.manual_seed(0)
    return TinyGPT()
