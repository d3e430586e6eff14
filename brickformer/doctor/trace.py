"""A trace of hand-written attention: which products became scores, how they were scaled, masked and normalised.

Run a model inside `Trace()`. Tensors that come out of a projection carry a mark; views keep it, constant factors are
multiplied up, the product of two marked tensors is a score, softmax of a score a weight, and the product of a weight
with a third tensor the context. So the doctor knows q, k, scores, weights and context of any attention that is
written out, however its code looks, and of `scaled_dot_product_attention`. `nn.MultiheadAttention` stays closed.

Shapes: q (..., T, K), k (..., S, K), scores and weights (..., T, S), context (..., T, K), in whatever order of axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass(eq=False)
class Heads:
    """One attention that was seen. factor: the constant between the projections' product and the scores.

    None where it is not constant. over: the largest sum of the weights over the axis that is contracted with v.
    """

    place: str
    q: Tensor
    k: Tensor
    width: int
    factor: float | None
    scores: Tensor | None = None
    weights: Tensor | None = None
    context: Tensor | None = None
    v: Tensor | None = None
    over: float | None = None
    softmaxes: int = 0
    keys: int = -1  # the axis of the softmax
    fills: list[float] = field(default_factory=list)
    masked: bool = False
    fused: bool = False
    hides: bool = False  # whether the kernel was told to hide some key


@dataclass(frozen=True)
class Mark:
    """What a tensor is: a projected value, scores, weights or a distribution, and its constant factor so far."""

    stage: str
    factor: float | None = 1.0
    heads: Heads | None = None


_VIEWS = frozenset(
    "view reshape transpose permute swapaxes movedim contiguous to type_as float double half bfloat16 chunk split "
    "unbind __getitem__ expand repeat_interleave repeat cat squeeze unsqueeze flatten unflatten t mT T __get__ clone "
    "dropout masked_fill masked_fill_ where add add_ __add__ __radd__ __iadd__ sub __sub__ stack tile detach "
    "index_select narrow tril triu neg __neg__ roll expand_as view_as tensor_split split_with_sizes chunk stack "
    "select cat hstack concat concatenate nan_to_num clamp clamp_min maximum slice_scatter "
    "zeros_like rename refine_names adjoint H mH flip view_as_complex view_as_real conj resolve_conj".split()
)
_TIMES = frozenset("mul mul_ __mul__ __rmul__ __imul__ multiply".split())
_OVER = frozenset("div div_ __truediv__ __itruediv__ true_divide divide".split())
_PRODUCTS = frozenset("matmul __matmul__ bmm".split())
_PROJECT = frozenset("linear addmm conv1d".split())
_LIKE = frozenset("to type_as expand_as view_as".split())
_DRAWS = frozenset("uniform_ normal_ kaiming_uniform_ xavier_uniform_".split())


@final
class Trace(TorchFunctionMode):
    """Watches one run. heads: every attention, in order. closed: how often the library's own attention ran."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: dict[int, tuple[Tensor, Mark]] = {}
        self.heads: list[Heads] = []
        self.closed = 0
        self.drawn: list[str] = []
        self.losses: list[tuple[str, str]] = []  # (loss, stage of its input)
        self.said: list[tuple[str, int, tuple[int, ...]]] = []  # (place, axis, shape) of other softmaxes
        self.angles: list[tuple[str, Tensor]] = []  # what reached a cosine
        self.stack: list[str] = []
        self.open = False

    @property
    def place(self) -> str:
        """The module that runs now."""
        return self.stack[-1] if self.stack else ""

    def mark(self, x: Any) -> Mark | None:
        """The mark of a tensor."""
        kept = self.marks.get(id(x)) if isinstance(x, Tensor) else None
        return kept[1] if kept is not None else None

    def put(self, x: Any, mark: Mark) -> None:
        """Mark a tensor, or every tensor of a tuple; they live as long as the trace."""
        if isinstance(x, Tensor):
            self.marks[id(x)] = (x, mark)
        elif isinstance(x, tuple | list):
            for part in x:
                self.put(part, mark)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.open:
            self.open = True
            try:
                self.note(getattr(func, "__name__", ""), args, kwargs or {}, out)
            finally:
                self.open = False
        return out

    def note(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Learn from one call."""
        flat = [x for x in _flat((*args, *kwargs.values())) if isinstance(x, Tensor)]
        if name in _DRAWS and flat and isinstance(flat[0], nn.Parameter):
            self.drawn.append(self.place)
        if name in ("cos", "polar") and flat:
            self.angles.append((self.place, flat[-1].detach()))
        if name in _PROJECT:
            self.put(out, Mark("value"))
            return
        if name == "multi_head_attention_forward":
            self.closed += 1
            return
        if name == "scaled_dot_product_attention":
            self.fused(args, kwargs, out)
            return
        if name in ("cross_entropy", "nll_loss") and flat:
            mark = self.mark(flat[0])
            self.losses.append((name, mark.stage if mark else ""))
            return
        if name in ("softmax", "log_softmax") and flat:
            axis = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
            self.softmax(name, flat[0], out, axis)
            return
        if name in _PRODUCTS and len(flat) >= 2:
            self.product(flat[0], flat[1], -1, -2, out)
            return
        if name == "baddbmm" and len(flat) >= 3:
            self.product(flat[1], flat[2], -1, -2, out, float(kwargs.get("alpha", 1.0)))
            return
        if name == "einsum" and len(flat) == 2 and isinstance(args[0], str):
            axes = _contracted(args[0], *flat)
            self.product(flat[0], flat[1], *axes, out)
            return
        self.other(name, args, kwargs, flat, out)

    def other(self, name: str, args: Any, kwargs: dict[str, Any], flat: list[Tensor], out: Any) -> None:
        """Everything that is neither product nor softmax: marks go on, factors are multiplied up."""
        marks = [(x, m) for x in flat if (m := self.mark(x)) is not None]
        if not marks:
            return
        x, mark = marks[0]
        if mark.heads is not None and mark.stage == "scores":
            _masks(name, args, kwargs, x, mark.heads)
        if name in _TIMES or name in _OVER:
            others = [a for a in args if a is not x]
            constant = _number(others[0]) if len(others) == 1 else None
            if constant is not None:
                factor = None if mark.factor is None else mark.factor * (constant if name in _TIMES else 1 / constant)
            elif len(marks) > 1 or any(isinstance(o, nn.Parameter) for o in others) or name in _OVER:
                factor = None
            else:
                factor = mark.factor  # a table of cosines, a mask
            self.put(out, Mark(mark.stage, factor, mark.heads))
        elif len(marks) > 1 and mark.stage == marks[1][1].stage == "scores" and "add" in name:
            self.put(out, Mark("scores", None, mark.heads))  # scores of several kinds, added up
        elif name in _VIEWS:
            if x is args[0] or name not in _LIKE:
                self.put(out, mark)
        elif isinstance(out, Tensor) and out.is_floating_point():
            self.put(out, Mark(mark.stage, None, mark.heads))

    def product(
        self, a: Tensor, b: Tensor, axis_a: int | None, axis_b: int | None, out: Tensor, times: float = 1.0
    ) -> None:
        """times · a · b: a projection, scores, or the weighted sum."""
        ma, mb = self.mark(a), self.mark(b)
        for x, mark, axis, other in ((a, ma, axis_a, b), (b, mb, axis_b, a)):
            if mark is not None and mark.stage == "weights" and mark.heads is not None:
                if axis is not None:
                    mark.heads.over = float(x.detach().nan_to_num().sum(axis).max())
                mark.heads.context, mark.heads.v = out, other
                self.put(out, Mark("value", None))
                return
        if isinstance(a, nn.Parameter) or isinstance(b, nn.Parameter):
            self.put(out, Mark("value"))
        elif axis_a is not None and a.ndim >= 3 and b.ndim >= 3 and (ma is not None or mb is not None):
            fa, fb = (1.0 if m is None else m.factor for m in (ma, mb))
            factor = None if fa is None or fb is None or ma is None or mb is None else fa * fb * times
            heads = Heads(self.place, a, b if axis_b == -1 else b.transpose(-1, -2), a.shape[axis_a], factor)
            self.put(out, Mark("scores", factor, heads))

    def softmax(self, name: str, x: Tensor, out: Tensor, axis: Any) -> None:
        """Scores become weights; anything else becomes a distribution."""
        mark = self.mark(x)
        if mark is not None and mark.heads is not None and mark.stage in ("scores", "weights"):
            heads = mark.heads
            heads.softmaxes += 1
            if heads.scores is None:
                heads.scores, heads.factor, heads.place = x, mark.factor, self.place
                heads.keys = axis if isinstance(axis, int) else -1
                self.heads.append(heads)
            heads.weights = out
            self.put(out, Mark("weights", None, heads))
        else:
            self.said.append((self.place, axis if isinstance(axis, int) else -1, tuple(x.shape)))
            self.put(out, Mark("logprobs" if name == "log_softmax" else "distribution", None))

    def fused(self, args: Any, kwargs: dict[str, Any], out: Tensor) -> None:
        """torch's own kernel: its scale is right unless it was told another, or its input is scaled already."""
        q, k, v = (kwargs.get(n, args[i] if i < len(args) else None) for i, n in enumerate(("query", "key", "value")))
        assert q is not None and k is not None
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        causal = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
        mq, mk = self.mark(q), self.mark(k)
        told = kwargs.get("scale")
        factor = (q.shape[-1] ** -0.5) if told is None else float(told)
        for m in (mq, mk):
            factor = None if factor is None or m is None or m.factor is None else factor * m.factor
        heads = Heads(self.place, q, k, q.shape[-1], factor, context=out, v=v, fused=True)
        heads.masked = bool(causal) or mask is not None
        if isinstance(mask, Tensor):
            heads.hides = bool((mask < -1e4).any() if mask.is_floating_point() else (~mask.bool()).any())
        heads.hides |= bool(causal)
        heads.softmaxes = 1
        if isinstance(mask, Tensor) and mask.is_floating_point():
            heads.fills.append(float(mask.min()))
        self.heads.append(heads)
        self.put(out, Mark("value", None))


def _flat(values: Any) -> Iterator[Any]:
    for x in values:
        if isinstance(x, tuple | list):
            yield from _flat(x)
        else:
            yield x


def _number(x: Any) -> float | None:
    if isinstance(x, bool | nn.Parameter):
        return None
    if isinstance(x, int | float):
        return float(x) or None
    if isinstance(x, Tensor) and x.numel() == 1:
        return float(x) or None
    try:
        return float(x) or None  # a number of numpy
    except (TypeError, ValueError, RuntimeError):
        return None


def _masks(name: str, args: Any, kwargs: dict[str, Any], scores: Tensor, heads: Heads) -> None:
    """What was written over the scores, or added to them."""
    if name.startswith("masked_fill"):
        value = kwargs.get("value", args[2] if len(args) > 2 else None)
        number = float(value) if value is not None else 0.0
        heads.masked = True
        heads.fills.append(number)
    elif name == "where":
        for x in args[1:]:
            if x is not scores and (isinstance(x, int | float) or (isinstance(x, Tensor) and x.numel() == 1)):
                heads.masked = True
                heads.fills.append(float(x))
    elif name in ("add", "__add__", "__iadd__", "add_", "__radd__", "sub", "__sub__"):
        for x in args:
            if isinstance(x, Tensor) and x is not scores and x.numel() > 1 and not x.requires_grad:
                values = x.detach()
                low, high = float(values.min()), float(values.max())
                two = values.unique().numel() == 2
                if low < -30 or (two and low == 0.0 and high == 1.0) or (two and low < high == 0.0):
                    heads.masked = True
                    heads.fills.append(low)


def _contracted(equation: str, a: Tensor, b: Tensor) -> tuple[int | None, int | None]:
    """Negative places of the one letter that both have and the result has not."""
    left, _, right = equation.replace(" ", "").partition("->")
    first, _, second = left.partition(",")
    gone = [c for c in first if c in second and c not in right]
    if len(gone) != 1 or "." in equation[: equation.find(gone[0])].replace("...", ""):
        return None, None
    return first.index(gone[0]) - len(first), second.index(gone[0]) - len(second)


@contextmanager
def traced(model: nn.Module) -> Iterator[Trace]:
    """A trace of what runs inside, which knows the path of the module that runs."""
    trace = Trace()
    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda m, a, path=path: trace.stack.append(path)))
        handles.append(
            module.register_forward_hook(lambda m, a, o: (trace.stack.pop() if trace.stack else None, None)[1])
        )
    try:
        with trace:
            yield trace
    finally:
        for handle in handles:
            handle.remove()
