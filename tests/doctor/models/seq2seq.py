"""The Transformer of 2017 as tutorials write it: sines, masks made inside from the padding id, post-norm, ReLU."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Positions(nn.Module):
    def __init__(self, dim, max_len=64):
        super().__init__()
        table = torch.zeros(max_len, dim)
        t = torch.arange(max_len).float()[:, None]
        freq = torch.exp(-math.log(10000.0) * torch.arange(0, dim, 2).float() / dim)
        table[:, 0::2] = torch.sin(t * freq)
        table[:, 1::2] = torch.cos(t * freq)
        self.register_buffer("table", table)

    def forward(self, x):
        return x + self.table[: x.size(1)]


class MultiHead(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.wq, self.wk, self.wv = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.wo = nn.Linear(dim, dim)

    def split(self, x):
        B, T, D = x.shape
        return x.view(B, T, self.heads, self.width).permute(0, 2, 1, 3)

    def forward(self, q, k, v, mask):
        q, k, v = self.split(self.wq(q)), self.split(self.wk(k)), self.split(self.wv(v))
        scores = torch.matmul(q, k.transpose(2, 3)) / self.width**0.5
        scores = scores.masked_fill(mask == 0, -1e9)
        weights = torch.softmax(scores, dim=-1)
        out = torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous()
        return self.wo(out.view(out.size(0), out.size(1), -1))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, drop):
        super().__init__()
        self.attention = MultiHead(dim, heads)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x, mask):
        x = self.norm1(x + self.drop(self.attention(x, x, x, mask)))
        return self.norm2(x + self.drop(self.ffn(x)))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, drop):
        super().__init__()
        self.attention, self.cross = MultiHead(dim, heads), MultiHead(dim, heads)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x, memory, mask, memory_mask):
        x = self.norm1(x + self.drop(self.attention(x, x, x, mask)))
        x = self.norm2(x + self.drop(self.cross(x, memory, memory, memory_mask)))
        return self.norm3(x + self.drop(self.ffn(x)))


class Encoder(nn.Module):
    def __init__(self, vocab, dim, heads, depth, drop):
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, dim), Positions(dim)
        self.layers = nn.ModuleList([EncoderLayer(dim, heads, drop) for _ in range(depth)])

    def forward(self, src, mask):
        x = self.pos(self.embed(src))
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Decoder(nn.Module):
    def __init__(self, vocab, dim, heads, depth, drop):
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, dim), Positions(dim)
        self.layers = nn.ModuleList([DecoderLayer(dim, heads, drop) for _ in range(depth)])
        self.project = nn.Linear(dim, vocab)

    def forward(self, trg, memory, mask, memory_mask):
        x = self.pos(self.embed(trg))
        for layer in self.layers:
            x = layer(x, memory, mask, memory_mask)
        return self.project(x)


class Translator(nn.Module):
    def __init__(self, src_vocab=37, trg_vocab=43, dim=32, heads=4, depth=2, pad=0, drop=0.1):
        super().__init__()
        self.src_pad_idx, self.trg_pad_idx = pad, pad
        self.encoder = Encoder(src_vocab, dim, heads, depth, drop)
        self.decoder = Decoder(trg_vocab, dim, heads, depth, drop)

    def make_src_mask(self, src):
        return (src != self.src_pad_idx)[:, None, None, :]

    def make_trg_mask(self, trg):
        pad = (trg != self.trg_pad_idx)[:, None, None, :]
        causal = torch.tril(torch.ones(trg.size(1), trg.size(1), device=trg.device)).bool()
        return pad & causal

    def forward(self, src, trg):
        src_mask, trg_mask = self.make_src_mask(src), self.make_trg_mask(trg)
        memory = self.encoder(src, src_mask)
        return self.decoder(trg, memory, trg_mask, src_mask)


def pair_loss(model, src, trg):
    logits = model(src, trg[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), trg[:, 1:].flatten(), ignore_index=0)


def smoothed_loss(model, src, trg):
    logp = model(src, trg[:, :-1]).log_softmax(-1)
    gold = trg[:, 1:]
    real = (gold != 0).float()
    hit = logp.gather(-1, gold[..., None])[..., 0]
    return -((0.9 * hit + 0.1 * logp.mean(-1)) * real).sum() / real.sum()


def greedy(model, src, new):
    trg = torch.ones(len(src), 1, dtype=torch.long)
    memory = model.encoder(src, model.make_src_mask(src))
    for _ in range(new):
        logits = model.decoder(trg, memory, model.make_trg_mask(trg), model.make_src_mask(src))
        trg = torch.cat([trg, logits[:, -1].argmax(-1, keepdim=True)], 1)
    return trg


def make():
    torch.manual_seed(0)
    return Translator()
