"""Two-way encoders: token vectors with a padding mask as argument, and a classifier that pools."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dense = nn.Linear(dim, dim)

    def forward(self, x, mask):
        B, T, D = x.shape
        q = self.query(x).reshape(B, T, self.heads, self.width)
        k = self.key(x).reshape(B, T, self.heads, self.width)
        v = self.value(x).reshape(B, T, self.heads, self.width)
        q, k = q * self.width**-0.25, k * self.width**-0.25
        scores = torch.einsum("bthk,bshk->bhts", q, k)
        if mask is not None:
            scores = scores + (1.0 - mask[:, None, None, :].to(scores)) * -1e4
        weights = scores.softmax(dim=-1)
        out = torch.einsum("bhts,bshk->bthk", weights, v)
        return self.dense(out.reshape(B, T, D))


class Layer(nn.Module):
    def __init__(self, dim, heads, drop):
        super().__init__()
        self.attention = Attention(dim, heads)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.drop = drop

    def forward(self, x, mask):
        x = self.norm1(x + F.dropout(self.attention(x, mask), self.drop, self.training))
        return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), self.drop, self.training))


class TinyEncoder(nn.Module):
    def __init__(self, vocab=41, dim=32, heads=4, depth=2, max_len=32, drop=0.1):
        super().__init__()
        self.words = nn.Embedding(vocab, dim, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(1, max_len, dim) * 0.02)
        self.layers = nn.ModuleList([Layer(dim, heads, drop) for _ in range(depth)])

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids) + self.positions[:, : input_ids.size(1)]
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


class TextClassifier(nn.Module):
    def __init__(self, vocab=41, dim=32, heads=4, depth=2, classes=5):
        super().__init__()
        self.encoder = TinyEncoder(vocab, dim, heads, depth)
        self.classify = nn.Linear(dim, classes)

    def forward(self, x):
        real = x != 0
        h = self.encoder(x, real)
        h = (h * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return self.classify(h)


def make():
    torch.manual_seed(0)
    return TinyEncoder()


def make_classifier():
    torch.manual_seed(0)
    return TextClassifier()
