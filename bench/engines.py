"""Engines that write, each in a process of its own: what bench/decode.py and bench/quant.py start.

    python bench/engines.py '{"engine": "ours, packed", "model": "translate", "threads": 2}'

The process builds its model, warms up, says `ready` (or what it lacks), and then answers each line on its input with
the seconds that one job took. In one process engines would disturb each other: the threads of one wait busily for some
time after its work, on cores that the next one needs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
Job = Callable[[], object]


@dataclass(frozen=True)
class Wish:
    """What to measure. model: translate (encoder-decoder) or llama. rows, context: for tables 3 and 4."""

    engine: str
    model: str
    threads: int = 1
    tiny: bool = False
    tokens: int = 50
    rows: int = 1
    context: int = 16
    dtype: str = "float32"
    cache: str = "float"


@dataclass(frozen=True)
class Size:
    """The sizes of the two models. heads and depth: of each side."""

    dim: int
    depth: int
    heads: int
    hidden: int
    vocab: int


SIZES = {"translate": Size(512, 6, 8, 2048, 8000), "llama": Size(768, 12, 12, 2048, 32_000)}
TINY = Size(32, 1, 2, 64, 60)
SOURCE = 20


def size(wish: Wish) -> Size:
    """The sizes of the model that is wished for."""
    return TINY if wish.tiny else SIZES[wish.model]


def prompts(wish: Wish) -> list[list[int]]:
    """The same random prompts for every engine: of `context` tokens, or ragged around 16 where there are several."""
    import random

    drawn, s = random.Random(0), size(wish)
    lengths = [SOURCE] if wish.model == "translate" else [wish.context]
    if wish.rows > 1:
        lengths = [4 + (i * 7) % 25 for i in range(wish.rows)]
    return [[drawn.randrange(3, s.vocab) for _ in range(n)] for n in lengths]


# ---- ours


def built(wish: Wish, scheme: str = "") -> Any:
    """Our model, random weights; in a scheme where one is named."""
    import torch

    from brickformer.presets import llama, vaswani
    from brickformer.quant import Int4, Int8, quantize

    torch.set_num_threads(wish.threads)
    torch.manual_seed(0)
    s = size(wish)
    make = vaswani if wish.model == "translate" else llama
    model = make(vocab=s.vocab, dim=s.dim, depth=s.depth, heads=s.heads, hidden=s.hidden).build().eval()
    model = model.to(getattr(torch, wish.dtype))
    if scheme:
        quantize(model, {"int8": Int8(), "int4": Int4(), "int4 in groups of 64": Int4(group=64)}[scheme])
    return model


def onnx(wish: Wish, scheme: str = "") -> Job:
    """Our graphs in ONNX Runtime (bench/graphs.py)."""
    import graphs

    return graphs.job(wish, built(wish, scheme), prompts(wish))


def ours(wish: Wish, *, packed: bool = False, compiled: bool = False, use_cache: bool = True, scheme: str = "") -> Job:
    """`generate`, as a user calls it. scheme: of the weights, int8 or int4, to nearest."""
    from brickformer.generate import Stop, Writer, generate

    start = [0] if wish.model == "translate" else None
    more: dict[str, Any] = {"start": start} if start else {}
    writer = Writer(built(wish, scheme), packed=packed, compiled=compiled, cache=wish.cache, **more)
    return lambda: generate(writer, prompts(wish), stop=Stop(max_tokens=wish.tokens), use_cache=use_cache)


def small_pages(wish: Wish, job: Callable[[Wish], Job]) -> Job:
    """The same, and no memory is put in large pages (brickformer/pages.py)."""
    from unittest import mock

    from brickformer import pages

    mock.patch.object(pages, "COLLAPSE", 0).start()  # MADV_NORMAL: as it is
    return job(wish)


def growth(wish: Wish, *, compiled: bool = False) -> Job:
    """Steps after a prompt of `context` tokens that has been read; reading it is not part of the time."""
    import torch

    from brickformer.generate import Writer, read_prompt

    writer = Writer(built(wish), cache=wish.cache, packed=not compiled, compiled=compiled)
    prefix = read_prompt(writer, prompts(wish)[0], room=wish.tokens + 1)
    ids = torch.full((1, 1), 5)
    print(json.dumps({"cache": prefix.state.nbytes}), flush=True)

    @torch.inference_mode()
    def steps() -> None:
        writer.repack()
        before = prefix.state.length
        for _ in range(wish.tokens):
            writer.step(ids, prefix.state)
        prefix.state.rewind(before)

    return steps


def products(wish: Wish) -> Job:
    """Nothing but `F.linear` over the matrices that a token reads: what torch's products alone take."""
    import torch
    import torch.nn.functional as F

    weights = matrices(built(wish))
    inputs = {n: torch.randn(1, 1, n, dtype=weights[0].dtype) for n in {w.shape[1] for w in weights}}

    @torch.inference_mode()
    def run() -> None:
        for _ in range(wish.tokens):
            for w in weights:
                F.linear(inputs[w.shape[1]], w)

    return run


def matrices(model: Any) -> list[Any]:
    """The matrices that one token reads: all linear maps of the decoder but the projection of the memory."""
    from torch import nn

    decoder = getattr(model, "decoder", model)
    return [
        m.weight for name, m in decoder.named_modules() if isinstance(m, nn.Linear) and not name.endswith("cross.kv")
    ]


# ---- the peers


def transformers(wish: Wish, *, use_cache: bool = True) -> Job:
    """Marian or Llama of transformers, through its `generate`."""
    import torch

    torch.set_num_threads(wish.threads)
    torch.manual_seed(0)
    model = (marian if wish.model == "translate" else hf_llama)(size(wish)).eval().to(getattr(torch, wish.dtype))
    rows = prompts(wish)
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in rows])
    real = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in rows])
    exactly = {"max_new_tokens": wish.tokens, "min_new_tokens": wish.tokens, "do_sample": False, "num_beams": 1}

    @torch.inference_mode()
    def run() -> object:
        return model.generate(ids, attention_mask=real, use_cache=use_cache, **exactly)

    return run


def marian(s: Size) -> Any:
    """An encoder-decoder of transformers."""
    from transformers import MarianConfig, MarianMTModel

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
             (("layers", s.depth), ("attention_heads", s.heads), ("ffn_dim", s.hidden))}  # fmt: skip
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = MarianConfig(vocab_size=s.vocab, d_model=s.dim, max_position_embeddings=512, activation_function="relu",
                          attn_implementation="sdpa", **sides, **tokens)  # fmt: skip
    return MarianMTModel(config)


def hf_llama(s: Size) -> Any:
    """A decoder of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=s.dim, num_hidden_layers=s.depth, num_attention_heads=s.heads,
                         vocab_size=s.vocab, num_key_value_heads=s.heads, intermediate_size=s.hidden,
                         max_position_embeddings=8192, attn_implementation="sdpa",
                         tie_word_embeddings=False)  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def ctranslate2(wish: Wish, kind: str) -> Job:
    """CTranslate2 on a Marian model, converted in memory."""
    import ctranslate2
    from ctranslate2.converters.transformers import MarianMTLoader

    s = size(wish)
    names = ["<pad>", "</s>", "<unk>", *(f"t{i}" for i in range(3, s.vocab - 1))]
    spec = MarianMTLoader().get_model_spec(marian(s).eval())
    spec.register_source_vocabulary(list(names))
    spec.register_target_vocabulary(list(names))
    spec.config.add_source_eos = False
    spec.config.decoder_start_token, spec.config.eos_token = "<pad>", "</s>"
    spec.config.bos_token, spec.config.unk_token = "<s>", "<unk>"
    spec.validate()
    spec.optimize(quantization=None if kind == "float32" else kind)
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        engine = ctranslate2.Translator(folder, "cpu", inter_threads=1, intra_threads=wish.threads, compute_type=kind)
    said = [[names[min(i, s.vocab - 2)] for i in prompts(wish)[0]]]
    limits = {"beam_size": 1, "max_decoding_length": wish.tokens, "min_decoding_length": wish.tokens}
    return partial(engine.translate_batch, said, **limits)


def llama_cpp(wish: Wish, kind: str) -> Job:
    """llama.cpp on a GGUF file of this shape with random weights. kind: F32, F16, Q8_0 or Q4_0."""
    import gguf
    import numpy as np
    from llama_cpp import Llama

    s, draw = size(wish), np.random.default_rng(0)
    path = Path(tempfile.mkdtemp()) / "model.gguf"
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(2048)
    out.add_embedding_length(s.dim)
    out.add_block_count(s.depth)
    out.add_feed_forward_length(s.hidden)
    out.add_head_count(s.heads)
    out.add_head_count_kv(s.heads)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_dimension_count(s.dim // s.heads)
    out.add_vocab_size(s.vocab)
    out.add_tokenizer_model("no_vocab")
    packed = gguf.GGMLQuantizationType[kind]

    def matrix(name: str, outputs: int, inputs: int) -> None:
        weight = draw.standard_normal((outputs, inputs), dtype=np.float32) * 0.02
        out.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, packed), raw_dtype=packed)

    def norm(name: str) -> None:
        out.add_tensor(f"{name}.weight", np.ones(s.dim, dtype=np.float32))

    matrix("token_embd", s.vocab, s.dim)
    matrix("output", s.vocab, s.dim)
    norm("output_norm")
    for i in range(s.depth):
        for name in ("attn_norm", "ffn_norm"):
            norm(f"blk.{i}.{name}")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{i}.{name}", s.dim, s.dim)
        for name in ("ffn_gate", "ffn_up"):
            matrix(f"blk.{i}.{name}", s.hidden, s.dim)
        matrix(f"blk.{i}.ffn_down", s.dim, s.hidden)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    engine = Llama(str(path), n_ctx=256, n_threads=wish.threads, n_threads_batch=wish.threads, verbose=False)
    ids = prompts(wish)[0]

    def run() -> None:
        engine.reset()
        engine.eval(ids)
        for i in range(wish.tokens):
            engine.eval([3 + i % (s.vocab - 3)])

    path.unlink()  # it is mapped
    return run


ENGINES: dict[str, Callable[[Wish], Job]] = {
    "ours": ours,
    "ours, packed": partial(ours, packed=True),
    "ours, compiled": partial(ours, compiled=True),
    "ours, no cache": partial(ours, use_cache=False),
    "ours, packed steps": growth,
    "ours, compiled steps": partial(growth, compiled=True),
    **{f"ours, {s}": partial(ours, packed=True, scheme=s) for s in ("int8", "int4")},
    **{f"ours, compiled {s}": partial(ours, compiled=True, scheme=s) for s in ("int8", "int4")},
    "ONNX Runtime": onnx,
    **{f"ONNX Runtime {s}": partial(onnx, scheme=s) for s in ("int8", "int4", "int4 in groups of 64")},
    "bare F.linear": products,
    "transformers": transformers,
    "transformers, no cache": partial(transformers, use_cache=False),
    "CTranslate2 float32": partial(ctranslate2, kind="float32"),
    "CTranslate2 int8": partial(ctranslate2, kind="int8"),
    **{f"llama.cpp {kind}": partial(llama_cpp, kind=kind) for kind in ("F32", "F16", "Q8_0", "Q4_0")},
}
SMALL = ", small pages"
ENGINES |= {
    name + SMALL: partial(small_pages, job=job) for name, job in ENGINES.items() if "ours" in name or "ONNX" in name
}


def main() -> None:
    """Build, warm up, and measure a job a line."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    os.environ.pop("OPENBLAS_CORETYPE", None)
    wish = Wish(**json.loads(sys.argv[1]))
    try:
        job = ENGINES[wish.engine](wish)
    except ImportError as e:
        print(f"missing {e.name}", flush=True)
        return
    job()
    gc.disable()
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        job()
        print(time.perf_counter() - began, flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
