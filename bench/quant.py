"""Weights in 8 and 4 bits: bytes, milliseconds a token beside the peers, what they cost in quality, peak memory.

    LLAMA_PYTHON=python-with-llama_cpp python bench/quant.py [--rounds 5] [--threads N] [--only 1 2 3 4] [--tiny]

1. Bytes of the coded matrices of the article's encoder-decoder, in a file.
2. Milliseconds a token at batch 1: that model (50 tokens after a source of 20) and a decoder of Llama's shape with
   134 M parameters (64 tokens after 16). Random weights, full-length answers; all engines of a table take turns.
3. Loss on real weights: a published model of 656 k parameters, on text that it wrote itself (temperature 1, so the
   difference is the divergence from it), and tinyshakespeare, on its held-out part, after `--steps` steps.
4. Peak memory of a process that loads the 134 M decoder and quantizes it.

Needs transformers and ctranslate2 for one peer, gguf and an interpreter with llama_cpp for the other; what is missing
is said.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import DATA, keep, median, table, take_turns
from decode import ctranslate2, hf_llama, hf_marian, writing
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from brickformer.export.engine import Reader
from brickformer.export.onnx import export_onnx
from brickformer.generate import Sampling, Stop, Writer, generate
from brickformer.models import AnyModel
from brickformer.presets import llama, vaswani
from brickformer.quant import NF4, Calibration, Int4, Int8, Scheme, quantize
from brickformer.recipes.onnx import Onnx, matrix_of
from brickformer.recipes.quantized import Plan, quantize_run

warnings.filterwarnings("ignore")
Job = Callable[[], object]
PAUSE = 0.3
SCHEMES: dict[str, Scheme] = {"int8": Int8(), "int4": Int4(), "int4, zero points": Int4(symmetric=False), "nf4": NF4()}


def coded(model: AnyModel, scheme: Scheme) -> AnyModel:
    """A quantized copy."""
    made = copy.deepcopy(model)
    quantize(made, scheme)
    return made


def first(args: argparse.Namespace) -> list[str]:
    """Bytes, as they lie in a file."""
    model = vaswani(vocab=8000, dim=64 if args.tiny else 512).build()
    rows = []
    for name, scheme in SCHEMES.items():
        made = copy.deepcopy(model)
        before = sum(m.before for m in quantize(made, scheme))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "coded.safetensors"
            small = {
                n: t.clone() for n, t in made.state_dict().items() if n.split(".")[-1] in ("codes", "scales", "zeros")
            }
            save_file(small, file)
            rows.append((name, f"{before:,}", f"{file.stat().st_size:,}", f"{file.stat().st_size / before:.4f}"))
    head = ("scheme", "bytes in float32", "bytes of the file of codes, scales and zero points", "÷")
    return ["## 1. Bytes of the coded matrices", table(head, rows)]


def onnx(model: AnyModel, prompt: list[int], tokens: int, threads: int, **more: Any) -> Job:
    """Our graphs in ONNX Runtime, tokens chosen by our engine."""
    made = export_onnx(model, matrix_of)
    engine, writer = Onnx(Reader(made.graphs, made.facts(), threads)), Writer(model, **more)
    return lambda: engine.generate(writer, [prompt], Sampling(), Stop(max_tokens=tokens))  # type: ignore[list-item]


def engines(model: AnyModel, prompt: list[int], tokens: int, threads: int, **more: Any) -> dict[str, Job]:
    """Ours, all of them."""
    jobs = {
        "ours float32": writing(Writer(model, **more), [prompt], tokens),
        "ours float32, packed": writing(Writer(model, packed=True, **more), [prompt], tokens),
    }
    for name in ("int8", "int4"):
        small = coded(model, SCHEMES[name])
        jobs[f"ours {name}"] = writing(Writer(small, packed=True, **more), [prompt], tokens)
        jobs[f"ONNX Runtime {name}"] = onnx(small, prompt, tokens, threads, **more)
    return jobs


def second(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """Milliseconds a token."""
    out = ["## 2. Milliseconds a token, batch 1"]
    dim, depth, heads, hidden, vocab, tokens = (32, 1, 2, 64, 50, 5) if args.tiny else (512, 6, 8, 2048, 8000, 50)
    source = torch.randint(3, vocab, (20,)).tolist()
    model = vaswani(vocab=vocab, dim=dim, depth=depth, heads=heads, hidden=hidden).build().eval()
    jobs = engines(model, source, tokens, args.threads, start=[0])
    try:
        marian = hf_marian(dim, depth, heads, hidden, vocab)
        jobs |= {n: j for n, j in ctranslate2(marian, vocab, source, tokens, args.threads).items() if "int8" in n}
    except ImportError as e:
        missing.append(str(e.name))
    out += compared("Encoder-decoder of the article", jobs, args.rounds, tokens)
    shape = (32, 2, 2, 64, 60) if args.tiny else (768, 12, 12, 2048, 32_000)
    tokens = 5 if args.tiny else 64
    dim, depth, heads, hidden, vocab = shape
    prompt = torch.randint(3, vocab, (16,)).tolist()
    decoder = llama(vocab=vocab, dim=dim, depth=depth, heads=heads, hidden=hidden).build().eval()
    jobs = engines(decoder, prompt, tokens, args.threads)
    peers: list[Llama] = []
    try:
        theirs = hf_llama(dim, depth, heads, hidden, vocab)
        peers = [Llama(theirs, shape, kind, prompt, tokens, args.threads) for kind in ("Q4_0", "Q8_0")]
        del theirs
        jobs |= {f"llama.cpp {p.kind.lower()}": p for p in peers}
    except (ImportError, OSError) as e:
        missing.append(f"llama.cpp ({e})")
    try:
        out += compared("Decoder of Llama's shape, 134 M parameters", jobs, args.rounds, tokens)
    finally:
        for p in peers:
            p.close()
    return out


def compared(title: str, jobs: Mapping[str, Job], rounds: int, tokens: int) -> list[str]:
    """The table of one model, and the ratios that are claimed."""
    times = {name: 1e3 * median(t) / tokens for name, t in take_turns(jobs, rounds, pause=PAUSE).items()}
    full, packed = times["ours float32"], times["ours float32, packed"]
    rows = [
        (n, f"{t:.2f}", f"{full / t:.2f}", f"{packed / t:.2f}") for n, t in sorted(times.items(), key=lambda x: x[1])
    ]
    said = [
        f"{ours} ÷ {peer}: {times[ours] / times[peer]:.2f}"
        for ours in ("ONNX Runtime int4", "ours int4", "ours int8")
        for peer in ("CTranslate2 int8", "llama.cpp q4_0")
        if peer in times
    ]
    head = ("engine", "ms a token", "times faster than ours in float32", "than ours, packed")
    return [f"### {title}", table(head, rows), "; ".join(said) + "." if said else ""]


LLAMA_LOOP = """
import sys, time
from llama_cpp import Llama
path, threads, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
prompt = [int(t) for t in sys.argv[4].split(",")]
model = Llama(path, n_ctx=256, n_threads=threads, n_threads_batch=threads, verbose=False, logits_all=False)
print("ready", flush=True)
for _ in sys.stdin:
    model.reset(); model.eval(prompt)
    for i in range(tokens):
        model.eval([3 + i % 50])
    print("done", flush=True)
"""


class Llama:
    """llama.cpp in a process of its own, on the same shape in its own file format."""

    def __init__(
        self, model: nn.Module, shape: tuple[int, ...], kind: str, prompt: list[int], tokens: int, threads: int
    ) -> None:
        self.kind, self.folder = kind, tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "model.gguf"
        write_gguf(model, shape, kind, path)
        python = os.environ.get("LLAMA_PYTHON")
        if not python:
            raise OSError("LLAMA_PYTHON is not set")
        command = [python, "-c", LLAMA_LOOP, str(path), str(threads), str(tokens), ",".join(map(str, prompt))]
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, **quiet)
        if self._line() != "ready":
            raise OSError("llama_cpp cannot be imported there")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __call__(self) -> None:
        """One answer."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        if self._line() != "done":
            raise OSError("llama.cpp has stopped")

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


def write_gguf(model: nn.Module, shape: tuple[int, ...], kind: str, path: Path) -> None:
    """The weights of a Llama of transformers, matrices in `kind`, the rest in float32."""
    import gguf

    dim, depth, heads, hidden, vocab = shape
    to = gguf.GGMLQuantizationType[kind]
    file = gguf.GGUFWriter(str(path), "llama")
    file.add_context_length(2048)
    file.add_embedding_length(dim)
    file.add_block_count(depth)
    file.add_feed_forward_length(hidden)
    file.add_head_count(heads)
    file.add_head_count_kv(heads)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_dimension_count(dim // heads)
    file.add_vocab_size(vocab)
    file.add_tokenizer_model("no_vocab")
    weights = {name: t.float().numpy() for name, t in model.state_dict().items()}
    names = {"embed_tokens": "token_embd", "norm": "output_norm"}
    parts = {
        **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
        **{f"self_attn.{a}_proj": f"attn_{b}" for a, b in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))},
        **{f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")},
    }
    pairs = {f"model.{a}.weight": f"{b}.weight" for a, b in names.items()} | {"lm_head.weight": "output.weight"}
    for i in range(depth):
        pairs |= {f"model.layers.{i}.{a}.weight": f"blk.{i}.{b}.weight" for a, b in parts.items()}
    for ours, theirs in pairs.items():
        if weights[ours].ndim == 1:
            file.add_tensor(theirs, weights[ours])
        else:
            file.add_tensor(theirs, gguf.quants.quantize(weights[ours], to), raw_dtype=to)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def published(folder: Path) -> nn.Module:
    """A checkpoint of Llama's family, as ours."""
    said, found = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    spec = llama(
        vocab=said["vocab_size"], dim=said["hidden_size"], depth=said["num_hidden_layers"], tied=True,
        heads=said["num_attention_heads"], kv_heads=said["num_key_value_heads"], hidden=said["intermediate_size"],
        eps=said["rms_norm_eps"],
    )  # fmt: skip
    ours: dict[str, Tensor] = {"stack.norm.weight": found["model.norm.weight"]}
    ours |= {name: found["lm_head.weight"] for name in ("embed.tokens.weight", "head.project.weight")}
    for i in range(said["num_hidden_layers"]):
        theirs, mine = f"model.layers.{i}.", f"stack.layers.{i}."
        ours[mine + "mixer.qkv.weight"] = torch.cat([found[f"{theirs}self_attn.{x}_proj.weight"] for x in "qkv"])
        ours[mine + "ffn.gate_up.weight"] = torch.cat([found[f"{theirs}mlp.{x}_proj.weight"] for x in ("gate", "up")])
        for a, b in (
            ("mixer.out", "self_attn.o_proj"), ("ffn.out", "mlp.down_proj"),
            ("around_mixer.into", "input_layernorm"), ("around_ffn.into", "post_attention_layernorm"),
        ):  # fmt: skip
            ours[f"{mine}{a}.weight"] = found[f"{theirs}{b}.weight"]
    model = spec.build()
    model.load_state_dict(ours)
    return model.eval()


WAYS: dict[str, tuple[Scheme, str | None, str, int]] = {
    "int8, to nearest": (Int8(), None, "same", 0),
    "int4, to nearest": (Int4(), None, "same", 0),
    "int4, GPTQ": (Int4(), "gptq", "same", 0),
    "int4, AWQ": (Int4(), "awq", "same", 0),
    "int4, GPTQ, head int8": (Int4(), "gptq", "int8", 0),
    "int4, zero points, GPTQ, head int8": (Int4(symmetric=False), "gptq", "int8", 0),
    "int4, zero points, GPTQ, head int8, worst 2 kept": (Int4(symmetric=False), "gptq", "int8", 2),
    "nf4, GPTQ": (NF4(), "gptq", "same", 0),
    "nf4 in groups of 32, GPTQ, head int8": (NF4(group=32), "gptq", "int8", 0),
    "nf4 in groups of 32, GPTQ, head int8, worst 2 kept": (NF4(group=32), "gptq", "int8", 2),
}


def third(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """Loss on real weights."""
    rows: dict[str, list[str]] = {name: [name] for name in WAYS}
    folder = DATA / "tinystories-656k"
    if folder.is_dir():
        stories(published(folder), rows)
    else:
        missing.append(str(folder))
    digits: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as out:
        text = DATA / "tinyshakespeare" / "input.txt"
        steps = ["--steps", "20" if args.tiny else str(args.steps)]
        brick = [sys.executable, "-m", "brickformer", "train"]
        if text.is_file():
            subprocess.run([*brick, "text", "--data", str(text), *steps, "--out", out], check=True, capture_output=True)
            for name, (scheme, method, head, worst) in WAYS.items():
                plan = Plan(scheme, 64 if method else 0, method or "gptq", worst=worst, head=head)  # type: ignore[arg-type]
                receipt = quantize_run(Path(out) / "text-001", plan)[1]
                before, after = receipt.before["loss"], receipt.after["loss"]
                bits = f"{receipt.before['bits a byte']:.3f} → {receipt.after['bits a byte']:.3f}"
                rows[name] += [f"{after - before:+.4f}", bits]
        subprocess.run(
            [*brick, "reverse", *(steps if args.tiny else []), "--out", out], check=True, capture_output=True
        )
        for name, scheme in SCHEMES.items():
            receipt = quantize_run(Path(out) / "reverse-001", Plan(scheme))[1]
            digits.append((name, f"{100 * receipt.before['exact']:.1f} → {100 * receipt.after['exact']:.1f}"))
    head = ("way", "656 k, its own text: Δ loss", "tinyshakespeare: Δ loss", "bits a byte")
    return [
        "## 3. What it costs on real weights",
        "64 batches of 8 × 256 tokens (656 k) and of 12 × 64 characters (tinyshakespeare) to round by.",
        table(head, rows.values()),
        "Digits said backwards, exact match of 500, to nearest: " + "; ".join(f"{n}: {e} %" for n, e in digits) + ".",
    ]


@torch.no_grad()
def stories(model: nn.Module, rows: dict[str, list[str]]) -> None:
    """Δ loss on text the model wrote itself; calibration on other such text."""

    def written(count: int, seed: int) -> Tensor:
        seeds = [1000 * seed + i for i in range(count)]
        made = generate(model, [[1]] * count, Sampling(temperature=1.0), Stop(max_tokens=255), seeds=seeds, batch=64)
        return torch.tensor([[1, *r.tokens] for r in made.results])

    def loss(m: nn.Module) -> float:
        return F.cross_entropy(m(held[:, :-1]).flatten(0, 1).double(), held[:, 1:].flatten()).item()

    held, seen = written(64, 1), written(160, 2)
    before = loss(model)
    for name, (scheme, method, head, worst) in WAYS.items():
        readings = [lambda m, ids=ids: m(ids) for ids in seen.split(8)]
        calibration = Calibration(readings, method) if method else None  # type: ignore[arg-type]
        ranked = sorted(quantize(copy.deepcopy(model), scheme, calibration, head=head), key=lambda m: -m.error)  # type: ignore[arg-type]
        made = copy.deepcopy(model)
        quantize(made, scheme, calibration, keep=[m.name for m in ranked[:worst]], head=head)  # type: ignore[arg-type]
        rows[name].append(f"{loss(made) - before:+.4f}")


def peak(what: str, folder: Path) -> None:
    """In a process of its own: the peak above what imports take, in bytes, on standard output."""
    from brickformer.shapes import skeleton_of
    from brickformer.spec import read

    spec = read(type(llama()), json.loads((folder / "spec.json").read_text()), "spec")
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = skeleton_of(spec)
    tensors = load_file(folder / "weights.safetensors")
    model.load_state_dict(tensors, assign=True)
    del tensors
    ids = torch.randint(0, spec.vocab, (2, 64))
    match what:
        case "nearest":
            quantize(model, Int4())
        case "gptq":
            quantize(model, Int4(), Calibration([lambda m: m(ids)]))
        case _:
            sum(p.sum().item() for p in model.parameters())
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began))


def fourth(args: argparse.Namespace) -> list[str]:
    """Peak memory."""
    shape = {"dim": 64, "depth": 2, "heads": 2, "hidden": 96, "vocab": 500} if args.tiny else {
        "dim": 768, "depth": 12, "heads": 12, "hidden": 2048, "vocab": 32_000}  # fmt: skip
    model = llama(**shape).build()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file(model.state_dict(), folder / "weights.safetensors")
        (folder / "spec.json").write_text(model.spec.to_json())
        whole = sum(p.nbytes for p in model.parameters())
        largest = max(p.nbytes for p in model.parameters())
        rows = []
        for what in ("load", "nearest", "gptq"):
            command = [sys.executable, __file__, "--peak", what, "--folder", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            size = int(done.stdout)
            rows.append((what, f"{size / 1e6:.0f}", f"{size / (whole + largest):.2f}"))
    head = ("what", "peak above imports, MB", f"÷ (model {whole / 1e6:.0f} MB + largest layer {largest / 1e6:.0f} MB)")
    return ["## 4. Peak memory, 134 M decoder to int4", table(head, rows)]


def main() -> None:
    """Measure and keep the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    p.add_argument("--steps", type=int, default=1000, help="of tinyshakespeare")
    p.add_argument("--only", type=int, nargs="*", default=[1, 2, 3, 4])
    p.add_argument("--tiny", action="store_true", help="to see that it runs; nothing is kept")
    p.add_argument("--peak", help=argparse.SUPPRESS)
    p.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.peak:
        peak(args.peak, args.folder)
        return
    missing: list[str] = []
    parts = [f"{args.threads} threads each, medians of {args.rounds} rounds; all jobs of a table take turns."]
    measures: list[Callable[[], list[str]]] = [
        lambda: first(args), lambda: second(args, missing), lambda: third(args, missing), lambda: fourth(args)
    ]  # fmt: skip
    for number, measure in enumerate(measures, 1):
        if number in args.only:
            began = time.perf_counter()
            parts += measure()
            print(f"part {number}: {time.perf_counter() - began:.0f} s", flush=True)
    if missing:
        parts.append("Not measured, not installed: " + ", ".join(sorted(set(missing))) + ".")
    if args.tiny:
        print("\n\n".join(parts))
    else:
        suffix = "" if len(args.only) == 4 else "-" + "-".join(map(str, args.only))
        keep(f"quant{suffix}", "Weights in 8 and 4 bits", parts, "onnxruntime", "transformers", "ctranslate2")


if __name__ == "__main__":
    main()
