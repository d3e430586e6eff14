"""A second Transformer, written from the papers and from nothing else: einsum, loops, every formula in full.

It shares no line with the package and imports none. A model comes in as plain data: the dictionary that a spec
writes, and weights by name. What it does not know it refuses (`UnknownBrickError`), so that a test cannot pass by
comparing nothing.

Letters: b row, t query token, s key token, h head, g key head, d model width, k head width, e expert.
`where[b, t]` is the position of a token, or None for padding; `doc[b, t]` its document.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Data = dict[str, Any]
FORBIDDEN = -1e30  # added to a score that must not count; not 0, which would still get weight


class UnknownBrickError(Exception):
    """A brick or an option that this file does not know."""


@dataclass(frozen=True)
class Weights:
    """Parameters by name, below a prefix."""

    all: dict[str, Tensor]
    prefix: str = ""

    def __call__(self, name: str) -> Tensor:
        return self.all[self.prefix + name]

    def get(self, name: str) -> Tensor | None:
        """The parameter, or None."""
        return self.all.get(self.prefix + name)

    def below(self, name: str) -> Weights:
        """The parameters of one part."""
        return Weights(self.all, f"{self.prefix}{name}.")


@dataclass(frozen=True)
class Tokens:
    """Where tokens are. stride: tables and rotary read every so many places (arXiv 2305.16843), after training.

    first: the values of the first layer (arXiv 2410.17897).
    """

    where: list[list[int | None]]
    doc: list[list[int]] | None = None
    stride: int = 1
    first: Tensor | None = None

    def place(self, b: int, t: int) -> int:
        """The place that is read; 0 for padding, whose outcome nobody looks at."""
        at = self.where[b][t]
        return 0 if at is None else at * self.stride


Depth = tuple[int, int]
"""Layers of a stack, and of the decoder that reads it (0: none does)."""


# ---- models ---------------------------------------------------------------------------------------------------------


def decode(spec: Data, w: Weights, ids: Tensor, at: Tokens, memory: tuple[Tensor, Tokens] | None = None) -> Tensor:
    """(b, t) ids -> (b, t, vocabulary)."""
    at = _placed(spec, at)
    return _head(spec["head"], w, _stack(spec, w.below("stack"), _embed(spec, w.below("embed"), ids, at), at, memory))


def encode(spec: Data, w: Weights, ids: Tensor, at: Tokens) -> tuple[Tensor, Tokens]:
    """(b, t) ids -> (b, t, d), and where they are."""
    at = _placed(spec, at)
    return _stack(spec, w.below("stack"), _embed(spec, w.below("embed"), ids, at), at, None), at


def encode_with_head(spec: Data, w: Weights, ids: Tensor, at: Tokens) -> Tensor:
    """(b, t) ids -> (b, t, vocabulary)."""
    return _head(spec["head"], w, encode(spec, w, ids, at)[0])


def translate(spec: Data, w: Weights, src: Tensor, src_at: Tokens, tgt: Tensor, tgt_at: Tokens) -> Tensor:
    """Source and target ids -> logits of the target."""
    readers = len(spec["decoder"]["layers"]) * spec["decoder"]["loops"]
    memory = encode({**spec["encoder"], "readers": readers}, w.below("encoder"), src, src_at)
    return decode(spec["decoder"], w.below("decoder"), tgt, tgt_at, memory)


def _placed(spec: Data, at: Tokens) -> Tokens:
    random = spec["embed"]["randomized"]
    return Tokens(at.where, at.doc, random["stride"] if random else 1)


def _embed(spec: Data, w: Weights, ids: Tensor, at: Tokens) -> Tensor:
    embed, table = spec["embed"], w("tokens.weight")
    rows, tokens = ids.shape
    x = torch.stack([torch.stack([table[i] for i in row]) for row in ids.tolist()])
    if embed["scaled"]:
        x = x * math.sqrt(table.shape[1])
    if embed["segments"]:  # none are told here: all of the first kind
        x = x + w("segments.weight")[0]
    if embed["position"] is not None:
        added = [
            [_absolute(embed["position"], w, at.place(b, t), table.shape[1]) for t in range(tokens)]
            for b in range(rows)
        ]
        x = x + torch.stack([torch.stack(row) for row in added])
    x = x if embed["norm"] is None else _norm(embed["norm"], w.below("norm"), x)
    return x if embed["width"] is None else _linear(w, "project", x)


def _head(head: Data, w: Weights, h: Tensor) -> Tensor:
    matrix = w("embed.tokens.weight") if head["tied"] else w("head.project.weight")
    width = h.shape[-1]
    if head["transform"] is not None:  # arXiv 1810.04805: a layer before the table
        dense = _activation(head["transform"]["activation"], _linear(w, "head.transform.dense", h))
        h = _norm(head["transform"]["norm"], w.below("head.transform.norm"), dense)
    if head["scaled"]:
        h = h / math.sqrt(width)
    logits = torch.einsum("btd,vd->btv", h, matrix)
    if head["bias"]:
        logits = logits + w("head.project.bias")
    return logits if head["softcap"] is None else head["softcap"] * torch.tanh(logits / head["softcap"])


def _stack(spec: Data, w: Weights, x: Tensor, at: Tokens, memory: tuple[Tensor, Tokens] | None) -> Tensor:
    depth = len(spec["layers"]) * spec["loops"], spec.get("readers", 0)
    at = replace(at, first=_first_values(spec["layers"][0], w.below("layers.0"), x))
    for _ in range(spec["loops"]):
        for i, layer in enumerate(spec["layers"]):
            x = _layer(layer, w.below(f"layers.{i}"), x, at, memory, depth)
    last = spec["layers"][-1]
    return x if last["place"] in ("post", "deep") else _norm(last["norm"], w.below("norm"), x)


def _first_values(layer: Data, w: Weights, x: Tensor) -> Tensor | None:
    """V_1 of arXiv 2410.17897: the values of the first layer, which later ones mix in."""
    if layer["mixer"]["kind"] != "attention":
        return None
    if layer["place"] in ("pre", "peri"):
        around = "around" if layer["arrange"] == "parallel" else "around_mixer"
        x = _norm(layer["mixer_norm"] or layer["norm"], w.below(f"{around}.into"), x)
    groups = layer["mixer"]["kv_heads"] or layer["mixer"]["heads"]
    width = layer["mixer"]["head_dim"] or x.shape[-1] // layer["mixer"]["heads"]
    return _heads(_linear(w, "mixer.qkv", x)[..., -groups * width :], groups)


def _layer(
    layer: Data, w: Weights, x: Tensor, at: Tokens, memory: tuple[Tensor, Tokens] | None, depth: Depth
) -> Tensor:
    def mix(h: Tensor) -> Tensor:
        return _mixer(layer["mixer"], w.below("mixer"), h, at)

    def forward(h: Tensor) -> Tensor:
        return _feed_forward(layer["ffn"], w.below("ffn"), h)

    own = {**layer, "norm": layer["mixer_norm"] or layer["norm"]}
    if layer["arrange"] == "parallel":
        return _residual(layer, w.below("around"), x, lambda h: mix(h) + forward(h), depth)
    if layer["arrange"] == "parallel_norms":  # x + mixer(norm(x)) + ffn(another norm(x))
        mixed = _residual(own, w.below("around_mixer"), x, mix, depth)
        return mixed + _residual(layer, w.below("around_ffn"), x, forward, depth) - x
    x = _residual(own, w.below("around_mixer"), x, mix, depth)
    if layer["cross"] is not None:
        assert memory is not None
        value, there = memory
        x = _residual(
            layer,
            w.below("around_cross"),
            x,
            lambda h: _cross(layer["cross"], w.below("cross"), h, value, there),
            depth,
        )
    return x if layer["ffn"] is None else _residual(layer, w.below("around_ffn"), x, forward, depth)


def _residual(layer: Data, w: Weights, x: Tensor, branch: Any, depth: Depth) -> Tensor:
    """Where the norm stands: written out case by case."""

    def norm(name: str, y: Tensor) -> Tensor:
        return _norm(layer["norm"], w.below(name), y)

    def scaled(y: Tensor) -> Tensor:
        return y if layer["layerscale"] is None else y * w("out.1.gain")

    out = "out" if layer["layerscale"] is None else "out.0"
    match layer["place"]:
        case "pre":  # arXiv 2002.04745
            return x + scaled(branch(norm("into", x)))
        case "post":  # arXiv 1706.03762
            return norm("after", x + scaled(branch(x)))
        case "peri":  # arXiv 2502.02732
            return x + scaled(norm(out, branch(norm("into", x))))
        case "branch":  # arXiv 2501.00656
            return x + scaled(norm(out, branch(x)))
        case "deep":  # arXiv 2203.00555, table 1: (2N)^¼; with cross-attention (3M)^¼ and 0.81 (N⁴M)^(1/16)
            branches, (layers, readers) = sum(layer[part] is not None for part in ("mixer", "cross", "ffn")), depth
            alpha = 0.81 * (layers**4 * readers) ** (1 / 16) if readers else (branches * layers) ** 0.25
            return norm("after", alpha * x + scaled(branch(x)))
        case other:
            raise UnknownBrickError(other)


# ---- norms, activations, feed-forward -------------------------------------------------------------------------------


def _norm(norm: Data, w: Weights, x: Tensor) -> Tensor:
    d = x.shape[-1]
    match norm["kind"]:
        case "nonorm":
            return x
        case "layernorm":
            mean = x.sum(-1, keepdim=True) / d
            variance = ((x - mean) ** 2).sum(-1, keepdim=True) / d
            y = (x - mean) / torch.sqrt(variance + norm["eps"]) * w("weight")
            return y + w("bias") if norm["bias"] else y
        case "rmsnorm":
            return x / torch.sqrt((x**2).sum(-1, keepdim=True) / d + norm["eps"]) * w("weight")
        case "offset_rmsnorm":
            y = x / torch.sqrt((x**2).sum(-1, keepdim=True) / d + norm["eps"])
            return y + y * w("weight")
        case "scalenorm":
            length = torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-300)
            return w("gain") * x / torch.where(length > norm["eps"], length, 0 * length + norm["eps"])
        case "dynamictanh":
            return torch.tanh(w("alpha") * x) * w("gain") + w("bias")
        case other:
            raise UnknownBrickError(other)


def _activation(name: str, x: Tensor) -> Tensor:
    match name:
        case "relu":
            return torch.where(x > 0, x, 0 * x)
        case "relu2":
            return torch.where(x > 0, x, 0 * x) ** 2
        case "silu":
            return x / (1 + torch.exp(-x))
        case "gelu":
            return x * (1 + torch.erf(x / math.sqrt(2))) / 2
        case "gelu_tanh":
            return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
        case other:
            raise UnknownBrickError(other)


def _linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = torch.einsum("...i,oi->...o", x, w(f"{name}.weight"))
    bias = w.get(f"{name}.bias")
    return y if bias is None else y + bias


def _feed_forward(ffn: Data, w: Weights, x: Tensor) -> Tensor:
    match ffn["kind"]:
        case "mlp":
            return _linear(w, "out", _activation(ffn["activation"], _linear(w, "into", x)))
        case "glu":
            both = _linear(w, "gate_up", x)
            gate, up = both[..., : ffn["hidden"]], both[..., ffn["hidden"] :]
            return _linear(w, "out", _activation(ffn["activation"], gate) * up)
        case "moe":
            y = torch.stack([torch.stack([_experts(ffn, w, token) for token in row]) for row in x])
            return y if ffn["shared"] is None else y + _feed_forward(ffn["shared"], w.below("shared"), x)
        case other:
            raise UnknownBrickError(other)


def _experts(moe: Data, w: Weights, x: Tensor) -> Tensor:
    """One token: its best experts, weighted by their scores."""
    router = moe["router"]
    logits = torch.einsum("d,ed->e", x, w("router.project.weight"))
    score = (
        torch.exp(logits) / torch.exp(logits).sum() if router["score"] == "softmax" else 1 / (1 + torch.exp(-logits))
    )
    ranked = sorted(range(moe["experts"]), key=lambda e: -float((score[e] + w("router.bias")[e]).detach()))
    size = moe["experts"] // router["groups"]  # arXiv 2412.19437: the groups whose two best experts are best together
    two = [[r for r in ranked if r // size == g][:2] for g in range(router["groups"])]
    worth = [sum(float((score[e] + w("router.bias")[e]).detach()) for e in pair) for pair in two]
    groups = sorted(range(router["groups"]), key=lambda g: -worth[g])[: router["top_groups"]]
    best = [e for e in ranked if e // size in groups][: router["top_k"]]
    total = sum(score[e] for e in best) if router["normalize"] else 1.0
    return sum(
        router["scale"] * score[e] / total * _feed_forward(moe["expert"], w.below(f"experts.{e}"), x) for e in best
    )  # type: ignore[return-value]


# ---- attention ------------------------------------------------------------------------------------------------------


def _mixer(mixer: Data, w: Weights, x: Tensor, at: Tokens) -> Tensor:
    match mixer["kind"]:
        case "attention":
            return _attention(mixer, w, x, at)
        case "differential":
            return _differential(mixer, w, x, at)
        case "latent":
            return _latent(mixer, w, x, at)
        case "pointwise":
            return _feed_forward(mixer["ffn"], w.below("ffn"), x)
        case "shortconv":
            return _mixer(mixer["mixer"], w.below("mixer"), _convolve(mixer["kernel"], w, x, at), at)
        case other:
            raise UnknownBrickError(other)


def _convolve(kernel: int, w: Weights, x: Tensor, at: Tokens) -> Tensor:
    """Each token with the few before it in its row and document, channel by channel (arXiv 2512.17351)."""
    rows = []
    for b, where in enumerate(at.where):
        said = []
        for t, p in enumerate(where):
            y = x[b, t] * w("weight")[0]
            for s, r in enumerate(where):
                same = at.doc is None or at.doc[b][s] == at.doc[b][t]
                if p is not None and r is not None and same and 0 < p - r < kernel:
                    y = y + x[b, s] * w("weight")[p - r]
            said.append(y)
        rows.append(torch.stack(said))
    return torch.stack(rows)


def _heads(x: Tensor, heads: int) -> Tensor:
    """(b, t, heads·k) -> (b, heads, t, k)."""
    b, t, width = x.shape
    return torch.stack([x[:, :, h * width // heads : (h + 1) * width // heads] for h in range(heads)], 1)


def _joined(x: Tensor) -> Tensor:
    """(b, h, t, k) -> (b, t, h·k)."""
    return torch.cat([x[:, h] for h in range(x.shape[1])], -1)


def _sees(mask: Data, q: Tokens, k: Tokens, tokens: int, keys: int) -> Tensor:
    """(b, t, s): 1 where a query may see a key."""
    out = torch.zeros(len(k.where), tokens, keys, dtype=torch.float64)
    for b in range(len(k.where)):
        for t in range(tokens):
            for s in range(keys):
                p, r = q.where[b][t], k.where[b][s]
                if r is None or (p is None and (mask["causal"] or mask["window"])):
                    continue
                if q.doc is not None and k.doc is not None and q.doc[b][t] != k.doc[b][s]:
                    continue
                if mask["causal"] and r > p:  # type: ignore[operator]
                    continue
                if mask["window"] is not None and abs(p - r) >= mask["window"]:  # type: ignore[operator]
                    continue
                out[b, t, s] = 1
    return out


def _weights(scores: Tensor, sees: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the keys that may be seen, (b, h, t, s); nothing where there are none."""
    sees = sees[:, None]
    scores = scores * sees + FORBIDDEN * (1 - sees)
    top = scores.max(-1, keepdim=True).values
    if sinks is not None:
        top = torch.maximum(top, sinks[None, :, None, None])
    top = top.detach()
    e = torch.exp(scores - top) * sees
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[None, :, None, None] - top)
    return e / torch.where(total > 0, total, torch.ones_like(total))


def _look(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float, **options: Any) -> Tensor:
    """(b, h, t, k) queries, (b, g, s, k) keys -> (b, h, t, v)."""
    heads, groups = q.shape[1], k.shape[1]
    shared = [h // (heads // groups) for h in range(heads)]
    scores = torch.einsum("bhtk,bhsk->bhts", q, k[:, shared]) * scale
    if options.get("softcap") is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if options.get("bias") is not None:
        scores = scores + options["bias"]
    return torch.einsum("bhts,bhsk->bhtk", _weights(scores, sees, options.get("sinks")), v[:, shared])


def _attention(mixer: Data, w: Weights, x: Tensor, at: Tokens) -> Tensor:
    heads, tokens = mixer["heads"], x.shape[1]
    groups = mixer["kv_heads"] or heads
    width = mixer["head_dim"] or x.shape[-1] // heads
    qkv = _linear(w, "qkv", x)
    q, k = qkv[..., : heads * width], qkv[..., heads * width : (heads + groups) * width]
    if mixer["qk_norm_all"] is not None:  # before heads are cut
        norm = mixer["qk_norm_all"]
        q, k = _norm(norm, w.below("q_norm_all"), q), _norm(norm, w.below("k_norm_all"), k)
    q, k, v = _heads(q, heads), _heads(k, groups), _heads(qkv[..., (heads + groups) * width :], groups)
    if mixer["qk_norm"] is not None:
        q, k = _norm(mixer["qk_norm"], w.below("q_norm"), q), _norm(mixer["qk_norm"], w.below("k_norm"), k)
    if mixer["value_residual"]:
        assert at.first is not None
        v = w("residue")[0] * v + w("residue")[1] * at.first
    causal = mixer["mask"]["causal"]
    q, k = _turn(mixer["position"], q, at), _turn(mixer["position"], k, at)
    y = _joined(
        _look(
            q,
            k,
            v,
            _sees(mixer["mask"], at, at, tokens, tokens),
            1 / math.sqrt(width) if mixer["scale"] is None else mixer["scale"],
            softcap=mixer["softcap"],
            bias=_bias(mixer["position"], w.below("position"), at, at, heads, causal),
            sinks=w("sinks") if mixer["sinks"] else None,
        )
    )
    if mixer["gate"]:
        y = y / (1 + torch.exp(-_linear(w, "gate", x)))
    return _linear(w, "out", y)


def _cross(cross: Data, w: Weights, x: Tensor, memory: Tensor, there: Tokens) -> Tensor:
    heads = cross["heads"]
    groups = cross["kv_heads"] or heads
    width = cross["head_dim"] or x.shape[-1] // heads
    q, kv = _heads(_linear(w, "q", x), heads), _linear(w, "kv", memory)
    k, v = _heads(kv[..., : groups * width], groups), _heads(kv[..., groups * width :], groups)
    if cross["qk_norm"] is not None:
        q, k = _norm(cross["qk_norm"], w.below("q_norm"), q), _norm(cross["qk_norm"], w.below("k_norm"), k)
    here = Tokens([[0] * x.shape[1]] * len(x))
    sees = _sees({"causal": False, "window": None}, here, there, x.shape[1], memory.shape[1])
    scale = 1 / math.sqrt(width) if cross["scale"] is None else cross["scale"]
    return _linear(w, "out", _joined(_look(q, k, v, sees, scale)))


def _differential(mixer: Data, w: Weights, x: Tensor, at: Tokens) -> Tensor:
    """arXiv 2410.05258, equations 1 to 3."""
    heads, d, tokens = mixer["heads"], x.shape[-1], x.shape[1]
    width = d // (2 * heads)
    qkv = _linear(w, "qkv", x)
    q, k, v = (_heads(qkv[..., i * d : (i + 1) * d], 2 * heads) for i in range(3))
    q, k = _turn(mixer["position"], q, at), _turn(mixer["position"], k, at)
    bias = _bias(mixer["position"], w.below("position"), at, at, 2 * heads, mixer["mask"]["causal"])
    whole = torch.cat([v[:, :heads], v[:, heads:]], -1)
    sees = _sees(mixer["mask"], at, at, tokens, tokens)
    halves = []
    for part in (slice(0, heads), slice(heads, None)):
        some = None if bias is None else bias[:, part]
        halves.append(_look(q[:, part], k[:, part], whole, sees, 1 / math.sqrt(width), bias=some))
    a, b, c, e = w("lambdas")
    strength = torch.exp((a * b).sum()) - torch.exp((c * e).sum()) + mixer["lambda_init"]
    seen = _norm(mixer["norm"], w.below("norm"), halves[0] - strength * halves[1])
    return _linear(w, "out", _joined(seen) * (1 - mixer["lambda_init"]))


def _latent(mixer: Data, w: Weights, x: Tensor, at: Tokens) -> Tensor:
    """arXiv 2405.04434, section 2.1, everything unpacked."""
    heads, rope, tokens = mixer["heads"], mixer["rope_dim"], x.shape[1]
    width = mixer["head_dim"] or x.shape[-1] // heads
    small = x
    if mixer["q_rank"] is not None:
        small = _norm(mixer["norm"], w.below("q_down.1"), _linear(w, "q_down.0", x))
    qs = _linear(w, "q_up", small)
    q, q_rope = _heads(qs[..., : heads * width], heads), _heads(qs[..., heads * width :], heads)
    down = _linear(w, "down", x)
    c, k_rope = _norm(mixer["norm"], w.below("norm"), down[..., :-rope]), down[:, None, :, -rope:]
    up = _linear(w, "up", c)
    k, v = _heads(up[..., : heads * width], heads), _heads(up[..., heads * width :], heads)
    q = torch.cat([q, _turn(mixer["position"], q_rope, at)], -1)
    k = torch.cat([k, _turn(mixer["position"], k_rope, at).expand(-1, heads, -1, -1)], -1)
    scale = 1 / math.sqrt(width + rope) if mixer["scale"] is None else mixer["scale"]
    bias = _bias(mixer["position"], w.below("position"), at, at, heads, mixer["mask"]["causal"])
    sees = _sees(mixer["mask"], at, at, tokens, tokens)
    return _linear(w, "out", _joined(_look(q, k, v, sees, scale, bias=bias)))


# ---- positions ------------------------------------------------------------------------------------------------------


def _absolute(position: Data, w: Weights, p: int, d: int) -> Tensor:
    match position["kind"]:
        case "learned":
            return w("position.table.weight")[position["skip"] + p]
        case "sinusoid":  # arXiv 1706.03762, 3.5
            angles = [p / 10_000 ** (2 * (i // 2) / d) for i in range(d)]
            values = [math.sin(a) if i % 2 == 0 else math.cos(a) for i, a in enumerate(angles)]
            if position["layout"] == "halves":  # all sines, then all cosines
                values = values[0::2] + values[1::2]
            return torch.tensor(values, dtype=torch.float32).double()
        case other:
            raise UnknownBrickError(other)


def _turn(position: Data | None, x: Tensor, at: Tokens) -> Tensor:
    """Rotary positions (arXiv 2104.09864): pair i turned by p·rate_i."""
    if position is None or position["kind"] in ("alibi", "t5bias"):
        return x
    if position["kind"] != "rope":
        raise UnknownBrickError(position["kind"])
    width = position["width"] or x.shape[-1]
    rates = _rates(position, width)
    out = []
    for b in range(len(x)):
        rows = []
        for t in range(x.shape[2]):
            row, p = list(x[b, :, t].unbind(-1)), at.place(b, t)
            for i, rate in enumerate(rates):
                j, k = (i, i + width // 2) if position["layout"] == "half" else (2 * i, 2 * i + 1)
                c, s = math.cos(p * rate), math.sin(p * rate)
                row[j], row[k] = row[j] * c - row[k] * s, row[j] * s + row[k] * c
            rows.append(torch.stack(row, -1))
        out.append(torch.stack(rows, 1))
    return torch.stack(out)


def _rates(position: Data, width: int) -> list[float]:
    theta, scaling = position["theta"], position["scaling"]
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    match scaling and scaling["kind"]:
        case None | "dynamic":
            return plain
        case "linear":
            return [rate / scaling["factor"] for rate in plain]
        case "ntk":
            larger = theta * scaling["factor"] ** (width / (width - 2)) if width > 2 else theta
            return [larger ** (-2 * i / width) for i in range(width // 2)]
        case other:
            raise UnknownBrickError(other)


def _bias(position: Data | None, w: Weights, q: Tokens, k: Tokens, heads: int, causal: bool) -> Tensor | None:
    """(b, h, t, s)."""
    if position is None or position["kind"] == "rope":
        return None
    rows = []
    for b in range(len(q.where)):
        apart = [[(t or 0) - (s or 0) for s in k.where[b]] for t in q.where[b]]  # biases know true positions only
        match position["kind"]:
            case "alibi":  # arXiv 2108.12409, for heads that are a power of two
                if heads & (heads - 1):
                    raise UnknownBrickError(f"alibi with {heads} heads")
                distance = torch.tensor(apart, dtype=torch.float64).abs()
                rows.append(torch.stack([-(2 ** (-8 * (h + 1) / heads)) * distance for h in range(heads)]))
            case "t5bias":  # arXiv 1910.10683, 2.1
                where = [
                    [_bucket(n, position["buckets"], position["max_distance"], causal) for n in row] for row in apart
                ]
                rows.append(
                    torch.stack([torch.stack([w("table.weight")[i] for i in r]) for r in where]).permute(2, 0, 1)
                )
            case other:
                raise UnknownBrickError(other)
    return torch.stack(rows)


def _bucket(before: int, buckets: int, far: int, causal: bool) -> int:
    first = 0
    if not causal:
        buckets = buckets // 2
        first = buckets if before < 0 else 0
        before = abs(before)
    before = max(before, 0)
    near = buckets // 2
    if before < near:
        return first + before
    return first + min(near + int(math.log(before / near) / math.log(far / near) * (buckets - near)), buckets - 1)
