"""Weights in 8 and 4 bits: what was asked for and what is measured, in four parts.

    LLAMA_CPP_PYTHON=python-with-llama_cpp python bench/quant.py [--only size speed quality memory] [--rounds 7]
                                                                 [--threads N] [--runs FOLDER] [--tiny]

size     bytes on the disk of the coded matrices of both models, scales included, and of whole weight files
speed    milliseconds a token at batch 1, every engine in a process of its own (bench/engines.py), all taking turns:
         the article's encoder-decoder (50 tokens after a source of 20), a decoder of Llama's shape with 134 M
         parameters (64 tokens after 16); random weights, answers of full length
quality  loss on real weights (bench/quant_quality.py); --runs: where its trained runs are kept
memory   peak of resident memory of a process that opens the 134 M decoder, codes it and saves it

Each part is a section of bench/results/quant.md and can be measured alone: the others stay as they are.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from common import RESULTS, machine, table
from decode import measured
from engines import Wish, built
from quant_quality import quality
from torch import Tensor

from brickformer.files import write_tensors, write_whole
from brickformer.quant import NF4, Calibration, Int4, Int8, Scheme, quantize
from brickformer.recipes import Run, Trained
from brickformer.recipes.published import imported
from brickformer.tasks import Imported, WordTokenizer

warnings.filterwarnings("ignore")
PAGE = RESULTS / "quant.md"
MODELS = {"translate": "encoder-decoder of the article", "llama": "decoder of 134 M parameters"}
SCHEMES: dict[str, Scheme] = {"int8": Int8(), "int4": Int4(), "int4, zero points": Int4(symmetric=False), "nf4": NF4()}
Goal = tuple[str, str, float, float]
"""What, how it is said, the most it may be, what it is."""


def judged(goals: Sequence[Goal], digits: int = 2) -> str:
    """Every goal, what was measured, whether it is met."""
    rows = [
        (what, said, f"{got:.{digits}f}", "met" if got <= most else "**missed**") for what, said, most, got in goals
    ]
    return table(("goal", "at most", "measured", ""), rows)


def size(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """Bytes, as they lie in files."""
    rows, goals = [], []
    for model, about in MODELS.items():
        whole = file_size(built(Wish("", model, tiny=args.tiny)).state_dict())
        for name, scheme in SCHEMES.items():
            made = built(Wish("", model, tiny=args.tiny))
            before = sum(m.before for m in quantize(made, scheme))
            tensors = made.state_dict()
            codes = {n: t for n, t in tensors.items() if n.rsplit(".")[-1] in ("codes", "scales", "zeros")}
            small, after = file_size(codes), file_size(tensors)
            part = f"{after:,} ({after / whole:.3f})"
            rows.append((about, name, f"{before:,}", f"{small:,}", f"{small / before:.4f}", part))
            most = {"int8": 0.27, "int4": 0.16}.get(name)
            if most is not None:
                goals.append((f"{name}, {about}", f"{most} × float32", most, small / before))
    head = (
        "model",
        "scheme",
        "coded matrices in float32",
        "file of their codes and scales",
        "÷",
        "file of the model (÷)",
    )
    note = "All linear maps are coded, the map to logits too; tables of tokens are not (they are with `--table`)."
    return [judged(goals, 4), table(head, rows), note]


def file_size(tensors: dict[str, Tensor]) -> int:
    """Bytes of a safetensors file, as a run folder holds it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        write_tensors(file, tensors, {})
        return file.stat().st_size


def speed(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """Milliseconds a token."""
    ours = ["ours", "ours, packed", "ours, int8", "ours, int4", *(f"ours, compiled{s}" for s in ("", " int8", " int4"))]
    graphs = ["ONNX Runtime", *(f"ONNX Runtime {s}" for s in ("int8", "int4", "int4 in groups of 64"))]
    peers = {
        "translate": ["CTranslate2 float32", "CTranslate2 int8"],
        "llama": ["llama.cpp F32", "llama.cpp Q8_0", "llama.cpp Q4_0"],
    }
    goals: list[Goal] = []
    tables = []
    for model, about in MODELS.items():
        tokens = 5 if args.tiny else {"translate": 50, "llama": 64}[model]
        wish = Wish("", model, args.threads, args.tiny, tokens)
        wishes = {name: replace(wish, engine=name) for name in (*ours, *graphs, *peers[model])}
        times, _ = measured(wishes, args.rounds, missing)
        full = times["ours"]
        rows = [(n, f"{t:.2f}", f"{full / t:.2f}") for n, t in sorted(times.items(), key=lambda item: item[1])]
        tables.append(f"The {about}:\n\n" + table(("engine", "ms a token", "times as fast as ours in float32"), rows))
        for name in ("ours, int8", "ours, int4", "ours, compiled int8", "ours, compiled int4"):
            goals.append((f"{name} ÷ ours in float32, {about}", "0.40 (2.5 times as fast)", 0.4, times[name] / full))
        for peer, most in (("llama.cpp Q4_0", 1.1), ("CTranslate2 int8", 0.5)):
            for graph in ("ONNX Runtime int4", "ONNX Runtime int4 in groups of 64") if peer in times else ():
                goals.append((f"{graph} ÷ {peer}, {about}", f"{most}", most, times[graph] / times[peer]))
    note = (
        f"{args.threads} threads each, medians of {args.rounds} rounds. Ours in float32 is `generate` in eager "
        "mode; packed, and in 8 and 4 bits: as `brick generate` has it. ONNX Runtime: our graphs, tokens chosen by our "
        "engine."
    )
    return [judged(goals), *tables, note]


# ---- memory ---------------------------------------------------------------------------------------------------------

JOBS: dict[str, tuple[str, Callable[[Trained, Calibration], object]]] = {
    "open in float32": ("float32", lambda t, c: read(t)),
    "int8 to nearest": ("float32", lambda t, c: quantize(t.model, Int8())),
    "int4 to nearest": ("float32", lambda t, c: quantize(t.model, Int4())),
    "int4 by GPTQ": ("float32", lambda t, c: quantize(t.model, Int4(), c)),
    "open in int4": ("int4", lambda t, c: read(t)),
}


def read(trained: Trained) -> None:
    """Touch every byte of the weights: a file that is mapped takes memory when it is read."""
    for tensor in trained.model.state_dict().values():
        tensor.view(torch.uint8).max()


def resident(name: str) -> int:
    """VmRSS or VmHWM (its peak) of this process, in bytes."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "the system does not say: Linux does"
    return 1024 * int(found[1])


def peak(what: str, folder: Path) -> None:
    """In a process of its own: the peak above what the code takes, on standard output."""
    place, job = JOBS[what]
    ids = torch.randint(0, 60, (2, 64), generator=torch.Generator().manual_seed(0))

    def once(folder: Path) -> None:
        trained = Trained.open(folder / place, device=torch.device("cpu"))
        job(trained, Calibration([lambda m: m(ids)] * 2))
        if what.startswith("int"):
            write_tensors(folder / "coded.safetensors", trained.model.state_dict(), {})

    once(folder / "tiny")  # code counts where it is used: once
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    once(folder)
    print(resident("VmHWM") - before)


def make_runs(folder: Path, tiny: bool) -> None:
    """The decoder as two run folders, and the bytes of it and of one layer on standard output."""
    from brickformer.quant import entry
    from brickformer.train import RunFolder

    model = built(Wish("", "llama", tiny=tiny))
    run = Run(task=Imported("bench"), model=model.spec, name="x")
    words = WordTokenizer(map(str, range(model.spec.vocab)), specials=False)
    trained = Trained(run, model, None, words)
    made = imported(trained, folder)
    whole, layer = (sum(p.nbytes for p in m.parameters()) for m in (model, model.stack.layers[0]))
    quantize(model, Int4())
    spec = {**made.spec(), "quantized": entry(model)}
    small = RunFolder.create(folder, "y", spec=spec, run=made.run(), tokenizer=made.tokenizer())
    small.save_weights(model.state_dict(), 0)
    made.path.rename(folder / "float32")
    small.path.rename(folder / "int4")
    print(whole, layer)


def memory(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """Peak memory."""
    rows, goals = [], []
    with tempfile.TemporaryDirectory() as folder:

        def child(what: str) -> list[int]:
            command = [sys.executable, __file__, "--peak", what, "--folder", folder, *["--tiny"] * args.tiny]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            return [int(word) for word in said.split()]

        *_, whole, layer = child("make")
        for what in JOBS:
            (most,) = child(what)
            rows.append((what, f"{most / 1e6:.0f}"))
            goals.append((what, "1.00 × (model + one layer)", 1.0, most / (whole + layer)))
    note = (
        f"The decoder of 134 M parameters, {whole / 1e6:.0f} MB in float32, a layer {layer / 1e6:.0f} MB. Peak of "
        "resident memory above what a process has that did the same with a tiny model before. A run is opened, coded "
        "and saved, by GPTQ with two readings of 2 × 64 tokens, whose activations are part of the peak."
    )
    return [judged(goals), table(("what", "peak, MB"), rows), note]


# ---- the page -------------------------------------------------------------------------------------------------------

PARTS: dict[str, tuple[str, Callable[[argparse.Namespace, list[str]], list[str]]]] = {
    "size": ("Size on the disk", size),
    "speed": ("Speed at batch 1", speed),
    "quality": ("What it costs on real weights", quality),
    "memory": ("Peak memory", memory),
}


def keep(found: dict[str, str]) -> None:
    """The page with new sections in the place of old ones, written whole or not at all."""
    old = PAGE.read_text("utf-8") if PAGE.is_file() else ""
    kept = {text.split("\n")[0]: text.strip() for text in re.split(r"^## ", old, flags=re.MULTILINE)[1:]}
    sections = {title: found.get(name) or kept.get(title) for name, (title, _) in PARTS.items()}
    text = "\n\n".join(["# Weights in 8 and 4 bits", *(f"## {s}" for s in sections.values() if s)]) + "\n"
    RESULTS.mkdir(exist_ok=True)
    write_whole(PAGE, text.encode())


def main() -> None:
    """Measure and keep the page."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS), metavar="PART")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    p.add_argument("--steps", type=int, default=1000, help="of tinyshakespeare")
    p.add_argument("--runs", type=Path, help="where trained runs are looked for, and kept; default: thrown away")
    p.add_argument("--tiny", action="store_true", help="to see that it runs; nothing is kept")
    p.add_argument("--peak", help=argparse.SUPPRESS)
    p.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.peak:
        if args.peak == "make":
            make_runs(args.folder / "tiny", tiny=True)
            make_runs(args.folder, args.tiny)
        else:
            peak(args.peak, args.folder)
        return
    command = "python " + " ".join([str(Path(sys.argv[0])), *sys.argv[1:]])
    found = {}
    for name in args.only:
        title, measure = PARTS[name]
        began, missing = time.perf_counter(), []
        parts = [title, *measure(args, missing)]
        if missing:
            parts.append("Not measured, not there: " + ", ".join(sorted(set(missing))) + ".")
        about = machine("onnxruntime", "ctranslate2")
        parts.append(f"Rebuilt by `{command}` in {time.perf_counter() - began:.0f} s. {about}.")
        found[name] = "\n\n".join(parts)
        print(f"## {found[name]}\n", flush=True)
        if not args.tiny:
            keep(found)


if __name__ == "__main__":
    main()
