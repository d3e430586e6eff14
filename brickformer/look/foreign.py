"""Attention in models that know no brick: anyone's `nn.Module`, torch.nn, transformers.

While the model runs, a function mode sees every call of torch. Three are attention:

    scaled_dot_product_attention     its weights are computed again, tile by tile (fused.py)
    softmax over keys                its result is the map: four axes, or three that are then multiplied with values
    multi_head_attention_forward     nn.MultiheadAttention is asked for its weights as well

The name of a map is the path of the module that made the call. A fused kernel of somebody else's, or a compiled model,
calls none of these: then nothing is seen, and the error says so.
Shapes: B batch, H heads, T queries, S keys, K width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from brickformer.errors import DataError
from brickformer.look.ablate import REMOVALS, answers, distance_from
from brickformer.look.fused import Scores, something_else
from brickformer.look.maps import MOST, TILE, Pick, Sheet, elsewhere, left_out, picked
from brickformer.look.view import View, fitting

_SOFTMAX: Final = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
_PRODUCT: Final = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__, torch.einsum}
_READS: Final = ("cross", "encoder_attn", "multihead_attn", "encdec", "enc_dec", "src_attn")
"""Parts of the names under which torch.nn, transformers and many others keep attention to an encoder."""


@final
class Sees(TorchFunctionMode):
    """Notes maps. remove: number of the call and head that is to give zeros, to see what it contributed."""

    def __init__(self, names: Names, pick: Pick, ids: Sequence[int], source: Sequence[int]) -> None:
        super().__init__()
        self.names, self.pick, self.ids, self.source = names, pick, ids, source
        self.sheets: list[Sheet] = []
        self.paths: list[str] = []  # of all attention that was met, asked for or not
        self.other: list[str] = []  # whose answer is not what its map gives
        self.remove: tuple[int, int] | None = None
        self._calls = 0
        self._waiting: list[tuple[Tensor, str]] = []  # results of softmax over three axes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._fused(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._whole(func, args, kwargs)
        if func in _PRODUCT and self._waiting:
            args = self._multiplied(func, args)
        out = func(*args, **kwargs)
        if func in _SOFTMAX and isinstance(out, Tensor) and _over_last(out, args, kwargs):
            if out.ndim == 4:
                out = self._note(out, None)
            elif out.ndim in (2, 3):
                self._waiting.append((out, self.names.now))
        return out

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if query.ndim == 3 and self.pick.batch < len(query):
            query, key = query[:, None], key[:, None]
            if attn_mask is not None and attn_mask.ndim == 3:
                attn_mask = attn_mask[:, None]
            whole = out[:, None]
            removed = self._note(Scores(query, key, value[:, None], whole, attn_mask, is_causal, scale), whole)
            return removed[:, 0]
        if query.ndim != 4:
            return out
        return self._note(Scores(query, key, value, out, attn_mask, is_causal, scale), out)

    def _whole(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's own attention module: its weights have four axes, or three where there is no batch."""
        if self.remove is not None and self.remove[0] == self._calls:  # what leaves the head meets zeros
            heads, project = args[4], args[11].clone()
            project.unflatten(1, (heads, -1))[:, self.remove[1]] = 0.0
            args = (*args[:11], project, *args[12:])
        out = func(*args, **kwargs)
        if self.remove is not None:
            self._calls += 1
            return out
        other, weights = func(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})
        if not torch.allclose(other.nan_to_num(0.0), out[0].nan_to_num(0.0), rtol=0.02, atol=0.02 * float(other.std())):
            self.other.append(self.names.now)
        self._note(weights.nan_to_num(0.0) if weights.ndim == 4 else weights[None].nan_to_num(0.0), None)
        return out

    def _multiplied(self, func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a product, its weights noted where a softmax made them: the first factor, in einsum any."""
        if func is torch.einsum and len(args) == 2 and isinstance(args[1], list | tuple):
            args = (args[0], *args[1])
        places = range(1, len(args)) if func is torch.einsum else range(min(1, len(args)))
        for i in places:
            x = args[i]
            if isinstance(x, Tensor) and any(_same(w, x) for w, _ in self._waiting):
                return (*args[:i], self._note_softmax(x), *args[i + 1 :])
        return args

    def _note_softmax(self, weights: Tensor) -> Tensor:
        """Multiplied: (B, T, S) of one head, or the heads folded into the batch; (T, S) without a batch."""
        i = next(i for i, (w, _) in enumerate(self._waiting) if _same(w, weights))
        del self._waiting[i]
        if weights.ndim == 2:
            return self._note(weights[None, None], None)[0, 0]
        return self._note(weights[:, None], None)[:, 0]

    def _note(self, weights: Tensor | Scores, out: Tensor | None) -> Tensor:
        """Note a map (B, H, T, S); the weights, or what was made of them, with the removed head at zero."""
        number, self._calls = self._calls, self._calls + 1
        result = out if out is not None else weights
        assert isinstance(result, Tensor)
        if self.remove is not None:
            if self.remove[0] == number:
                result = result.clone()
                result[:, self.remove[1]] = 0.0
            return result
        path = self.names.now
        self.paths.append(path)
        if not self.pick.wants(path):
            return result
        if isinstance(weights, Tensor) and _has_sink(weights):
            weights = weights[..., :-1]
        b, (tokens, keys) = self.pick.batch, weights.shape[-2:]
        cross = keys < tokens or (keys > tokens > 1) or any(part in path.lower() for part in _READS)
        begin = 0 if cross else max(0, keys - tokens)  # the queries are the last tokens
        fits = tokens == len(self.source), tokens == len(self.ids)
        encodes = fits == (True, False) or ("encoder" in path and fits != (False, True))
        reads = encodes and not cross and bool(self.source)
        own = self.source if reads else self.ids
        there = self.source if cross else own
        known = _fits(own, tokens + begin), _fits(there, keys)
        pick = self.pick
        if pick.rows is None and begin + tokens > MOST:  # more than the labels said
            pick = replace(pick, rows=(begin + tokens - MOST, begin + tokens))
        if pick.keys is None and cross and keys > MOST:
            pick = replace(pick, keys=(0, MOST))
        sheet = Sheet(path, "cross" if cross else "self", "attention", pick, q_ids=known[0], k_ids=known[1])
        sheet.side, sheet.number, sheet.tokens = ("source" if reads else "target"), number, begin + tokens
        self.sheets.append(sheet)
        pos = torch.arange(begin, begin + tokens)
        rows = sheet.wants(pos).nonzero()[:, 0].tolist()
        heads = sheet.heads(path, weights.shape[1])
        step = max(1, TILE // (keys * len(heads)))
        for i in range(0, len(rows), step):
            some = torch.tensor(rows[i : i + step])
            tile = weights.rows(b, some, heads) if isinstance(weights, Scores) else weights[b, heads][:, some]
            sheet.add(tile.detach().float().cpu(), pos[some], torch.arange(keys), keys)
        if isinstance(weights, Scores) and rows and not weights.give_what_came_out(b, rows[-1], heads):
            self.other.append(path)
        return result


@final
class Names:
    """Which module is running. now: the path of the innermost one."""

    def __init__(self) -> None:
        self._stack = [""]

    @property
    def now(self) -> str:
        """The path."""
        return self._stack[-1]

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """While it runs."""
        handles = []
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks; what it does is its parent's
                continue
            handles.append(module.register_forward_pre_hook(lambda *_, path=path: self._stack.append(path)))
            handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self) -> None:
        self._stack.pop()


def foreign(
    model: nn.Module,
    *inputs: Any,
    named: Mapping[str, Any] | None = None,
    labels: Sequence[str],
    source: Sequence[str] = (),
    rows: tuple[int, int] | None = None,
    only: Sequence[str] = (),
    remove: bool = True,
    title: str = "",
) -> View:
    """What somebody's model looks at in the call model(*inputs, **named); of a batch, in its first row.

    labels: the texts of the tokens; source: of those that an encoder reads. The others as in `attention`.
    Errors: DataError when no attention is seen, and why that may be.
    """
    named = named or {}
    model = getattr(model, "_orig_mod", model)  # torch.compile keeps the model itself there
    if isinstance(model, torch.jit.ScriptModule):
        raise DataError(_unseen(model))
    left: list[tuple[str, str]] = []
    pick = picked(len(labels), len(source), rows, only, left)
    numbers: dict[str, int] = {}
    ids, src = ([numbers.setdefault(t, len(numbers)) for t in texts] for texts in (labels, source))
    names, training = Names(), model.training
    sees = Sees(names, pick, ids, src)
    model.eval()
    try:
        with torch.no_grad(), names.of(model):
            with sees:
                before = answers(model(*inputs, **named))
            found = [(made, sheet) for sheet in sees.sheets if (made := sheet.map()) is not None]
            if not found:
                raise DataError(elsewhere(pick, sees.paths) or _unseen(model))
            for m, sheet in found:
                same = [s for s in sees.sheets if s.name == sheet.name]
                m.name += f" ({same.index(sheet) + 1})" if len(same) > 1 else ""
            view = View(title or type(model).__name__, fitting([m for m, _ in found], left), list(labels), list(source))
            view.left_out, view.foreign = left, True
            left.extend(something_else(dict.fromkeys(sees.other)))
            most = max(sheet.tokens for sheet in sees.sheets)
            if most > max(len(labels), len(source)):
                said = f"the texts of some tokens: {len(labels)} for {most}"
                left.append(left_out(said, f"部分词元的文字（共 {most} 个）"))
            heads = sum(m.heads for m in view.maps)
            if remove and before is not None and heads <= REMOVALS and len(labels) <= MOST:
                moved = distance_from(before[0], logits=before[1])
                removed: dict[str, list[float]] = {}
                for m, (_, sheet) in zip(view.maps, found, strict=False):
                    removed[m.name] = []
                    for head in m.places:
                        other = Sees(names, pick, ids, src)
                        other.remove = sheet.number, head
                        with other:
                            after = answers(model(*inputs, **named))
                        assert after is not None
                        removed[m.name].append(moved(after[0]))
                view.measured(removed)
                view.logits = before[1]
            elif remove:
                left.append(left_out("what heads contribute when removed", "各头移除后的影响"))
        return view
    finally:
        model.train(training)


def _unseen(model: nn.Module) -> str:
    why = "It has none, or a fused kernel of its own, or writes its softmax by hand"
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        why = "It is a TorchScript module, or has one"
    return (
        f"look: no attention was seen in {type(model).__name__}: no scaled_dot_product_attention, no softmax over "
        f"keys. {why}. Look at it before it is compiled; of transformers, with attn_implementation='sdpa' or 'eager'."
    )


def _has_sink(weights: Tensor) -> bool:
    """Whether the last key is no token but a sink, joined to the scores: the first query sees itself and that one."""
    tokens, keys = weights.shape[-2:]
    first = weights[..., 0, :]
    return keys == tokens + 1 > 2 and not bool(first[..., 1:-1].any()) and bool(first[..., -1].any())


def _over_last(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a softmax ran over the last axis."""
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return isinstance(axis, int) and axis in (-1, out.ndim - 1)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()


def _fits(ids: Sequence[int], count: int) -> Sequence[int] | None:
    return ids if len(ids) == count else None
