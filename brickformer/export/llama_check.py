"""What llama.cpp answers from a file, where its Python package `llama-cpp-python` is installed."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brickformer.errors import RunError


def installed() -> bool:
    """Whether it can be asked."""
    return importlib.util.find_spec("llama_cpp") is not None


def logits_there(path: Path, ids: Tensor) -> Tensor:
    """(T,) ids -> (T, V) logits, by llama.cpp with a cache in float32, on the CPU. Errors: RunError: not read."""
    llama_cpp: Any = importlib.import_module("llama_cpp")
    try:
        model: Any = llama_cpp.Llama(
            str(path),
            n_ctx=max(32, len(ids)),
            n_batch=max(32, len(ids)),
            n_gpu_layers=0,
            logits_all=True,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            verbose=False,
        )
    except ValueError as e:
        raise RunError(f"{path}: llama.cpp does not read it: {e} Please report this.") from None
    try:
        model.eval(ids.tolist())
        return torch.tensor(model.scores[: len(ids)]).float()
    finally:
        model.close()
