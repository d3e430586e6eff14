"""A trained run for ONNX Runtime: exported, its logits checked there, and used to write.

    RUN/onnx/decoder.onnx, encoder.onnx, onnx.json      whole or not there; made by `export_run`, read by `Onnx.open`

onnx.json has a sum of the graphs and of all that it says, and a digest of the model: graphs that were altered are told
from whole ones, and those of weights that have changed since from the run's own.

In full precision it writes the same tokens as we do; in 8 and 4 bits ONNX Runtime also rounds what goes into a product,
block by block, to 8 bits (accuracy level 4), which is part of the gap that is printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from brickformer.errors import BrickError, RunError, SpecError
from brickformer.export.engine import Reader
from brickformer.export.graph import Blocks
from brickformer.export.onnx import export_onnx
from brickformer.files import read_json, write_json, write_whole, writing
from brickformer.generate import Generation, Sampling, Stats, Stop, Writer
from brickformer.generate.engine import Decoding
from brickformer.generate.feed import Rows
from brickformer.generate.prefix import Prefix, digest
from brickformer.generate.rows import Plan, check_count, check_prompts, open_rows
from brickformer.generate.sampling import Uniform
from brickformer.generate.writer import smallest
from brickformer.models import AnyModel, EncoderDecoderModel
from brickformer.quant import Int4, Int8, QuantEmbedding, QuantLinear, Scheme, quantize
from brickformer.quant.codes import Coded, check_finite
from brickformer.quant.products import exactly
from brickformer.recipes.trained import Trained
from brickformer.recipes.weighted import ENTRY, is_quantized
from brickformer.surgery import places
from brickformer.train import RunFolder

FOLDER: Final = "onnx"
FORMAT: Final = 2
BLOCK: Final = 64
"""Inputs of a block where a scheme has one scale a row."""
CHECKED: Final = 32
"""Tokens of a row whose logits are compared."""
NEAR: Final = 1e-3
"""Of the largest logit, in full precision: more is another computation, not another rounding."""


NO_GRAPH: Final = (
    "cannot be written as an ONNX graph; expected int4 or int8. "
    "Export the run that it was made from: brick export RUN --to onnx --bits 4"
)


@final
@dataclass(frozen=True, slots=True)
class Gap:
    """What ONNX Runtime answers beside what we answer, over `tokens`: the largest difference of logits, the largest
    logit, and how often the most probable token is the same."""

    gap: float
    largest: float
    same: int
    tokens: int

    def __str__(self) -> str:
        """In words."""
        near = f"largest gap {self.gap:.2g} of logits up to {self.largest:.3g}"
        return f"{near}; the same best token in {self.same} of {self.tokens}"


def export_run(path: Path, scheme: Scheme | None, out: Path | None = None) -> tuple[Path, Gap]:
    """(the folder, the gap). scheme: how plain weights are rounded first, or None. out: a new folder;
    default RUN/onnx.

    Errors: BrickError: a brick or codes that a graph cannot say, a run that is quantized already and a scheme, a folder
    that is there, weights that are not finite, logits that are off in full precision. Nothing is written then.
    """
    folder = out or path / FOLDER
    if folder.exists() or folder.is_symlink():
        do = "Name a new folder." if out is not None else "Remove it first, or name a folder of its own."
        raise RunError(f"{folder}: is there already. {do}")
    coded = is_quantized(RunFolder.open(path))
    if scheme is not None and coded:
        raise RunError(f"{path}: is quantized already, and is exported with the bits it has. Leave --bits out.")
    trained = Trained.open(path, device=torch.device("cpu"))
    for name, tensor in trained.model.named_parameters():
        check_finite(tensor.detach(), name)
    made_of = digest(trained.model)
    if scheme is not None:
        quantize(trained.model, scheme)
    weights = kinds(trained.model)
    made = export_onnx(trained.model, matrix_of)
    reader = Reader(made.graphs, made.facts(), torch.get_num_threads())
    gap = compare(trained.model, reader)
    if scheme is None and not coded and not gap.gap <= NEAR * max(1.0, gap.largest):
        raise RunError(f"{path}: ONNX Runtime answers something else: {gap}. Please report this.")
    part = folder.with_name(f".{folder.name}.part")
    with writing(folder):
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            for name, graph in made.graphs.items():
                write_whole(part / f"{name}.onnx", graph)
            sizes = {name: len(graph) for name, graph in made.graphs.items()}
            facts = {"format": FORMAT, "graphs": sizes, "weights": weights, "model": made_of, **made.facts()}
            write_json(part / "onnx.json", {**facts, "sum": checksum(facts, made.graphs)})
            os.replace(part, folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return folder, gap


def matrix_of(module: nn.Module) -> Tensor | Blocks:
    """The weights of a linear map or a token table. Errors: SpecError for codes that a graph has not."""
    match module:
        case QuantLinear():
            return blocks(module.coded, module.divide)
        case QuantEmbedding():
            return module.coded.weight()  # ONNX looks rows up in plain tables
        case _:
            weight = module.weight
            assert isinstance(weight, Tensor)
            return weight.detach()


def checksum(facts: Mapping[str, Any], graphs: Mapping[str, bytes]) -> str:
    """Of all that is in a folder, but for the sum itself."""
    said = {name: value for name, value in facts.items() if name != "sum"}
    seen = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name in sorted(graphs):
        seen.update(graphs[name])
    return seen.hexdigest()


def kinds(model: nn.Module) -> str:
    """In which codes the matrices of a graph are."""
    found = [p.module.scheme.kind for p in places(model, QuantLinear) if isinstance(p.module, QuantLinear)]
    return " and ".join(sorted(set(found))) or "float32"


def blocks(coded: Coded, divide: Tensor | None) -> Blocks:
    """Codes as MatMulNBits reads them."""
    outputs, groups = len(coded.codes), coded.scales.shape[1]
    d = None if divide is None else divide.float().numpy()
    match coded.scheme:
        case Int4(group=group):
            codes = coded.codes.view(outputs, groups, group // 2).numpy()
            zeros = None if coded.zeros is None else coded.zeros.numpy()
            scales = coded.scales.float().numpy()
            return Blocks(4, group, coded.inputs, outputs, codes, scales, zeros, d)
        case Int8():
            count = -(-coded.inputs // BLOCK)
            shifted = np.full((outputs, count * BLOCK), 128, np.uint8)
            shifted[:, : coded.inputs] = (coded.codes.numpy().astype(np.int16) + 128).astype(np.uint8)
            scales = np.repeat(coded.scales.float().numpy(), count, axis=1)
            return Blocks(8, BLOCK, coded.inputs, outputs, shifted.reshape(outputs, count, BLOCK), scales, None, d)
        case other:
            raise SpecError(f"export: {other.kind} {NO_GRAPH}")


@exactly()
@torch.inference_mode()
def compare(model: AnyModel, reader: Reader) -> Gap:
    """A drawn row token by token, and once more as a prompt, against the exact product of the same codes."""
    drawn = torch.Generator().manual_seed(0)

    def row(vocab: int, most: int) -> Tensor:
        return torch.randint(vocab, (1, min(CHECKED, most)), generator=drawn)

    read: list[int] | None = None
    match model:
        case EncoderDecoderModel():
            source = row(model.encoder.spec.vocab, reader.max_source)
            ids = row(model.decoder.spec.vocab, reader.max_len)
            ours, read = model(source, ids)[0], source[0].tolist()
        case _:
            ids = row(model.spec.vocab, reader.max_len)
            ours = model(ids)[0]
    tokens: list[int] = ids[0].tolist()
    reader.begin(read, room=len(tokens))
    theirs = torch.cat([reader.feed([token]).clone() for token in tokens])
    reader.begin(read, room=len(tokens))
    gaps = torch.cat([theirs, reader.feed(tokens)]) - torch.cat([ours, ours[-1:]])
    same = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    return Gap(float(gaps.abs().max()), float(ours.abs().max()), same, len(ours))


@final
class Onnx:
    """A run as exported, ready to write."""

    def __init__(self, reader: Reader, weights: str) -> None:
        self.reader, self.weights = reader, weights

    @classmethod
    def open(cls, path: Path, model: AnyModel) -> Onnx:
        """The graphs in RUN/onnx. model: of the run, as it is now.

        Errors: RunError: not exported, cut off, altered, of other weights; BrickError: no ONNX Runtime.
        """
        folder = path / FOLDER
        file = folder / "onnx.json"
        if not file.is_file():
            coded = RunFolder(path).spec().get(ENTRY, {}).get("modules", {})
            if any(said.get("kind") == "nf4" for said in coded.values()):
                raise RunError(f"{path}: nf4 {NO_GRAPH}")
            raise RunError(f"{path}: has not been exported. Run: brick export {path} --to onnx")
        facts, again = read_json(file), f"Export it again, with {folder} removed."
        graphs = {}
        try:
            if facts.get("format") != FORMAT:
                raise RunError(f"{file}: in format {facts.get('format')!r}; this version reads {FORMAT}. {again}")
            for name, size in facts["graphs"].items():
                graphs[name] = (folder / f"{name}.onnx").read_bytes()
                if len(graphs[name]) != size:
                    raise RunError(f"{folder / name}.onnx: broken: {len(graphs[name])} bytes, expected {size}. {again}")
            if checksum(facts, graphs) != facts["sum"]:
                raise RunError(f"{folder}: altered: it is not what was exported. {again}")
            if digest(model) != facts["model"]:
                raise RunError(f"{folder}: was exported before the weights of {path} changed. {again}")
            return cls(Reader(graphs, facts, torch.get_num_threads()), facts["weights"])
        except OSError as e:
            raise RunError(f"{e.filename}: cannot be read: {e.strerror}. {again}") from None
        except (KeyError, TypeError, AttributeError):
            raise RunError(f"{file}: broken: it does not say what the graphs take. {again}") from None

    def generate(
        self, writer: Writer, texts: Sequence[str], sampling: Sampling, stop: Stop, *, samples: int = 1
    ) -> Generation:
        """Answers, one row after another. writer: reads and writes text. A text that cannot be read has its error.

        Errors: BrickError for settings that fit no text.
        """
        check_prompts(texts)
        check_count("generate", "samples", samples)
        plan, stats = Plan.of(writer, sampling, stop), Stats()
        plan = replace(plan, limit=smallest(plan.limit, self.reader.max_len))
        results = []
        for i, text in enumerate(texts):
            for n in range(samples):
                (row,) = open_rows(writer, plan, i, text, [Uniform(sampling.seed, n)], None)
                row.result.sample = n
                if not row.done:
                    run = Decoding([row], OnnxFeed(writer, stats, self.reader))
                    run.start()
                    while run.lanes:
                        run.step()
                results.append(row.result)
        return Generation(results, stats)


@final
class OnnxFeed:
    """Feeds one row to ONNX Runtime: what `Feed` is for a model of ours."""

    use_cache = True
    full = False
    compile_s = 0.0

    def __init__(self, writer: Writer, stats: Stats, reader: Reader) -> None:
        self.writer, self.stats, self.reader = writer, stats, reader

    def begin(self, rows: Rows, sources: Rows | None, more: int) -> Tensor:
        """Read a whole row."""
        self.reader.begin(None if sources is None else sources[0], room=min(len(rows[0]) + more, self.reader.max_len))
        logits = self.reader.feed(rows[0])
        self.stats.cache_bytes = max(self.stats.cache_bytes, self.reader.nbytes)
        return logits

    def begin_at(self, prefix: Prefix, rest: Rows) -> Tensor:
        """Errors: BrickError: states of ours are no caches of ONNX Runtime."""
        raise BrickError("--engine onnx: cannot go on from a kept prompt. Leave one of them out.")

    def next(self, ids: Tensor, rows: Callable[[], tuple[Rows, Rows | None]], more: int) -> Tensor:
        """One more token."""
        return self.reader.feed(ids[0].tolist())

    def select(self, rows: Tensor) -> None:
        """There is one row."""


def described(folder: Path) -> str:
    """What is in an exported folder, in a line."""
    facts = read_json(folder / "onnx.json")
    return f"weights in {facts['weights']}; " + ", ".join(
        f"{name}.onnx {size:,} bytes" for name, size in facts["graphs"].items()
    )
