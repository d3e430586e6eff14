"""How many ids a model knows: the rows of the table that is asked for the ids it was given.

A table is an nn.Embedding, a parameter that is indexed, or a one-hot vector before a product.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from brickformer.doctor.kinds import config_of
from brickformer.doctor.patient import Patient


@final
class Asked(TorchFunctionMode):
    """Watches one run. tables: (mark, rows): the number that filled the ids, and how many rows the table has."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "embedding":
            self.note(args[0], kwargs.get("weight", args[1] if len(args) > 1 else None))
        elif name == "one_hot":
            self.note(args[0], kwargs.get("num_classes", args[1] if len(args) > 1 else -1))
        elif name in ("__getitem__", "index_select") and isinstance(args[0], nn.Parameter):
            self.note(args[-1], args[0])
        return func(*args, **kwargs)

    def note(self, ids: Any, table: Any) -> None:
        """One look into a table (V, D), or of so many classes."""
        rows = table if isinstance(table, int) else len(table) if isinstance(table, Tensor) and table.ndim == 2 else 0
        if isinstance(ids, Tensor) and ids.numel() and ids.dtype in (torch.long, torch.int) and rows > 0:
            mark = ids.flatten()[0]
            self.tables.append((int(mark) if bool((ids == mark).all()) else 0, rows))


def find_vocab(p: Patient) -> None:
    """The tables that read the ids: their number of rows is the vocabulary. Errors: whatever the model raises."""
    seen: list[tuple[int, int]] = []

    def watch(module: nn.Module, args: Any) -> None:
        if isinstance(module, nn.Embedding):
            seen.append((len(asked.tables), min(module.num_embeddings, len(module.weight))))

    handles = [m.register_forward_pre_hook(watch) for m in p.model.modules() if isinstance(m, nn.Embedding)]
    mark = 1 if p.pad != 1 and p.target_pad != 1 else 2
    ids = torch.full((2, p.tokens), mark)
    src = torch.full((2, max(2, p.tokens - 1)), mark) if p.kind == "encoder_decoder" else None
    try:
        with torch.no_grad(), Asked() as asked:
            p.raw(ids, src, None, None, p.model)
    finally:
        for handle in handles:
            handle.remove()
    said = dict(seen)  # what an nn.Embedding says of itself, where its weight was exchanged
    sizes = [min(rows, said.get(i, rows)) for i, (value, rows) in enumerate(asked.tables) if value == mark]
    if sizes:
        p.vocab = sizes[0]
        p.target_vocab = p.subject.target_vocab or (sizes[1] if len(sizes) > 1 else sizes[0])
    p.counted = bool(sizes)


def settle_vocab(p: Patient) -> bool:
    """Where no table was seen: a configuration says it, or it is as many as there are features. False: nobody knows."""
    if p.width or p.counted or p.subject.vocab is not None or config_of(p.model, "vocab_size"):
        return True
    if p.shape == "pooled" or p.features < 3:
        return False
    try:
        with torch.no_grad():
            top = torch.full((2, p.tokens), p.features - 1)
            p.raw(top, None if p.kind != "encoder_decoder" else top[:, 1:], None, None, p.model)
    except Exception:
        return False
    p.vocab = p.target_vocab = p.features
    p.facts.append("as many ids as features (Subject(vocab=...) where that is wrong)")
    return True
