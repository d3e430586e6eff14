"""The doctor on public, hand-written Transformers that you have fetched: every known bug found, no control accused.

    python bench/corpus.py FOLDER      FOLDER/OWNER+NAME or FOLDER/NAME, one checkout each, at the commits below

The code of these repositories is imported from there and is no part of this one. What is missing is said and left out.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from brickformer.doctor import Subject, diagnose
from brickformer.errors import BrickError

STUBBED = {
    "pandas",
    "altair",
    "torchtext",
    "spacy",
    "GPUtil",
    "tiktoken",
    "tqdm",
    "tensorboard",
    "matplotlib",
    "datasets",
}


class _Anything:
    """Whatever is asked of it, it gives itself."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


class _Stub(types.ModuleType):
    """A library that only the scripts around a model need."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stubs for those that are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in STUBBED or name == "torch.utils.tensorboard":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def load(folder: Path, name: str) -> Any:
    """A module of a checkout; nothing of another checkout is left."""
    for known in [n for n, m in sys.modules.items() if getattr(m, "__corpus__", False)]:
        del sys.modules[known]
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        for new in set(sys.modules) - before:
            file = getattr(sys.modules[new], "__file__", None) or ""
            if file.startswith(str(folder)):
                sys.modules[new].__corpus__ = True  # type: ignore[attr-defined]


def classes(path: Path, **names: Any) -> Any:
    """A script that trains when it is imported: its imports and classes alone."""
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef)]
    module = types.ModuleType(path.stem)
    vars(module).update(names)
    exec(compile(tree, str(path), "exec"), vars(module))
    return module


def hyunwoongko(folder: Path) -> Subject:
    make = load(folder, "models.model.transformer").Transformer
    model = make(1, 1, 2, 37, 43, 32, 4, 32, 64, 2, 0.1, "cpu")

    for m in model.modules():  # as its training script does
        if getattr(m, "weight", None) is not None and m.weight.dim() > 1:
            nn.init.kaiming_uniform_(m.weight.data)

    def loss(m: Any, src: Any, trg: Any) -> Any:
        return F.cross_entropy(m(src, trg[:, :-1]).flatten(0, 1), trg[:, 1:].flatten(), ignore_index=1)

    return Subject(model, loss=loss)


def jadore(folder: Path, sharing: bool) -> Subject:
    make = load(folder, "transformer.Models").Transformer
    sizes = dict(d_word_vec=32, d_model=32, d_inner=64, n_layers=2, n_head=4, d_k=8, d_v=8, n_position=40)
    vocab = (37, 43) if sharing else (41, 41)
    return Subject(make(*vocab, src_pad_idx=0, trg_pad_idx=0, **sizes))


def jadore_translator(folder: Path) -> Subject:
    subject = jadore(folder, False)
    sys.path.insert(0, str(folder))
    translate = importlib.import_module("transformer.Translator")
    sys.path.remove(str(folder))

    def decode(model: Any, src: Any, new: int) -> Any:
        own = translate.Translator(model, 2, 12, 0, 0, 2, 3)
        mask = translate.get_pad_mask(src, 0)
        memory, *_ = model.encoder(src, mask)
        trg, said = torch.full((len(src), 1), 2), []
        for _ in range(new):
            said.append(own._model_decode(trg, memory, mask)[:, -1])
            trg = torch.cat([trg, said[-1].argmax(-1, keepdim=True)], 1)
        return trg, torch.stack(said, 1)

    subject.decode = decode
    return subject


def lynn(folder: Path) -> nn.Module:
    return load(folder, "Models").Transformer(37, 43, 32, 2, 4, 0.1)


def annotated(folder: Path) -> nn.Module:
    return load(folder, "the_annotated_transformer").make_model(37, 43, N=2, d_model=32, d_ff=64, h=4)


def mingpt(folder: Path) -> nn.Module:
    gpt = load(folder, "mingpt.model").GPT
    config = gpt.get_default_config()
    config.model_type, config.vocab_size, config.block_size = None, 41, 16
    config.n_layer, config.n_head, config.n_embd = 2, 4, 32
    return gpt(config)


def nanogpt(folder: Path) -> nn.Module:
    module = load(folder, "model")
    return module.GPT(module.GPTConfig(block_size=16, vocab_size=41, n_layer=2, n_head=4, n_embd=32))


def lecture(folder: Path) -> nn.Module:
    sizes = dict(vocab_size=41, n_embd=32, n_head=4, n_layer=2, block_size=16, dropout=0.1, device="cpu")
    return classes(folder / "gpt.py", **sizes).GPTLanguageModel()


SMALL = dict(vocab_size=41, context_length=16, emb_dim=32, n_heads=4, n_layers=2, drop_rate=0.1, qkv_bias=False)


def rasbt(folder: Path) -> nn.Module:
    return load(folder / "ch04/01_main-chapter-code", "gpt").GPTModel(SMALL)


def rasbt_cache(folder: Path) -> Subject:
    module = load(folder / "ch04/03_kv-cache", "gpt_with_kv_cache")

    def decode(model: Any, ids: Any, new: int) -> Any:
        found = module.generate_text_simple_cached(model, ids, new)
        model.reset_kv_cache()
        return found

    return Subject(module.GPTModel(SMALL), decode=decode)


def former_g(folder: Path) -> nn.Module:
    return load(folder, "former").GTransformer(32, 4, 2, 16, 41)


def former_c(folder: Path) -> Subject:
    return Subject(load(folder, "former").CTransformer(32, 4, 2, 16, 41, 5), pad=0)


def jsbaan(folder: Path) -> Subject:
    module, future = load(folder, "transformer"), None
    future = sys.modules["decoder"].construct_future_mask

    def call(m: Any, src: Any, tgt: Any, valid: Any) -> Any:
        memory = m.encoder(src, src_padding_mask=valid)
        return m.decoder(tgt, memory, src_padding_mask=valid, future_mask=future(tgt.shape[1]))

    model = module.Transformer(32, 64, 4, 2, 16, 41, 0, 1, 0.1, True)
    return Subject(model, kind="encoder_decoder", vocab=41, call=call)


def maxjcohen(folder: Path) -> nn.Module:
    return load(folder, "tst").Transformer(5, 32, 3, 8, 8, 4, 2, dropout=0.1, chunk_mode=None, pe="original")


def diffposetalk(folder: Path) -> nn.Module:
    return _Tagger(load(folder, "models.common").PositionalEncoding(32, 0.1))


class _Tagger(nn.Module):
    """An encoder around somebody's positions."""

    def __init__(self, positions: nn.Module) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(41, 32), positions
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 41)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(self.positions(self.embed(x))))


def linformer(folder: Path) -> Subject:
    make = load(folder, "linformer_pytorch.linformer_pytorch").LinformerLM
    return Subject(make(41, 16, 32, dim_k=8, dim_ff=64, causal=True), kind="decoder", max_len=16)


@dataclass(frozen=True)
class Entry:
    """A model of a repository. bugs: probes that must speak, each alone or in "also"; none: a control."""

    repository: str
    commit: str
    what: str
    make: Callable[[Path], Any]
    bugs: tuple[str, ...] = ()


CORPUS = (
    Entry("hyunwoongko/transformer", "6328654", "", hyunwoongko, ("causality", "registration", "initial weights")),
    Entry(
        "jadore801120/attention-is-all-you-need-pytorch",
        "132907d",
        "two vocabularies",
        lambda f: jadore(f, True),
        ("initial weights",),
    ),
    Entry("jadore801120/attention-is-all-you-need-pytorch", "132907d", "Translator", jadore_translator, ("cached",)),
    Entry("SamLynnEvans/Transformer", "49e0180", "", lynn, ("positions",)),
    Entry("harvardnlp/annotated-transformer", "debc9fd", "", annotated),
    Entry("karpathy/minGPT", "37baab7", "", mingpt, ("copies",)),
    Entry("karpathy/nanoGPT", "3adf61e", "", nanogpt),
    Entry("karpathy/ng-video-lecture", "5220142", "", lecture),
    Entry("rasbt/LLMs-from-scratch", "28c65cd", "gpt.py", rasbt),
    Entry("rasbt/LLMs-from-scratch", "28c65cd", "with a cache", rasbt_cache),
    Entry("pbloem/former", "ad9cc70", "GTransformer", former_g),
    Entry("pbloem/former", "ad9cc70", "CTransformer", former_c, ("padding",)),
    Entry("jsbaan/transformer-from-scratch", "d4841b2", "", jsbaan, ("heads", "tying")),
    Entry("maxjcohen/transformer", "41adca1", "", maxjcohen, ("scale", "aliasing")),
    Entry("DiffPoseTalk/DiffPoseTalk", "2c761f1", "positions", diffposetalk, ("positions",)),
    Entry("tatp22/linformer-pytorch", "3ecfc0e", "causal", linformer, ("causality",)),
)


def place(root: Path, repository: str) -> Path | None:
    """Where a checkout lies."""
    names = (repository.replace("/", "+"), repository, repository.split("/")[1])
    return next((root / n for n in names if (root / n).is_dir()), None)


def main() -> int:
    """A table on standard output; 1 when a bug was missed or a control accused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="repositories whose name holds this word")
    parser.add_argument("--verbose", action="store_true", help="whole reports on standard error")
    args = parser.parse_args()
    sys.meta_path.insert(0, _Stubs())
    print("| repository | commit | known | said |\n| -- | -- | -- | -- |", flush=True)
    bad = 0
    for entry in CORPUS:
        if args.only not in f"{entry.repository} {entry.what}":
            continue
        folder = place(args.folder, entry.repository)
        if folder is None:
            print(f"{entry.repository}: not fetched", file=sys.stderr)
            continue
        torch.manual_seed(0)
        try:
            report = diagnose(entry.make(folder.resolve()))
        except (BrickError, Exception) as error:
            bad += 1
            print(_row(entry, f"could not be asked: {type(error).__name__}: {str(error).splitlines()[0][:120]}"))
            continue
        if args.verbose:
            print(report, json.dumps([f.to_dict() for f in report.findings], indent=1), file=sys.stderr)
        spoke = {*report.probes, *(also.split(":")[0] for f in report.wrong for also in f.also)}
        missed = [b for b in entry.bugs if b not in spoke]
        wrong = bool(missed) or (not entry.bugs and not report.ok)
        bad += wrong
        said = "; ".join(f"{f.probe}" + (f" at {f.where}" if f.where else "") for f in report.wrong) or "nothing wrong"
        print(_row(entry, said + (f" (MISSED: {', '.join(missed)})" if missed else "")), flush=True)
    return 1 if bad else 0


def _row(entry: Entry, said: str) -> str:
    name = f"{entry.repository}{f' ({entry.what})' if entry.what else ''}"
    return f"| {name} | {entry.commit} | {', '.join(entry.bugs) or 'control'} | {said} |"


if __name__ == "__main__":
    sys.exit(main())
