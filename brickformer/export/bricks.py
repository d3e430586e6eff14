"""What each brick becomes in a graph. A brick that is not here is refused by its name.

    attention          GroupQueryAttention with a cache in decoders, MultiHeadAttention in encoders
    cross-attention    MultiHeadAttention over keys and values that the encoder's graph projects
    short convolution  a sum of shifted inputs, its last inputs kept like a cache

Shapes: x (1, T, D); caches (1, G, P, K), P slots; K is filled up to a multiple of 8, which the kernels want.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from brickformer.errors import SpecError
from brickformer.export.graph import MICROSOFT, Blocks, Graph, split_rows
from brickformer.export.heads import HEAD, narrow, plain, repeat, widen
from brickformer.feedforward import GLU, MLP, FeedForwardSpec
from brickformer.layers import Layer, ParallelLayer, ParallelNormsLayer, Residual, StackLayer
from brickformer.linear import FusedLinear
from brickformer.mixers.attention import Attention, AttentionMixer
from brickformer.mixers.base import MixerSpec
from brickformer.mixers.cross import CrossAttention
from brickformer.mixers.pointwise import Pointwise
from brickformer.mixers.shortconv import ShortConv
from brickformer.norms import LayerScale, OffsetRootMeanSquare, ScaledLength, Squash
from brickformer.positions.rotary import Rope, RopePosition

Matrix = Callable[[nn.Module], Tensor | Blocks]
"""The weights of a linear map, as they are to stand in the graph."""
RMS: Final = "SimplifiedLayerNormalization"


@final
@dataclass(slots=True, eq=False)
class Site:
    """A graph being written for one side of a model. cached: of a decoder; else of an encoder.

    positions: (1, T) where tokens are. caches: (name, shape) of everything that goes in as past.NAME and out as NAME.
    """

    graph: Graph
    matrix: Matrix
    cached: bool
    max_len: int
    positions: str = ""
    caches: list[tuple[str, list[int | str]]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    def linear(self, x: str, module: nn.Module, name: str) -> str:
        """A linear map, coded or not."""
        bias = module.bias
        assert bias is None or isinstance(bias, Tensor)
        name = self.names.setdefault(id(module), name)  # one that is met again has its weights in the graph once
        return self.graph.matmul(x, self.matrix(module), bias, name)

    def parts(self, x: str, module: FusedLinear, name: str) -> list[str]:
        """Each projection of a fused map by itself: two products take less time than one that is split afterwards."""
        name = self.names.setdefault(id(module), name)
        weights = split_rows(self.matrix(module), module.parts)
        biases = [None] * len(weights) if module.bias is None else module.bias.split(module.parts)
        made = zip(weights, biases, strict=True)
        return [self.graph.matmul(x, weight, bias, f"{name}.{i}") for i, (weight, bias) in enumerate(made)]

    def past(self, name: str, shape: list[int | str]) -> str:
        """A cache as it comes in."""
        self.caches.append((name, shape))
        return self.graph.input(f"past.{name}", shape)

    def present(self, value: str, name: str, shape: list[int | str]) -> None:
        """A cache as it goes out."""
        self.graph.output(value, name, [("now" if n == "past" else n) for n in shape])

    # ---- layers

    def layer(self, x: str, spec: Layer, module: StackLayer, name: str) -> str:
        """One layer, its caches under `name`."""
        branches = module.branches()
        ffn = spec.ffn

        def run(part: nn.Module) -> Callable[[str], str]:
            if part is module.mixer:
                return lambda h: self.mixer(h, spec.mixer, part, f"{name}.mixer")
            if part is module.cross:
                assert isinstance(part, CrossAttention)
                return lambda h: self.cross(h, part, f"{name}.cross")
            assert ffn is not None
            return lambda h: self.feed(h, ffn, part, f"{name}.ffn")

        match module:
            case ParallelLayer() | ParallelNormsLayer():
                added = [self.branch(x, around, run(part), f"{name}.{i}") for i, (around, part) in enumerate(branches)]
                for y in added:
                    x = self.graph.add(x, y)
                return x
            case _:
                for i, (around, part) in enumerate(branches):
                    y = self.branch(x, around, run(part), f"{name}.{i}")
                    skip = x if around.skip == 1.0 else self.graph.op("Mul", x, self.graph.number(around.skip))
                    x = self.norm(self.graph.add(skip, y), around.after, f"{name}.{i}.after")
                return x

    def branch(self, x: str, around: Residual, f: Callable[[str], str], name: str) -> str:
        """out(f(into(x)))."""
        return self.norm(f(self.norm(x, around.into, f"{name}.into")), around.out, f"{name}.out")

    def norm(self, x: str, module: nn.Module, name: str) -> str:
        """Over the last axis."""
        g = self.graph
        match module:
            case nn.Identity():
                return x
            case nn.Sequential():
                for i, part in enumerate(module):
                    x = self.norm(x, part, f"{name}.{i}")
                return x
            case nn.LayerNorm():
                extra = [] if module.bias is None else [g.weight(f"{name}.bias", module.bias)]
                return g.norm("LayerNormalization", x, g.weight(f"{name}.gain", module.weight), *extra, eps=module.eps)
            case nn.RMSNorm():
                eps = module.eps or torch.finfo(torch.float32).eps
                return g.norm(RMS, x, g.weight(f"{name}.gain", module.weight), eps=eps)
            case OffsetRootMeanSquare():
                return g.norm(RMS, x, g.weight(f"{name}.gain", 1.0 + module.weight.float()), eps=module.eps)
            case LayerScale():
                return str(g.op("Mul", x, g.weight(f"{name}.gain", module.gain)))
            case Squash():
                y = g.op("Tanh", g.op("Mul", x, g.weight(f"{name}.alpha", module.alpha)))
                y = g.op("Mul", y, g.weight(f"{name}.gain", module.gain))
                return g.add(y, g.weight(f"{name}.bias", module.bias))
            case ScaledLength():
                length = g.op("ReduceL2", x, g.ints(-1), keepdims=1)
                length = g.op("Max", length, g.number(module.eps))
                return str(g.op("Mul", x, g.op("Div", g.weight(f"{name}.gain", module.gain), length)))
            case _:
                raise SpecError(
                    f"export: {type(module).__name__}: ONNX has no such norm here. Use LayerNorm or RMSNorm."
                )

    # ---- feed-forward

    def feed(self, x: str, spec: FeedForwardSpec, module: Any, name: str) -> str:
        """Each vector alone."""
        g = self.graph
        match spec:
            case MLP():
                hidden = self.activation(self.linear(x, module.into, f"{name}.into"), spec.activation)
            case GLU():
                gate, up = self.parts(x, module.gate_up, f"{name}.gate_up")
                hidden = g.op("Mul", self.activation(gate, spec.activation), up)
            case _:
                raise refused(spec.kind, "a feed-forward of kind mlp or glu")
        return self.linear(hidden, module.out, f"{name}.out")

    def activation(self, x: str, kind: str) -> str:
        """Of the hidden units."""
        g = self.graph
        match kind:
            case "relu":
                out = g.op("Relu", x)
            case "gelu":
                out = g.op("Gelu", x)
            case "gelu_tanh":
                out = g.op("Gelu", x, approximate="tanh")
            case "silu":
                out = g.op("Mul", x, g.op("Sigmoid", x))
            case "relu2":
                rectified = g.op("Relu", x)
                out = g.op("Mul", rectified, rectified)
            case _:
                raise refused(f"activation {kind}", "relu, gelu, gelu_tanh, silu or relu2")
        return str(out)

    # ---- mixers

    def mixer(self, x: str, spec: MixerSpec, module: Any, name: str) -> str:
        """What moves information along time."""
        match spec:
            case Attention():
                return self.attention(x, spec, module, name)
            case ShortConv():
                return self.mixer(self.convolution(x, module.weight, name), spec.mixer, module.mixer, f"{name}.mixer")
            case Pointwise():
                return self.feed(x, spec.ffn, module.ffn, f"{name}.ffn")
            case _:
                raise refused(spec.kind, "attention, shortconv or pointwise")

    def convolution(self, x: str, weight: Tensor, name: str) -> str:
        """y_t = Σ_j w_j x_{t-j}, what was before in a cache of the last inputs."""
        g, kernel = self.graph, len(weight)
        if not self.cached:
            raise refused("shortconv in an encoder", "it in decoders")
        shape: list[int | str] = [1, kernel - 1, weight.shape[1]]
        whole = g.op("Concat", self.past(f"{name}.inputs", shape), x, axis=1)
        y = g.op("Mul", x, g.weight(f"{name}.w0", weight[0]))
        for j in range(1, kernel):
            shifted = g.op("Slice", whole, g.ints(kernel - 1 - j), g.ints(-j), g.ints(1))
            y = g.add(y, g.op("Mul", shifted, g.weight(f"{name}.w{j}", weight[j])))
        self.present(g.op("Slice", whole, g.ints(1 - kernel), g.ints(2**62), g.ints(1)), f"{name}.inputs", shape)
        return str(y)

    def attention(self, x: str, spec: Attention, module: AttentionMixer, name: str) -> str:
        """Queries, keys, values, positions, the kernel, the output."""
        g = self.graph
        width, groups = module.width, module.kv_heads
        whole = self.linear(x, module.qkv, f"{name}.qkv")
        if self.cached and plain(module):
            return self.answer(x, self.grouped(whole, "", "", spec, module, name), module, name)
        q, k, v = g.op("Split", whole, g.ints(*module.qkv.parts), outputs=3, axis=-1)
        q = self.norm(q, module.q_norm_all, f"{name}.q_norm_all")
        k = self.norm(k, module.k_norm_all, f"{name}.k_norm_all")
        q = self.place(self.head_norm(q, module.q_norm, spec.heads, f"{name}.q_norm"), spec, module, spec.heads, name)
        k = self.place(self.head_norm(k, module.k_norm, groups, f"{name}.k_norm"), spec, module, groups, name)
        wide = -(-width // HEAD) * HEAD
        q, k, v = (widen(g, y, n, width, wide) for y, n in ((q, spec.heads), (k, groups), (v, groups)))
        if self.cached:
            y = self.grouped(q, k, v, spec, module, name)
        else:
            if spec.mask.window is not None or spec.mask.causal or spec.softcap is not None:
                raise refused("an encoder with a window, a causal mask or a soft cap", "mask=FULL in encoders")
            k, v = (repeat(g, y, groups, spec.heads, wide) for y in (k, v))
            scale = width**-0.5 if spec.scale is None else spec.scale
            y = g.op("MultiHeadAttention", q, k, v, domain=MICROSOFT, num_heads=spec.heads, scale=scale)
        return self.answer(x, narrow(g, y, spec.heads, width, wide), module, name)

    def grouped(self, q: str, k: str, v: str, spec: Attention, module: AttentionMixer, name: str) -> str:
        """The kernel with a cache. Without k and v, q is all three, and the kernel turns them itself."""
        g, groups, width = self.graph, module.kv_heads, module.width
        shape: list[int | str] = [1, groups, "past", -(-width // HEAD) * HEAD]
        more: dict[str, Any] = {} if spec.softcap is None else {"softcap": spec.softcap}
        tables: list[str] = []
        match module.position:
            case RopePosition() as rope if not k:
                tables = self.tables(rope)
                more |= {"do_rotary": 1, "rotary_interleaved": int(rope.layout == "interleaved")}
        pasts = [self.past(f"{name}.{part}", shape) for part in "kv"]
        y, *presents = g.op(
            "GroupQueryAttention", q, k, v, *pasts, "last", "total", *tables, outputs=3, domain=MICROSOFT,
            num_heads=spec.heads, kv_num_heads=groups, scale=width**-0.5 if spec.scale is None else spec.scale,
            local_window_size=-1 if spec.mask.window is None else spec.mask.window, **more,
        )  # fmt: skip
        for part, present in zip("kv", presents, strict=True):
            self.present(present, f"{name}.{part}", shape)
        return str(y)

    def answer(self, x: str, y: str, module: AttentionMixer, name: str) -> str:
        """The gate and the output."""
        if module.gate is not None:
            y = self.graph.op("Mul", y, self.graph.op("Sigmoid", self.linear(x, module.gate, f"{name}.gate")))
        return self.linear(y, module.out, f"{name}.out")

    def place(self, x: str, spec: Attention, module: AttentionMixer, heads: int, name: str) -> str:
        """Rotary positions of (1, T, H·K), or none."""
        match spec.position, module.position:
            case None, _:
                return x
            case Rope(), RopePosition() as rope:
                return self.rotate(x, rope, heads, module.width)
            case other, _:
                assert other is not None
                raise refused(other.kind, "position=Rope(), a table at the embedding, or none")

    def rotate(self, x: str, rope: RopePosition, heads: int, width: int) -> str:
        """cos and sin from tables; pairs as the layout says."""
        g, turned = self.graph, 2 * len(rope.rates[torch.float32])
        more = {"rotary_embedding_dim": turned} if turned < width else {}
        return str(
            g.op(
                "RotaryEmbedding",
                x,
                self.positions,
                *self.tables(rope),
                domain=MICROSOFT,
                num_heads=heads,
                interleaved=int(rope.layout == "interleaved"),
                **more,
            )
        )

    def tables(self, rope: RopePosition) -> list[str]:
        """cos and sin, (max_len, K / 2) each."""
        rates = rope.rates[torch.float32]
        angle = torch.arange(self.max_len, dtype=torch.float32)[:, None] * torch.tensor(rates)
        key = f"rope_{abs(hash((rates, rope.sharpen)))}"
        both = (("cos", angle.cos()), ("sin", angle.sin()))
        return [self.graph.weight(f"{key}_{n}", t * rope.sharpen) for n, t in both]

    def head_norm(self, x: str, module: nn.Module, heads: int, name: str) -> str:
        """A norm over each head."""
        if isinstance(module, nn.Identity):
            return x
        g = self.graph
        cut = g.op("Reshape", x, g.ints(0, 0, heads, -1))
        return str(g.op("Reshape", self.norm(cut, module, name), g.ints(0, 0, -1)))

    def cross(self, x: str, module: CrossAttention, name: str) -> str:
        """Over keys and values of the memory, (1, H, S, K), which the encoder's graph gives."""
        g, heads = self.graph, module.q.out_features // module.width
        width = module.width
        q = self.head_norm(self.linear(x, module.q, f"{name}.q"), module.q_norm, heads, f"{name}.q_norm")
        k, v = (g.input(f"{name}.{part}", [1, heads, "source", width]) for part in "kv")
        scale = width**-0.5 if module.attend.scale is None else module.attend.scale
        y = g.op("MultiHeadAttention", q, k, v, domain=MICROSOFT, num_heads=heads, scale=scale)
        return self.linear(y, module.out, f"{name}.out")

    def project(self, memory: str, module: CrossAttention, name: str) -> None:
        """Keys and values of the memory, (1, H, S, K), as outputs of the encoder's graph."""
        g, heads, width = self.graph, module.q.out_features // module.width, module.width
        groups = module.kv.parts[0] // width
        k, v = g.op("Split", self.linear(memory, module.kv, f"{name}.kv"), outputs=2, axis=-1, num_outputs=2)
        k = self.head_norm(k, module.k_norm, groups, f"{name}.k_norm")
        for part, y in (("k", k), ("v", v)):
            cut = g.op("Reshape", repeat(g, y, groups, heads, width), g.ints(0, 0, heads, width))
            shape: list[int | str] = [1, heads, "source", width]
            g.output(g.op("Transpose", cut, perm=[0, 2, 1, 3]), f"{name}.{part}", shape)


def refused(what: str, expected: str) -> SpecError:
    """What a graph cannot say."""
    return SpecError(f"export: {what} cannot be written as an ONNX graph; expected {expected}.")
