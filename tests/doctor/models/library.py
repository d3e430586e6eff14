"""Models on torch's own layers: language models, a translator with masks given, an encoder, a series."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Sines(nn.Module):
    def __init__(self, dim, max_len=64):
        super().__init__()
        t = torch.arange(max_len)[:, None].float()
        angle = t / 10000.0 ** (torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("pe", torch.cat([angle.sin(), angle.cos()], -1)[None])

    def forward(self, x):
        return x + self.pe[:, : x.shape[1]]


class TorchLM(nn.Module):
    def __init__(self, vocab=41, dim=32, heads=4, depth=2):
        super().__init__()
        self.dim = dim
        self.embed, self.sines = nn.Embedding(vocab, dim), Sines(dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 64, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.decoder = nn.Linear(dim, vocab)

    def forward(self, src):
        mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1], dtype=self.decoder.weight.dtype)
        x = self.sines(self.embed(src) * math.sqrt(self.dim))
        return self.decoder(self.encoder(x, mask=mask)).log_softmax(-1)


class SequenceFirstLM(nn.Module):
    def __init__(self, vocab=41, dim=32, heads=4, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(64, 1, dim) * 0.1)
        layer = nn.TransformerEncoderLayer(dim, heads, 64, 0.1)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.decoder = nn.Linear(dim, vocab)

    def forward(self, src, src_mask):
        x = self.embed(src) + self.pos[: len(src)]
        return self.decoder(self.encoder(x, mask=src_mask))


class TorchTranslator(nn.Module):
    def __init__(self, src_vocab=37, tgt_vocab=43, dim=32, heads=4, depth=2):
        super().__init__()
        self.src_embed, self.tgt_embed, self.sines = (
            nn.Embedding(src_vocab, dim),
            nn.Embedding(tgt_vocab, dim),
            Sines(dim),
        )
        self.transformer = nn.Transformer(dim, heads, depth, depth, 64, 0.1, batch_first=True)
        self.generator = nn.Linear(dim, tgt_vocab)

    def forward(self, src, tgt, tgt_mask, src_key_padding_mask=None):
        x = self.transformer(
            self.sines(self.src_embed(src)),
            self.sines(self.tgt_embed(tgt)),
            tgt_mask=tgt_mask,
            src_key_padding_mask=src_key_padding_mask,
            memory_key_padding_mask=src_key_padding_mask,
        )
        return self.generator(x)


class TorchEncoder(nn.Module):
    def __init__(self, vocab=41, dim=32, heads=4, depth=2):
        super().__init__()
        self.embed, self.sines = nn.Embedding(vocab, dim, padding_idx=0), Sines(dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 64, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x, src_key_padding_mask=None):
        return self.encoder(self.sines(self.embed(x)), src_key_padding_mask=src_key_padding_mask)


class Forecaster(nn.Module):
    def __init__(self, features=3, dim=32, heads=4, depth=2):
        super().__init__()
        self.project, self.sines = nn.Linear(features, dim), Sines(dim)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(dim, heads, 64, 0.1, batch_first=True) for _ in range(depth)]
        )
        self.out = nn.Linear(dim, features)

    def forward(self, x):
        x = self.sines(self.project(x))
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class FusedLM(nn.Module):
    def __init__(self, vocab=41, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(32, dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ln_1, self.ln_2, self.mlp = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab)
        self.dropout = 0.1

    def forward(self, input_ids):
        B, T = input_ids.shape
        x = self.wte(input_ids) + self.wpe.weight[:T]
        q, k, v = (
            y.view(B, T, self.heads, -1).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(x.shape[-1], 2)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, -1))
        x = x + F.gelu(self.mlp(self.ln_2(x)))
        return {"logits": self.lm_head(x)}


def make_lm():
    torch.manual_seed(0)
    return TorchLM()


def make_sequence_first():
    torch.manual_seed(0)
    return SequenceFirstLM()


def make_translator():
    torch.manual_seed(0)
    return TorchTranslator()


def make_encoder():
    torch.manual_seed(0)
    return TorchEncoder()


def make_forecaster():
    torch.manual_seed(0)
    return Forecaster()


def make_fused():
    torch.manual_seed(0)
    return FusedLM()
