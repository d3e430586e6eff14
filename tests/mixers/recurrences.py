"""The recurrent mixers once more, token by token, straight from the equations of their papers.

Nothing here is shared with the package: from a module only its parameters are taken. One row at a time, one token at a
time, one channel group at a time; slow on purpose. x (T, D) is one row without padding, out (T, D).
"""

from __future__ import annotations

import torch
from torch import Tensor

from brickformer.mixers.delta import GatedDeltaMixer
from brickformer.mixers.lstm import LSTMMixer
from brickformer.mixers.mamba import MambaMixer
from brickformer.mixers.mamba2 import Mamba2Mixer


def short_conv(x: Tensor, conv: torch.nn.Conv1d) -> Tensor:
    """Each channel's own weights over the token itself and those before it; the newest token has the last weight."""
    out = []
    for t in range(len(x)):
        y = torch.zeros_like(x[0]) if conv.bias is None else conv.bias
        for back in range(conv.kernel_size[0]):
            if t >= back:
                y = y + conv.weight[:, 0, -1 - back] * x[t - back]
        out.append(y * torch.sigmoid(y))
    return torch.stack(out)


def mamba(m: MambaMixer, x: Tensor) -> Tensor:
    """arXiv 2312.00752, algorithm 2, with the discretisation of equation 4 (B by Euler's rule) and the gate."""
    states, inner = m.h_size
    u, z = m.into(x)[:, :inner], m.into(x)[:, inner:]
    u = short_conv(u, m.conv)
    h, out = torch.zeros(inner, states, dtype=x.dtype), []
    for t in range(len(x)):
        selected = m.select.weight @ u[t]
        r, b, c = selected[: -2 * states], selected[-2 * states : -states], selected[-states:]
        if isinstance(m.b_norm, torch.nn.RMSNorm):  # arXiv 2403.19887, 6.4: each of the three has its own
            r, b, c = (
                v * (v.square().mean() + norm.eps) ** -0.5 * norm.weight
                for v, norm in ((r, m.step_norm), (b, m.b_norm), (c, m.c_norm))
            )
        delta = torch.log1p(torch.exp(m.step.weight @ r + m.step.bias))
        h = torch.exp(delta[:, None] * -torch.exp(m.A_log)) * h + delta[:, None] * b[None, :] * u[t][:, None]
        out.append((h * c).sum(1) + m.D * u[t])
    return m.out(torch.stack(out) * z * torch.sigmoid(z))


def mamba2(m: Mamba2Mixer, x: Tensor) -> Tensor:
    """arXiv 2405.21060: equation 1 with a scalar decay a head, groups of heads that share B and C, the gated norm."""
    groups, _, states = m.h_size
    heads = len(m.A_log)
    inner = m.out.in_features
    width = inner // heads
    mixed = m.into(x)
    z, xbc, delta = mixed[:, :inner], mixed[:, inner:-heads], mixed[:, -heads:]
    xbc = short_conv(xbc, m.conv)
    delta = torch.log1p(torch.exp(delta + m.dt_bias))
    out = []
    for head in range(heads):
        group = head // (heads // groups)
        b = xbc[:, inner + group * states : inner + (group + 1) * states]
        c = xbc[:, inner + (groups + group) * states : inner + (groups + group + 1) * states]
        h, said = torch.zeros(width, states, dtype=x.dtype), []
        for t in range(len(x)):
            u = xbc[t, head * width : (head + 1) * width]
            h = torch.exp(-torch.exp(m.A_log[head]) * delta[t, head]) * h + delta[t, head] * torch.outer(u, b[t])
            said.append(h @ c[t] + m.D[head] * u)
        out.append(torch.stack(said))
    y = torch.cat(out, 1) * z * torch.sigmoid(z)
    normed = [part / (part.square().mean(1, keepdim=True) + m.norm.eps).sqrt() for part in y.chunk(groups, 1)]
    return m.out(torch.cat(normed, 1) * m.norm.weight)


def gated_delta(m: GatedDeltaMixer, x: Tensor) -> Tensor:
    """arXiv 2412.06464, equation 10, with S as the paper writes it (values × keys), and the block of its figure 1."""
    heads, width, value = m.h_size
    keys = (m.conv.in_channels - heads * value) // 2
    shared = heads // (keys // width)
    mixed = m.into(x)
    qkv = short_conv(mixed[:, : 2 * keys + heads * value], m.conv)
    z, beta, a = mixed[:, 2 * keys + heads * value :].split([heads * value, heads, heads], 1)
    alpha = torch.exp(-torch.exp(m.A_log) * torch.log1p(torch.exp(a + m.dt_bias)))
    out = []
    for head in range(heads):
        group = head // shared
        q = qkv[:, group * width : (group + 1) * width]
        k = qkv[:, keys + group * width : keys + (group + 1) * width]
        v = qkv[:, 2 * keys + head * value : 2 * keys + (head + 1) * value]
        q, k = (w / (w.square().sum(1, keepdim=True) + 1e-6).sqrt() for w in (q, k))
        s, said = torch.zeros(value, width, dtype=x.dtype), []
        for t in range(len(x)):
            share = torch.sigmoid(beta[t, head])
            s = s @ (alpha[t, head] * (torch.eye(width, dtype=x.dtype) - share * torch.outer(k[t], k[t])))
            s = s + share * torch.outer(v[t], k[t])
            said.append(s @ q[t] / width**0.5)
        y = torch.stack(said)
        gate = z[:, head * value : (head + 1) * value]
        y = y / (y.square().mean(1, keepdim=True) + m.norm.eps).sqrt() * m.norm.weight
        out.append(y * gate * torch.sigmoid(gate))
    return m.out(torch.cat(out, 1))


def lstm(m: LSTMMixer, x: Tensor) -> Tensor:
    """The equations of the LSTM; where there are two, the second one reads the row from its end."""
    ways = [_one_way(m.ahead, x)]
    if m.back is not None:
        ways.append(_one_way(m.back, x.flip(0)).flip(0))
    return m.out(torch.cat(ways, 1))


def _one_way(cell: torch.nn.LSTM, x: Tensor) -> Tensor:
    w_x, w_h, b_x, b_h = cell.all_weights[0]
    h = c = torch.zeros(cell.hidden_size, dtype=x.dtype)
    out = []
    for t in range(len(x)):
        i, f, g, o = (w_x @ x[t] + b_x + w_h @ h + b_h).chunk(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        out.append(h)
    return torch.stack(out)


def naive(m: torch.nn.Module, x: Tensor) -> Tensor:
    """The loop that belongs to a mixer."""
    match m:
        case MambaMixer():
            return mamba(m, x)
        case Mamba2Mixer():
            return mamba2(m, x)
        case GatedDeltaMixer():
            return gated_delta(m, x)
        case LSTMMixer():
            return lstm(m, x)
        case _:
            raise AssertionError(type(m))


def shaken(m: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """In float64, with noise on every parameter: biases and gains are not left at 0 and 1."""
    noise = torch.Generator().manual_seed(seed)
    m = m.double().eval()
    for p in m.parameters():
        size = p.shape[-1] ** -0.5 if p.ndim > 1 else 0.3
        p.data.add_(torch.randn(p.shape, generator=noise, dtype=torch.float64) * size)
    return m


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Of one number that depends on every output by its own amount."""
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(y.dtype)
    return list(torch.autograd.grad((y * weight).sum(), inputs))
