"""The product of a linear map, torch's against oneDNN's: milliseconds by shape and rows, forward and backward.

    python bench/product.py [--threads N]

Each shape has so many copies that no cache holds them, since a decode step meets every matrix once. by columns: what
`Writer(packed=True)` does for one row (brickformer/generate/pack.py). dx: the gradient of the input.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from itertools import cycle
from unittest import mock

import torch
import torch.nn.functional as F
from common import keep, median, table, take_turns
from torch import Tensor, nn

from brickformer.generate.pack import _product
from brickformer.product import _linear
from brickformer.quant import Int4, Int8, products, quantize

READ = 120_000_000
WRITING = [(o, i, rows) for rows in (1, 8, 32)
           for o, i in ((512, 512), (2048, 512), (512, 2048), (4096, 768), (32_000, 768))]  # fmt: skip
CODED = [(o, i, rows) for rows in (8, 16, 32, 64, 128, 256)
         for o, i in ((512, 512), (768, 2048), (2304, 768), (32_000, 768))]  # fmt: skip
LEARNING = [(1152, 384), (384, 384), (2048, 384), (384, 1024)]
Job = Callable[[], Tensor]


def of_each(makes: Callable[[Tensor], Job], weights: list[Tensor]) -> Job:
    """The same job on one matrix after another."""
    jobs = cycle([makes(w) for w in weights])
    return lambda: next(jobs)()


def by_columns(x: Tensor) -> Callable[[Tensor], Job]:
    """The packed product of a matrix, as a decoder's twin has it."""

    def make(w: Tensor) -> Job:
        linear = nn.Linear(w.shape[1], w.shape[0], bias=False)
        linear.weight.data = w
        packed = _product(linear) or linear
        return lambda: packed(x)

    return make


@torch.inference_mode()
def writing(outputs: int, inputs: int, rows: int) -> tuple[str, ...]:
    """Few rows: one line of the table."""
    copies = max(1, min(40, READ // (outputs * inputs * 4)))
    weights = [torch.randn(outputs, inputs) for _ in range(copies)]
    x = torch.randn(rows, 1, inputs)
    jobs = {
        "torch": of_each(lambda w: lambda: F.linear(x, w), weights),
        "oneDNN": of_each(lambda w: lambda: _linear(x, w, None), weights),
    }
    if rows == 1:
        jobs["packed"] = of_each(by_columns(x), weights)
    return (f"{outputs} × {inputs}", str(rows), *shown(jobs, 40))


def learning(outputs: int, inputs: int) -> tuple[str, ...]:
    """2048 rows: forward and dx."""
    x, w, g = torch.randn(2048, inputs), torch.randn(outputs, inputs), torch.randn(2048, outputs)
    forward = {"torch": lambda: F.linear(x, w), "oneDNN": lambda: _linear(x, w, None)}
    back = {"torch": lambda: g @ w, "oneDNN": lambda: _linear(g, w.t(), None)}
    return (f"{outputs} × {inputs}", *shown(forward, 30), *shown(back, 30))


@torch.inference_mode()
def coded(outputs: int, inputs: int, rows: int) -> tuple[str, ...]:
    """Weights in 8 and 4 bits: torch's kernel, and the matrix made anew and multiplied."""
    x, times = torch.randn(rows, inputs), []
    for scheme in (Int8(), Int4()):
        model = nn.Sequential(nn.Linear(inputs, outputs, bias=False)).eval()
        quantize(model, scheme)
        jobs = {name: partial(with_kernels, most, model, x) for name, most in (("kernel", rows), ("made", 0))}
        kernel, made = (median(t) for t in take_turns(jobs, 9, warm=2).values())
        times += [f"{1e3 * kernel:.2f}", f"{1e3 * made:.2f}", f"{kernel / made:.2f}"]
    return (f"{outputs} × {inputs}", str(rows), *times)


def with_kernels(most: int, model: nn.Module, x: Tensor) -> object:
    """Kernels up to so many rows."""
    with mock.patch.dict(products.FEW, cpu=most):
        return model(x)


def shown(jobs: dict[str, Job], rounds: int) -> list[str]:
    """Medians, and a dash for what is not there."""
    times = {name: f"{1e3 * median(t):.2f}" for name, t in take_turns(jobs, rounds, warm=3).items()}
    return list(times.values())


def main() -> None:
    """Measure and keep the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    torch.set_num_threads(p.parse_args().threads)
    few = [row if len(row) == 5 else (*row, "") for row in (writing(*shape) for shape in WRITING)]
    keep(
        "product",
        "The product of a linear map",
        [
            f"Milliseconds, float32, {torch.get_num_threads()} threads, medians; outputs × inputs.",
            "## Few rows: writing",
            table(("matrix", "rows", "F.linear", "oneDNN", "packed"), few),
            "## Coded weights: torch's kernel, and the matrix made and multiplied",
            table(
                ("matrix", "rows", "int8, kernel", "made", "÷", "int4, kernel", "made", "÷"), [coded(*s) for s in CODED]
            ),
            "## 2048 rows: learning",
            table(("matrix", "F.linear", "oneDNN", "dx, torch", "dx, oneDNN"), [learning(*s) for s in LEARNING]),
        ],
    )


if __name__ == "__main__":
    main()
