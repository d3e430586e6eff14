"""Decoding on a CPU: milliseconds a token, ours beside the peers, in five tables.

    python bench/decode.py [--rounds 7] [--threads N] [--only 1 2 3 4 5] [--tiny]
    python bench/decode.py --profile          where the time of the second table's float32 model goes

1. The article's encoder-decoder: d 512, 6 + 6 layers, ff 2048, V 8000, source 20, 50 tokens, batch 1, float32.
2. A decoder of Llama's shape, 134 M parameters: d 768, 12 layers, ff 2048, V 32000; 64 tokens after 16; fp32 and bf16.
3. The same model on batches of 1, 8 and 32 prompts of unequal lengths.
4. How the time of a token grows with the context, with a float32 and an int8 cache.
5. What large pages give (brickformer/pages.py) to whoever asks for them.

Every engine has a process of its own (bench/engines.py) with equally many threads; they take turns, one job each.
Weights are random, every answer has its full length. The floor is the bytes of weights that one token needs over the
bandwidth of a long read, measured here too. llama.cpp runs where LLAMA_CPP_PYTHON names an interpreter that has
llama-cpp-python and gguf.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from common import keep, median, table, take_turns
from engines import SMALL, Wish, built, matrices, ours

warnings.filterwarnings("ignore")
ENGINES = Path(__file__).with_name("engines.py")
PAUSE = 0.2
"""Seconds before each job: threads that wait busily after a job have gone to sleep by then."""


class Engine:
    """One engine in its process, ready to go; `missing` says what it lacks."""

    def __init__(self, wish: Wish) -> None:
        python = sys.executable
        if wish.engine.startswith("llama.cpp"):
            python = os.environ.get("LLAMA_CPP_PYTHON", "")
        self.missing, self.said = "", {}
        self.process: subprocess.Popen[str] | None = None
        if not python:
            self.missing = "llama.cpp (set LLAMA_CPP_PYTHON)"
            return
        env = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OMP_NUM_THREADS")}
        self.process = subprocess.Popen(
            [python, str(ENGINES), json.dumps(asdict(wish))],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        while (line := self._read()) != "ready":
            if line.startswith("{"):
                self.said = json.loads(line)
            elif line.startswith("missing "):
                self.missing = line.removeprefix("missing ")
                return
            elif not line:
                raise SystemExit(f"{wish.engine}: its process ended before it was ready: {wish}")

    def _read(self) -> str:
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> float:
        """Seconds of one job."""
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self._read())

    def end(self) -> None:
        """Let it go."""
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()


def measured(wishes: Mapping[str, Wish], rounds: int, missing: list[str]) -> tuple[dict[str, float], dict[str, Any]]:
    """Median milliseconds a token of each, taking turns; and what each said of itself."""
    engines = {name: Engine(wish) for name, wish in wishes.items()}
    times: dict[str, list[float]] = {name: [] for name, e in engines.items() if not e.missing}
    missing += [e.missing for e in engines.values() if e.missing]
    for _ in range(rounds):
        for name, all_times in times.items():
            time.sleep(PAUSE)
            all_times.append(1e3 * engines[name].go() / wishes[name].tokens)
    for engine in engines.values():
        engine.end()
    return {name: median(t) for name, t in times.items()}, {name: e.said for name, e in engines.items()}


def shown(times: Mapping[str, float], against: str) -> str:
    """The table, best first. against: the peer of the ratios."""
    peer = times.get(against)
    rows = [
        (name, f"{ms:.2f}", "" if peer is None else f"{ms / peer:.2f}")
        for name, ms in sorted(times.items(), key=lambda item: item[1])
    ]
    return table(("engine", "ms a token", f"÷ {against}"), rows)


def ratios(times: Mapping[str, float], pairs: list[tuple[str, str, str]]) -> str:
    """Each claim with its figure: what, ours, theirs."""
    known = [(said, a, b) for said, a, b in pairs if a in times and b in times]
    return "; ".join(f"{said}: {times[a] / times[b]:.2f}" for said, a, b in known) + "."


def both(times: Mapping[str, float], pairs: list[tuple[str, str, str]]) -> str:
    """The ratios of the packed step, and of the compiled one."""
    return " ".join(
        ratios(times, [(said.format(way), a.format(way), b.format(way)) for said, a, b in pairs])
        for way in ("packed", "compiled")
    )


def bandwidth() -> float:
    """Bytes a second of one long read: the sum of 256 MB, the best of ten."""
    x = torch.ones(64_000_000)
    return x.nbytes / min(take_turns({"sum": x.sum}, 10)["sum"])


def bytes_of(wish: Wish) -> int:
    """Bytes of the matrices that one token reads."""
    return sum(w.nbytes for w in matrices(built(wish)))


def first(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """The article's encoder-decoder."""
    wish = Wish("", "translate", args.threads, args.tiny, tokens=5 if args.tiny else 50)
    names = ["ours, no cache", "ours", "ours, packed", "bare F.linear", "transformers", "transformers, no cache",
             "ours, compiled", "CTranslate2 float32", "CTranslate2 int8"]  # fmt: skip
    wishes = {name: replace(wish, engine=name) for name in names}
    wishes["ours, packed, int8 cache"] = replace(wish, engine="ours, packed", cache="int8")
    times, _ = measured(wishes, args.rounds, missing)
    pairs = [("no cache ÷ {}", "ours, no cache", "ours, {}"),
             ("transformers without cache ÷ {}", "transformers, no cache", "ours, {}"),
             ("{} ÷ transformers", "ours, {}", "transformers"),
             ("{} ÷ CTranslate2 float32", "ours, {}", "CTranslate2 float32")]  # fmt: skip
    said = both(times, pairs)
    read = bytes_of(wish)
    about = f"{read / 1e6:.0f} MB of weights a token, floor {1e3 * read / args.bandwidth:.1f} ms"
    return [
        f"## 1. Encoder-decoder of the article, batch 1, {wish.tokens} tokens",
        f"**{said}** {about}.",
        shown(times, "transformers"),
    ]


def second(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """A decoder of Llama's shape."""
    wish = Wish("", "llama", args.threads, args.tiny, tokens=5 if args.tiny else 64)
    wishes = {}
    for short, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        names = ["ours", "ours, packed", "ours, compiled", "transformers", "bare F.linear"]
        wishes |= {f"{name} {short}": replace(wish, engine=name, dtype=dtype) for name in names}
    wishes |= {(name := f"llama.cpp {k}"): replace(wish, engine=name) for k in ("F32", "F16", "Q8_0", "Q4_0")}
    times, _ = measured(wishes, args.rounds, missing)
    pairs = [("fp32, {} ÷ transformers fp32", "ours, {} fp32", "transformers fp32"),
             ("bf16, {} ÷ transformers bf16", "ours, {} bf16", "transformers bf16"),
             ("fp32, {} ÷ llama.cpp F32", "ours, {} fp32", "llama.cpp F32")]  # fmt: skip
    said = both(times, pairs)
    read = bytes_of(wish)
    floor = f"Floor: fp32 {1e3 * read / args.bandwidth:.1f} ms, bf16 {5e2 * read / args.bandwidth:.1f} ms."
    head = f"## 2. Decoder of Llama's shape, 134 M parameters, batch 1, {wish.tokens} tokens after 16"
    return [head, f"**{said}** {floor}", shown(times, "transformers fp32")]


def third(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """Batches of ragged prompts."""
    rows = []
    for batch in (1, 8, 32):
        wish = Wish("", "llama", args.threads, args.tiny, tokens=5 if args.tiny else 32, rows=batch)
        wishes = {name: replace(wish, engine=name) for name in ("ours, packed", "transformers")}
        times, _ = measured(wishes, args.rounds, missing)
        speed = {name: 1e3 * batch / ms for name, ms in times.items()}
        peer = speed.get("transformers")
        tail = ("", "") if peer is None else (f"{peer:.1f}", f"{speed['ours, packed'] / peer:.2f}")
        rows.append((batch, f"{speed['ours, packed']:.1f}", *tail))
    made = table(("prompts of 4 to 28 tokens", "ours", "transformers", "ours ÷ transformers"), rows)
    return [f"## 3. Batches of unequal prompts: tokens a second, float32, {wish.tokens} tokens each", made]


def fourth(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """Growth with the context."""
    lengths = (8, 16) if args.tiny else (64, 256, 1024, 4096)
    wish = Wish("", "llama", args.threads, args.tiny, tokens=3 if args.tiny else 8)
    rows = []
    for n in lengths:
        wishes = {
            f"{way}, {cache}": replace(wish, engine=f"ours, {way} steps", context=n, cache=cache)
            for way in ("packed", "compiled")
            for cache in ("float", "int8")
        }
        times, said = measured(wishes, args.rounds, missing)
        kept, small = (said[f"packed, {cache}"]["cache"] for cache in ("float", "int8"))
        sizes = (f"{kept / 1e6:.1f}", f"{small / 1e6:.1f}", f"{small / kept:.3f}")
        rows.append((n, *(f"{times[name]:.2f}" for name in wishes), *sizes))
    head = ("context", *wishes, "cache MB, float32", "cache MB, int8", "÷")
    return ["## 4. Growth with the context, batch 1: ms a token, with a float32 and an int8 cache", table(head, rows)]


def fifth(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """Large pages and small ones."""
    wish = Wish("", "llama", args.threads, args.tiny, tokens=5 if args.tiny else 64)
    names = [*(f"ours, compiled{s}" for s in ("", " int8", " int4")), "ONNX Runtime", "ONNX Runtime int4"]
    both = [name + pages for name in names for pages in ("", SMALL)]
    times, _ = measured({name: replace(wish, engine=name) for name in both}, args.rounds, missing)
    rows = [
        (name, f"{times[name]:.2f}", f"{times[name + SMALL]:.2f}", f"{times[name] / times[name + SMALL]:.2f}")
        for name in names
        if name in times
    ]
    head = ("engine", "large pages", "small pages", "÷")
    return [f"## 5. Decoder of 134 M parameters, batch 1, {wish.tokens} tokens: ms a token by pages", table(head, rows)]


def profiled(args: argparse.Namespace) -> str:
    """Shares of the operations in a float32 answer, packed and not: self time, the largest first."""
    from torch.profiler import ProfilerActivity, profile

    wish, out = Wish("ours", "llama", args.threads, args.tiny, tokens=5 if args.tiny else 64), []
    for name, packed in (("as they lie", False), ("packed", True)):
        job = ours(wish, packed=packed)
        job()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            job()
        events = sorted(seen.key_averages(), key=lambda e: -e.self_cpu_time_total)
        whole = sum(e.self_cpu_time_total for e in events)
        rows = [(e.key, e.count, f"{100 * e.self_cpu_time_total / whole:.1f} %") for e in events[:12]]
        out.append(f"{name}: {whole / 1e3 / wish.tokens:.2f} ms a token\n\n"
                   f"{table(('operation', 'calls', 'share'), rows)}")  # fmt: skip
    return "\n\n".join(out)


def main() -> None:
    """Measure and keep the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    p.add_argument("--only", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    p.add_argument("--profile", action="store_true", help="shares of the operations, and nothing else")
    p.add_argument("--tiny", action="store_true", help="to see that it runs; nothing is kept")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    if args.profile:
        print(profiled(args))
        return
    args.bandwidth = bandwidth()
    missing: list[str] = []
    parts = [
        f"Batch 1 unless said, {args.threads} threads each, medians of {args.rounds} rounds; every engine in a process "
        f"of its own, all of a table take turns. One long read: {args.bandwidth / 1e9:.1f} GB/s. Packed: "
        f"`Writer(packed=True)`, as `brick generate` has it. Compiled: `brick generate --compile`, compiling "
        f"not counted. Bare: `F.linear` over the matrices, nothing else."
    ]
    for number, measure in enumerate((first, second, third, fourth, fifth), 1):
        if number in args.only:
            began = time.perf_counter()
            parts += measure(args, missing)
            print(f"table {number}: {time.perf_counter() - began:.0f} s", flush=True)
    if missing:
        parts.append("Not measured, not there: " + ", ".join(sorted(set(missing))) + ".")
    if args.tiny:
        print("\n\n".join(parts))
    else:
        part = "" if len(args.only) == 5 else "-" + "-".join(map(str, args.only))
        keep(f"decode{part}", "Decoding on a CPU", parts, "transformers", "ctranslate2")


if __name__ == "__main__":
    main()
