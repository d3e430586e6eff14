"""Watch: what a model looks at, while it runs as it always does, kernels and caches as they are.

    with Watch(model) as seen:
        model(ids)                      # or generate(model, ...), or any number of calls with a state
    maps = seen.maps()

Hooks stand before `Attend` and before mixers that keep a summary instead of tokens; what they would need to draw the
map of the asked rows is computed again there, tile by tile (maps.py, hidden.py). Nothing in the model changes, and the
hooks are gone afterwards. Models that know no `Attend` are watched by foreign.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from brickformer.attend import Attend
from brickformer.errors import DataError
from brickformer.layers import Stack
from brickformer.look.hidden import looked_at
from brickformer.look.maps import Map, Pick, Sheet, attended, elsewhere, positions
from brickformer.mask import EMPTY, Span
from brickformer.mixers.base import Mixer
from brickformer.mixers.cross import CrossAttention
from brickformer.mixers.differential import DifferentialMixer
from brickformer.mixers.lstm import LSTMMixer
from brickformer.mixers.recurrent import LinearRecurrence, RecurrentState


@final
class Watch:
    """tokens, source: ids at positions 0, 1, ... of what is written and read, for the share on equal tokens.

    summaries: look into mixers without attention too; that can cost more than the model itself.
    """

    def __init__(
        self,
        model: nn.Module,
        pick: Pick | None = None,
        *,
        tokens: Sequence[int] | None = None,
        source: Sequence[int] | None = None,
        summaries: bool = True,
    ) -> None:
        self.with_summaries = summaries
        self.model, self.pick, self.tokens, self.source = model, pick or Pick(), tokens, source
        self.sheets: dict[tuple[str, int], Sheet] = {}
        self.unknown: list[str] = []  # mixers that went on from a summary: what they looked at is not known
        self._handles: list[RemovableHandle] = []
        self._paths: list[str] = []  # of all that could be looked at, asked for or not
        self._calls: dict[str, int] = {}
        self._loops: dict[str, int] = {}

    def __enter__(self) -> Self:
        modules = dict(self.model.named_modules())
        for path, module in modules.items():
            if isinstance(module, Stack) and module.loops > 1:
                self._loops[path] = module.loops
        for path, module in modules.items():
            if isinstance(module, Attend):
                name = path.removesuffix(".attend")
                owner = modules.get(name, module)
                self._paths.append(name)
                if self.pick.wants(name):
                    hook = self._attend_hook(name, owner)
                    self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            elif not self.with_summaries:
                continue
            elif isinstance(module, LinearRecurrence | LSTMMixer):
                self._paths.append(path)
                if self.pick.wants(path):
                    self._handles.append(module.register_forward_pre_hook(self._mixer_hook(path), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def maps(self) -> list[Map]:
        """What was seen, in the order in which it was met. Errors: DataError when nothing was."""
        found = [made for sheet in self.sheets.values() if (made := sheet.map()) is not None]
        if not found:
            raise DataError(
                elsewhere(self.pick, self._paths)
                or f"look: no row of any map was seen in {type(self.model).__name__}: it has no attention and no mixer "
                "whose looks are known, or none of the rows and layers asked for was met."
            )
        return found

    def _sheet(self, path: str, **rest: Any) -> Sheet:
        """The sheet of a module, of its first, second ... turn where a stack is looped."""
        turn = self._calls.get(path, 0)
        loops = next((n for stack, n in self._loops.items() if path.startswith(stack)), 1)
        self._calls[path] = turn + 1
        key = path, turn % loops
        if key not in self.sheets:
            reads = path.startswith("encoder.") and self.source is not None
            side: Literal["source", "target"] = "source" if reads else "target"
            own = self.source if reads else self.tokens
            name = f"{path} ({key[1] + 1} of {loops})" if loops > 1 else path
            there = self.source if rest["kind"] == "cross" else own
            self.sheets[key] = Sheet(name, pick=self.pick, side=side, q_ids=own, k_ids=there, **rest)
        return self.sheets[key]

    def _attend_hook(self, path: str, owner: nn.Module) -> Any:
        kind = "cross" if isinstance(owner, CrossAttention) else "self"
        labels = None
        if isinstance(owner, DifferentialMixer):  # the first maps, then those that are taken away
            heads = owner.qkv.parts[0] // owner.width // 2
            labels = [f"{h + 1}{sign}" for sign in "+−" for h in range(heads)]

        @torch.no_grad()
        def hook(module: Attend, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            q, k, q_at, k_at, bias, sinks = _call(*args, **named)
            sheet = self._sheet(path, kind=kind, what="attention", labels=labels)
            attended(sheet, path, module, q, k, q_at, k_at, bias, sinks)

        return hook

    def _mixer_hook(self, path: str) -> Any:
        def hook(mixer: Mixer, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            x, at, state = _mixer_call(*args, **named)
            if isinstance(state, RecurrentState) and state.length > 0:
                if path not in self.unknown:
                    self.unknown.append(path)
                return
            what = "gradient" if isinstance(mixer, LSTMMixer) else "hidden"
            sheet = self._sheet(path, kind="self", what=what)
            b = self.pick.batch
            pos = positions(at, b, x.device)
            real = pos != EMPTY
            rows = sheet.wants(pos[real]).nonzero()[:, 0]
            if not len(rows):
                return
            pos = pos[real].cpu()
            with torch.inference_mode(False), torch.no_grad():  # in this order: leaving inference turns gradients on
                for some, weights in looked_at(mixer, x[b, None, real].clone(), rows.clone()):
                    found = weights.float().cpu()[sheet.heads(path, len(weights))]
                    sheet.add(found, pos[some.cpu()], pos, int(pos.max()) + 1)

        return hook


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_at: Span,
    k_at: Span,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Span, Span, Tensor | None, Tensor | None]:
    """The arguments of Attend, by name or not."""
    return q, k, q_at, k_at, bias, sinks


def _mixer_call(x: Tensor, at: Span, state: Any = None) -> tuple[Tensor, Span, Any]:
    """The arguments of a mixer."""
    return x, at, state


def entropies(
    model: nn.Module, call: Callable[[], object], batch: int, rows: tuple[int, int] | None = None
) -> dict[str, float]:
    """``entropy.PATH``: the mean entropy of each attention of a model during one call, nats; {} where it has none.

    batch: rows of the batch, from the first one. rows: positions of queries.
    """
    watches = [Watch(model, Pick(rows=rows, batch=b), summaries=False) for b in range(batch)]
    with ExitStack() as stack, torch.no_grad():
        for watch in watches:
            stack.enter_context(watch)
        call()
    found: dict[str, list[float]] = {}
    for watch in watches:
        for sheet in watch.sheets.values():
            m = sheet.map()
            if m is not None:
                found.setdefault(m.name, []).extend(s.entropy for s in m.stats)
    return {f"entropy.{name}": sum(values) / len(values) for name, values in found.items()}
