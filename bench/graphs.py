"""Our ONNX graphs in ONNX Runtime, as an engine of bench/engines.py: tokens chosen by our own engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from brickformer.export.engine import Reader
from brickformer.export.onnx import export_onnx
from brickformer.generate import Sampling, Stop, Writer
from brickformer.models import EncoderDecoderModel
from brickformer.recipes.onnx import Onnx, matrix_of


def job(wish: Any, model: Any, rows: list[Any]) -> Callable[[], object]:
    """Answers to all rows, `wish.tokens` long. The model has given its weights away and only names sizes."""
    made = export_onnx(model, matrix_of)
    engine = Onnx(Reader(made.graphs, made.facts(), wish.threads), "")
    more: dict[str, Any] = {"start": [0]} if isinstance(model, EncoderDecoderModel) else {}
    writer = Writer(model, **more)
    return lambda: engine.generate(writer, rows, Sampling(), Stop(max_tokens=wish.tokens))
