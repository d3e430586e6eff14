"""Decoding on a CPU: milliseconds a token, ours beside the peers, in four tables.

    python bench/decode.py [--rounds 5] [--threads N] [--only 1 2 3 4] [--compile] [--tiny]
    python bench/decode.py --profile          where the time of the second table's float32 model goes

1. The article's encoder-decoder: d 512, 6 + 6 layers, ff 2048, V 8000, source 20, 50 tokens, batch 1, float32.
2. A decoder of Llama's shape, 134 M parameters: d 768, 12 layers, ff 2048, V 32000; 64 tokens after 16; fp32 and bf16.
3. The same model on batches of 1, 8 and 32 prompts of unequal lengths.
4. How the time of a token grows with the context, with a float32 and an int8 cache.

All take turns in one process, with equally many threads; weights are random, every answer has its full length. The
floor is the bytes of weights that one token needs over the bandwidth of a long read, measured here too.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import keep, median, table, take_turns
from torch import nn

from brickformer.generate import Prefix, Stop, Writer, generate, read_prompt
from brickformer.presets import llama, vaswani

warnings.filterwarnings("ignore")
Job = Callable[[], object]
PAUSE = 0.3
"""Seconds before each job: the threads of CTranslate2 wait busily for some time when it is done."""
QUOTED = """llama.cpp, measured on another machine (2 cores, AVX2) through llama-cpp-python with a model of this shape:
f32 16.5, f16 10.1, q8_0 6.8, q4_0 5.0 ms a token. It was not part of this run, and why it
is faster was not measured: presumably kernels of its own, two cores at work through a whole token, and no dispatch."""


def bandwidth() -> float:
    """Bytes a second of one long read: the sum of 256 MB, the best of ten."""
    x = torch.ones(64_000_000)
    return x.nbytes / min(take_turns({"sum": x.sum}, 10)["sum"])


def weights_of(decoder: nn.Module) -> int:
    """Bytes of the matrices that one token reads: every linear map but the projection of the memory, done once."""
    named = [(name, m) for name, m in decoder.named_modules() if isinstance(m, nn.Linear)]
    return sum(m.weight.nbytes for name, m in named if not name.endswith("cross.kv"))


def bare(decoder: nn.Module, tokens: int) -> Job:
    """Nothing but F.linear over the same matrices."""
    maps = [m for name, m in decoder.named_modules() if isinstance(m, nn.Linear) and not name.endswith("cross.kv")]
    inputs = {m.in_features: torch.randn(1, 1, m.in_features, dtype=m.weight.dtype) for m in maps}

    @torch.inference_mode()
    def run() -> None:
        for _ in range(tokens):
            for m in maps:
                m(inputs[m.in_features])

    return run


def writing(writer: Writer, prompts: list[list[int]], tokens: int, *, use_cache: bool = True) -> Job:
    """Our own call."""
    return lambda: generate(writer, prompts, stop=Stop(max_tokens=tokens), use_cache=use_cache)


def hf(model: Any, ids: torch.Tensor, tokens: int, **more: Any) -> Job:
    """The call of transformers for exactly so many tokens."""
    exactly = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "num_beams": 1, **more}

    @torch.inference_mode()
    def run() -> object:
        return model.generate(ids, **exactly)

    return run


def hf_marian(dim: int, depth: int, heads: int, hidden: int, vocab: int) -> Any:
    """An encoder-decoder of transformers."""
    from transformers import MarianConfig, MarianMTModel

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
             (("layers", depth), ("attention_heads", heads), ("ffn_dim", hidden))}  # fmt: skip
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = MarianConfig(vocab_size=vocab, d_model=dim, max_position_embeddings=512, activation_function="relu",
                          attn_implementation="sdpa", **sides, **tokens)  # fmt: skip
    return MarianMTModel(config).eval()


def hf_llama(dim: int, depth: int, heads: int, hidden: int, vocab: int) -> Any:
    """A decoder of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=dim, num_hidden_layers=depth, num_attention_heads=heads, vocab_size=vocab,
                         num_key_value_heads=heads, intermediate_size=hidden, max_position_embeddings=8192,
                         attn_implementation="sdpa", tie_word_embeddings=False)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def ctranslate2(model: Any, vocab: int, source: list[int], tokens: int, threads: int) -> dict[str, Job]:
    """CTranslate2 on the weights of the Marian model, in float32 and int8."""
    import ctranslate2
    from ctranslate2.converters.transformers import MarianMTLoader

    names = ["<pad>", "</s>", "<unk>", *(f"t{i}" for i in range(3, vocab - 1))]
    said = [[names[min(i, vocab - 2)] for i in source]]
    limits = {"beam_size": 1, "max_decoding_length": tokens, "min_decoding_length": tokens}
    jobs: dict[str, Job] = {}
    for kind in ("float32", "int8"):
        spec = MarianMTLoader().get_model_spec(model)
        spec.register_source_vocabulary(list(names))
        spec.register_target_vocabulary(list(names))
        spec.config.add_source_eos = False
        spec.config.decoder_start_token, spec.config.eos_token = "<pad>", "</s>"
        spec.config.bos_token, spec.config.unk_token = "<s>", "<unk>"
        folder = Path(tempfile.mkdtemp())
        spec.validate()
        spec.optimize(quantization=None if kind == "float32" else kind)
        spec.save(str(folder))
        engine = ctranslate2.Translator(str(folder), "cpu", inter_threads=1, intra_threads=threads, compute_type=kind)
        jobs[f"CTranslate2 {kind}"] = partial(engine.translate_batch, said, **limits)
    return jobs


def compared(jobs: Mapping[str, Job], rounds: int, tokens: int, against: str) -> tuple[dict[str, float], str]:
    """Milliseconds a token of each job, and the table, best first. against: the peer of the ratios."""
    times = {name: 1e3 * median(t) / tokens for name, t in take_turns(jobs, rounds, pause=PAUSE).items()}
    peer = times.get(against)
    rows = [
        (name, f"{ms:.2f}", "" if peer is None else f"{ms / peer:.2f}")
        for name, ms in sorted(times.items(), key=lambda item: item[1])
    ]
    return times, table(("engine", "ms a token", f"÷ {against}"), rows)


def ratios(times: Mapping[str, float], pairs: list[tuple[str, str, str]]) -> str:
    """Each claim with its figure: what, ours, theirs."""
    known = [(said, a, b) for said, a, b in pairs if a in times and b in times]
    return "; ".join(f"{said}: {times[a] / times[b]:.2f}" for said, a, b in known) + "."


def first(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """The article's encoder-decoder."""
    dim, depth, heads, hidden, vocab, tokens = (32, 1, 2, 64, 50, 5) if args.tiny else (512, 6, 8, 2048, 8000, 50)
    source = torch.randint(3, vocab, (20,)).tolist()
    model = vaswani(vocab=vocab, dim=dim, depth=depth, heads=heads, hidden=hidden).build().eval()
    plain, packed = Writer(model, start=[0]), Writer(model, start=[0], packed=True)
    jobs: dict[str, Job] = {
        "ours, no cache": writing(plain, [source], tokens, use_cache=False),
        "ours": writing(plain, [source], tokens),
        "ours, packed": writing(packed, [source], tokens),
        "ours, packed, int8 cache": writing(Writer(model, start=[0], packed=True, cache="int8"), [source], tokens),
        "bare F.linear": bare(model.decoder, tokens),
    }
    if args.compile:
        jobs["ours, compiled"] = writing(Writer(model, start=[0], compiled=True), [source], tokens)
    try:
        marian = hf_marian(dim, depth, heads, hidden, vocab)
        ids = torch.tensor([source])
        jobs["transformers"] = hf(marian, ids, tokens)
        jobs["transformers, no cache"] = hf(marian, ids, tokens, use_cache=False)
        jobs |= ctranslate2(marian, vocab, source, tokens, args.threads)
    except ImportError as e:
        missing.append(str(e.name))
    times, made = compared(jobs, args.rounds, tokens, "transformers")
    floor = 1e3 * weights_of(model.decoder) / args.bandwidth
    said = ratios(times, [("no cache ÷ cached", "ours, no cache", "ours, packed"),
                          ("packed ÷ transformers", "ours, packed", "transformers"),
                          ("packed ÷ CTranslate2 float32", "ours, packed", "CTranslate2 float32")])  # fmt: skip
    size = f"{weights_of(model.decoder) / 1e6:.0f} MB of weights a token, floor {floor:.1f} ms"
    return [f"## 1. Encoder-decoder of the article, batch 1, {tokens} tokens", f"**{said}** {size}.", made]


def second(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """A decoder of Llama's shape."""
    dim, depth, heads, hidden, vocab, tokens = shape(args)
    prompt = torch.randint(3, vocab, (16,)).tolist()
    model = llama(vocab=vocab, dim=dim, depth=depth, heads=heads, hidden=hidden).build().eval()
    half = copy.deepcopy(model).bfloat16()
    jobs: dict[str, Job] = {}
    for name, m in (("fp32", model), ("bf16", half)):
        jobs[f"ours {name}"] = writing(Writer(m), [prompt], tokens)
        jobs[f"ours {name}, packed"] = writing(Writer(m, packed=True), [prompt], tokens)
        jobs[f"bare F.linear {name}"] = bare(m, tokens)
        if args.compile:
            jobs[f"ours {name}, compiled"] = writing(Writer(m, compiled=True), [prompt], tokens)
    try:
        theirs = hf_llama(dim, depth, heads, hidden, vocab)
        ids = torch.tensor([prompt])
        jobs["transformers fp32"] = hf(theirs, ids, tokens)
        jobs["transformers bf16"] = hf(copy.deepcopy(theirs).bfloat16(), ids, tokens)
    except ImportError as e:
        missing.append(str(e.name))
    times, made = compared(jobs, args.rounds, tokens, "transformers fp32")
    said = ratios(times, [("fp32, packed ÷ transformers fp32", "ours fp32, packed", "transformers fp32"),
                          ("bf16, packed ÷ transformers bf16", "ours bf16, packed", "transformers bf16")])  # fmt: skip
    floors = [f"{name} {1e3 * weights_of(m) / args.bandwidth:.1f} ms" for name, m in (("fp32", model), ("bf16", half))]
    count = sum(p.numel() for p in model.parameters()) / 1e6
    head = f"## 2. Decoder of Llama's shape, {count:.0f} M parameters, batch 1, {tokens} tokens after 16"
    return [head, f"**{said}** Floor: {', '.join(floors)}.", made, QUOTED]


def third(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """Batches of ragged prompts."""
    dim, depth, heads, hidden, vocab, _ = shape(args)
    tokens = 5 if args.tiny else 32
    model = llama(vocab=vocab, dim=dim, depth=depth, heads=heads, hidden=hidden).build().eval()
    writer = Writer(model, packed=True)
    try:
        theirs = hf_llama(dim, depth, heads, hidden, vocab)
    except ImportError as e:
        missing.append(str(e.name))
        theirs = None
    rows = []
    for batch in (1, 8, 32):
        lengths = [16 if batch == 1 else 4 + (i * 7) % 25 for i in range(batch)]
        prompts = [torch.randint(3, vocab, (n,)).tolist() for n in lengths]
        jobs = {"ours": writing(writer, prompts, tokens)}
        if theirs is not None:
            longest = max(lengths)
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
            real = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
            jobs["transformers"] = hf(theirs, ids, tokens, attention_mask=real)
        speed = {n: batch * tokens / median(t) for n, t in take_turns(jobs, args.rounds, pause=PAUSE).items()}
        peer = speed.get("transformers")
        tail = ("", "") if peer is None else (f"{peer:.1f}", f"{speed['ours'] / peer:.2f}")
        rows.append((batch, f"{speed['ours']:.1f}", *tail))
    made = table(("prompts of 4 to 28 tokens", "ours", "transformers", "ours ÷ transformers"), rows)
    return [f"## 3. Batches of unequal prompts: tokens a second, float32, {tokens} tokens each", made]


def fourth(args: argparse.Namespace, missing: list[str]) -> list[str]:
    """Growth with the context."""
    dim, depth, heads, hidden, vocab, _ = shape(args)
    lengths, tokens = ((8, 16), 3) if args.tiny else ((64, 256, 1024, 4096), 8)
    model = llama(vocab=vocab, dim=dim, depth=depth, heads=heads, hidden=hidden).build().eval()
    writers = {cache: Writer(model, cache=cache, packed=True) for cache in ("float", "int8")}
    prefixes: dict[tuple[str, int], Prefix] = {}
    jobs: dict[str, Job] = {}
    for length in lengths:
        prompt = torch.randint(3, vocab, (length,)).tolist()
        for cache, writer in writers.items():
            prefixes[cache, length] = prefix = read_prompt(writer, prompt, room=tokens + 1)
            jobs[f"{cache} {length}"] = continued(writer, prefix, tokens)
    times = {name: 1e3 * median(t) / tokens for name, t in take_turns(jobs, args.rounds, pause=PAUSE).items()}
    rows = [
        (
            length,
            *(f"{times[f'{cache} {length}']:.2f}" for cache in writers),
            *(f"{prefixes[cache, length].state.nbytes / 1e6:.1f}" for cache in writers),
            f"{prefixes['int8', length].state.nbytes / prefixes['float', length].state.nbytes:.3f}",
        )
        for length in lengths
    ]
    head = ("context", "ms a token, float32", "ms a token, int8", "cache MB, float32", "cache MB, int8", "÷")
    return ["## 4. Growth with the context, packed, batch 1", table(head, rows)]


def profiled(args: argparse.Namespace) -> str:
    """Shares of the operations in a float32 answer, packed and not: self time, the largest first."""
    from torch.profiler import ProfilerActivity, profile

    dim, depth, heads, hidden, vocab, tokens = shape(args)
    model = llama(vocab=vocab, dim=dim, depth=depth, heads=heads, hidden=hidden).build().eval()
    prompt = torch.randint(3, vocab, (16,)).tolist()
    out = []
    for name, writer in (("as they lie", Writer(model)), ("packed", Writer(model, packed=True))):
        job = writing(writer, [prompt], tokens)
        job()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            job()
        events = sorted(seen.key_averages(), key=lambda e: -e.self_cpu_time_total)
        whole = sum(e.self_cpu_time_total for e in events)
        rows = [(e.key, e.count, f"{100 * e.self_cpu_time_total / whole:.1f} %") for e in events[:12]]
        out.append(f"{name}: {whole / 1e3 / tokens:.2f} ms a token\n\n{table(('operation', 'calls', 'share'), rows)}")
    return "\n\n".join(out)


def continued(writer: Writer, prefix: Prefix, tokens: int) -> Job:
    """Steps after a prompt that has been read; its copy is made before and is not part of the time."""
    ids = torch.full((1, 1), 5)

    class Steps:
        def __call__(self) -> None:
            with torch.inference_mode():
                state = prefix.state
                writer.repack()
                before = state.length
                for _ in range(tokens):
                    writer.step(ids, state)
                state.rewind(before)

    return Steps()


def shape(args: argparse.Namespace) -> tuple[int, int, int, int, int, int]:
    """D, layers, heads, F, V, tokens of the decoder."""
    return (32, 2, 2, 64, 60, 5) if args.tiny else (768, 12, 12, 2048, 32_000, 64)


def main() -> None:
    """Measure and keep the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    p.add_argument("--only", type=int, nargs="*", default=[1, 2, 3, 4])
    p.add_argument("--compile", action="store_true", help="also the compiled step (minutes)")
    p.add_argument("--profile", action="store_true", help="shares of the operations, and nothing else")
    p.add_argument("--tiny", action="store_true", help="to see that it runs; nothing is kept")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.profile:
        print(profiled(args))
        return
    args.bandwidth = bandwidth()
    missing: list[str] = []
    parts = [
        f"Batch 1 unless said, {args.threads} threads each, medians of {args.rounds} rounds; all jobs of a table take "
        f"turns. One long read: {args.bandwidth / 1e9:.1f} GB/s. Packed: `Writer(packed=True)`, what `brick generate` "
        f"does by itself."
    ]
    for number, measure in enumerate((first, second, third, fourth), 1):
        if number in args.only:
            began = time.perf_counter()
            parts += measure(args, missing)
            print(f"table {number}: {time.perf_counter() - began:.0f} s", flush=True)
    if missing:
        parts.append("Not measured, not installed: " + ", ".join(sorted(set(missing))) + ".")
    if args.tiny:
        print("\n\n".join(parts))
    else:
        part = "" if len(args.only) == 4 else "-" + "-".join(map(str, args.only))
        keep(f"decode{part}", "Decoding on a CPU", parts, "transformers", "ctranslate2")


if __name__ == "__main__":
    main()
