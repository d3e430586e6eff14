"""The way out, from the command that trains to what the transformers library then says; and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from hf.cases import quiet, shake

import brickformer
from brickformer import hf
from brickformer.cli import main
from brickformer.errors import DataError, RunError, SpecError
from brickformer.generate import Sampling, Stop
from brickformer.hf.fit import FamilyError, nearest
from brickformer.hf.tokenizer import plain_tokenizer
from brickformer.layers import Layer
from brickformer.mask import Mask
from brickformer.mixers.mamba import Mamba
from brickformer.mixers.mamba2 import Mamba2
from brickformer.models import Decoder, DecoderModel
from brickformer.norms import OffsetRMSNorm, RMSNorm
from brickformer.presets import bert, gpt2, llama, vaswani
from brickformer.recipes import Trained
from brickformer.recipes.standard import STANDARD
from brickformer.tasks import CharTokenizer, WordTokenizer

pytestmark = pytest.mark.unchecked

BOOK = "The cat sat on the mat; the dog, who saw it, ran.\nNobody knew why.\n" * 50
PROMPT = "The dog"
WRITES = Stop(max_tokens=24)


def small(name: str, **options: Any) -> Any:
    """A spec of a family, small enough to be written in a moment."""
    return {"llama": llama, "gpt2": gpt2}[name](vocab=13, dim=16, depth=2, heads=4, hidden=24, **options)


def shaken(spec: Any) -> Any:
    torch.manual_seed(0)
    model = spec.build().eval()
    shake(model, 1.2)
    return model


@torch.no_grad()
def there(folder: Path, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Logits of a folder by transformers; every weight found, none left over."""
    with quiet():
        model, info = t.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=dtype or "auto")
    assert not any(info.values()), info
    out: torch.Tensor = model.eval()(input_ids=ids).logits
    return out


# ---- what was trained here says the same there ----------------------------------------------------------------------


def train(recipe: str, folder: Path, *more: str) -> Path:
    (folder / "book.txt").write_text(BOOK)
    (folder / "pairs.tsv").write_text("".join(f"{a}{b}\t{b}{a}!\n" for a in "abcdefg" for b in "abcdefg"))
    data = {
        "text": ["--data", str(folder / "book.txt"), "--set", "train.batch=2"],
        "pairs": ["--data", str(folder / "pairs.tsv"), "--set", "answers=2", "--set", "train.batch=4"],
        "reverse": "--set task.train=20 --set task.valid=4 --set train.batch=4".split(),
    }
    assert main(["train", recipe, *data[recipe], "--steps", "8", "--out", str(folder / "runs"), *more]) == 0
    return next((folder / "runs").iterdir())


@pytest.mark.parametrize("model", STANDARD["text"])
def test_a_text_model_says_the_same_there(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained by `brick train text`, exported to both formats: the same ids, the same greedy text."""
    run = train("text", tmp_path, "--model", model)
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "out")]) == 0
    assert ": 0 read back, " in capsys.readouterr().out
    ours = Trained.open(run).generate([PROMPT], Sampling(), WRITES).results[0]
    theirs, tokenizer = (
        t.AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        t.AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    ids = tokenizer(PROMPT, return_tensors="pt")
    with quiet():
        said = theirs.generate(**ids, max_new_tokens=WRITES.max_tokens, do_sample=False)[0]
    assert tokenizer.decode(said) == PROMPT + (ours.text or "") and len(ours.tokens) == WRITES.max_tokens
    assert theirs.config.max_position_embeddings == 256, "as many tokens as it learnt from"
    assert len({p.stat().st_mode for p in (tmp_path / "out").iterdir()}) == 1, "a file is for its owner alone"

    assert main(["export", str(run), "--to", "gguf", str(tmp_path / "out.gguf"), "--dtype", "f32"]) == 0
    assert ": 0 read back" in capsys.readouterr().out
    assert main(["export", str(run), "--to", "gguf", str(tmp_path / "small.gguf"), "--dtype", "q4_0"]) == 0
    assert "of q4_0; largest" in capsys.readouterr().out, "a matrix stayed in half: widths are no blocks of 32"
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with quiet():
        told = load_gguf_checkpoint(str(tmp_path / "out.gguf"), return_tensors=True, model_to_load=theirs)
    again = t.AutoModelForCausalLM.from_config(theirs.config).eval()
    missing, unexpected = again.load_state_dict(told["tensors"], strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    with quiet():
        assert again.generate(**ids, max_new_tokens=24, do_sample=False)[0].tolist() == said.tolist()


@pytest.mark.parametrize(("recipe", "source"), [("pairs", "ab"), ("reverse", "7 1 4")])
def test_a_model_of_pairs_answers_the_same_there(recipe: str, source: str, tmp_path: Path) -> None:
    """Its special ids are those of its tokenizer; a second vocabulary has its own folder, and comes back."""
    run = Trained.open(train(recipe, tmp_path, "--model", "marian"))
    brickformer.save(run, tmp_path / "out")
    assert (tmp_path / "out" / "target").is_dir() == (recipe == "pairs")
    theirs = t.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    made = theirs.generation_config
    assert (made.bos_token_id, made.eos_token_id, made.pad_token_id, made.decoder_start_token_id) == (1, 2, 0, 1)
    reads = t.AutoTokenizer.from_pretrained(tmp_path / "out")
    writes = t.AutoTokenizer.from_pretrained(tmp_path / "out" / "target") if recipe == "pairs" else reads
    ids = reads(source, return_tensors="pt")
    with quiet():
        said = theirs.generate(**ids, max_new_tokens=6, do_sample=False, num_beams=1)[0]
    result = run.generate([source], Sampling(), Stop(max_tokens=6)).results[0]
    assert said[1:].tolist() == result.tokens
    assert writes.decode(said, skip_special_tokens=True) == result.text
    assert brickformer.load(tmp_path / "out").answer([source]) == run.answer([source])


def test_its_own_model_is_refused_with_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first brick that is in the way, the nearest spec, and what to type; the same for both formats."""
    run = train("text", tmp_path)
    capsys.readouterr()
    for form in ("hf", "gguf"):
        assert main(["export", str(run), "--to", form, str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        told, why = said.splitlines()
        assert told.endswith(f"One that fits: brick train text --data {tmp_path / 'book.txt'} --model llama")
        assert why.startswith("layers.0.mixer: got ShortConv(") and "nearest is llama, with Attention(" in why
        assert told.startswith("brick: ") and len(why) < 320
    assert not (tmp_path / "out").exists()
    assert main(["train", "text", "--data", str(tmp_path / "book.txt"), "--model", "lama"]) == 2
    assert "did you mean 'llama'?" in capsys.readouterr().err


# ---- which family ---------------------------------------------------------------------------------------------------


def test_the_nearest_family_is_of_the_same_bricks() -> None:
    """Not the one that happens to differ in the fewest fields; what it says fits."""
    for spec, name in ((vaswani(vocab=13), "marian"), (small("llama").but(**{"layers.*.mixer": Mamba()}), "mamba")):
        near = nearest(spec)
        assert near.family.model_type == name and near.apart
        assert hf.fit(near.spec).family.model_type == name
    with pytest.raises(SpecError, match="'lama', expected a known one; did you mean 'llama'"):
        hf.fit(small("llama"), "lama")
    with pytest.raises(FamilyError, match="bert is not a model of this kind"):
        hf.fit(small("llama"), "bert")
    with pytest.raises(FamilyError, match=r"mixer\.bias: got False, which no gpt2 has there"):
        hf.fit(small("gpt2").but(**{"layers.*.mixer.bias": False}), "gpt2")


def test_the_presets_that_are_published_models_are_these(tmp_path: Path) -> None:
    """By their names alone; the Transformer of 2017 is nobody's, and the error says what is in the way."""
    sizes: dict[str, Any] = {"vocab": 13, "dim": 16, "depth": 2, "heads": 4}
    for make in (gpt2, llama, bert):
        assert hf.fit(make(**sizes)).family.model_type == make.__name__
    saved = hf.save(shaken(bert(**sizes, max_len=20)), tmp_path / "out")  # transformers reads it too
    assert saved.family.model_type == "bert" and saved.check.theirs is not None
    with pytest.raises(FamilyError, match=r"encoder\.layers\.0\.mixer\.bias: got False.*nearest is marian, with True"):
        hf.fit(vaswani(**sizes))


def test_a_model_without_segments_is_none_that_has_them() -> None:
    """A table of segments is no number that could be left out: only the family without one fits."""
    sizes = {"vocab_size": 13, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}
    spec = hf.FAMILIES["distilbert"].spec({"architectures": ["DistilBertForMaskedLM"], **sizes})
    for flip in ({}, {"vocab": 14}, {"embed.position.max_len": 16}):
        assert hf.fit(spec.but(**flip)).family.model_type == "distilbert"
    with pytest.raises(FamilyError, match=r"embed\.segments: got 0, which no bert has there"):
        hf.fit(spec, "bert")


FLIPS: dict[str, dict[str, Any]] = {
    "kernels": {"layers.*.mixer.backend": "reference"},
    "a window past what is usually compared": {"layers.*.mixer.mask": Mask(window=40)},
    "biases that differ": {"layers.*.mixer.bias": True, "layers.*.mixer.out_bias": False},
    "one key head": {"layers.*.mixer.kv_heads": 1, "layers.*.mixer.position.theta": 100.0},
    "wide heads": {"layers.*.mixer.head_dim": 6, "head.tied": True},
    "no window where there may be": {
        "layers.*.norm": OffsetRMSNorm(),
        "layers.*.place": "peri",
        "layers.*.ffn.activation": "gelu_tanh",
        "embed.scaled": True,
    },
}


@pytest.mark.parametrize("name", FLIPS)
@torch.no_grad()
def test_flips_that_fit_compute_the_same(name: str, tmp_path: Path) -> None:
    """Past every window, by their usual kernels."""
    model = shaken(small("llama").but(**FLIPS[name]))
    hf.save(model, tmp_path / "out")
    ids = torch.randint(13, (2, 60), generator=torch.Generator().manual_seed(5))
    assert float((there(tmp_path / "out", ids) - model(ids)).abs().max()) <= 2e-5


def test_what_their_library_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Before it is written, with the field that is in the way; what only their check finds is one line."""
    odd = small("llama").but(dim=17, **{"layers.*.mixer.head_dim": 4})
    assert hf.fit(odd).family.model_type == "mistral", "no check of theirs there"
    with pytest.raises(FamilyError, match="dim: got 17, which no llama has there. The nearest is llama, with 16"):
        hf.fit(odd, "llama")
    config = hf.fit(small("llama")).config | {"hidden_size": 17}
    with pytest.raises(SpecError, match="hidden_size: got 17, expected a multiple of num_attention_heads=4"):
        hf.FAMILIES["llama"].spec(config)
    with pytest.raises(RunError, match=r"transformers does not read it: .*max_position_embeddings.*expected int"):
        hf.save(shaken(small("llama")), tmp_path / "out", extra={"max_position_embeddings": "x"})
    assert not list(tmp_path.iterdir())
    for mixer, field, got in ((Mamba(inner=40), "inner", 40), (Mamba2(heads=5, head_dim=8), "heads", 5)):
        with pytest.raises(FamilyError, match=rf"layers\.0\.mixer\.{field}: got {got}, which no {mixer.kind} has"):
            hf.fit(Decoder(13, 16, (Layer(mixer, norm=RMSNorm(1e-5)),)), mixer.kind)


AT_ONCE: dict[str, tuple[str, dict[str, Any], str]] = {
    "a table for every layer": (
        "t5",
        {"encoder.layers.*.mixer.position.shared": False},
        r"encoder\.layers\.0\.mixer\.position\.shared: got False, .*nearest is t5, with True",
    ),
    "a table for one": (
        "t5",
        {"encoder.layers.1.mixer.position.shared": False},
        r"encoder\.layers\.1\.mixer\.position\.shared: got False",
    ),
    "a scale that is no root": ("gemma2", {"layers.*.mixer.scale": 1.25}, r"mixer\.scale: got 1\.25, .*, with 1\.0"),
    "half a head": ("gemma2", {"dim": 17}, r"dim: got 17, .*nearest is gemma2, with 16"),
    "nothing but padding": ("roberta", {"vocab": 1}, "position"),
}


@pytest.mark.parametrize("what", AT_ONCE)
def test_what_cannot_be_written_is_said_at_once(what: str) -> None:
    """Not when it is written: by the brick, and with a spec that would fit."""
    from hf.test_fields import BASE, written

    family, flip, says = AT_ONCE[what]
    spec = hf.FAMILIES[family].spec(written(BASE[family]))
    assert hf.fit(spec).family.model_type == family
    with pytest.raises(FamilyError, match=says):
        hf.fit(spec.but(**flip))
    assert not nearest(nearest(spec.but(**flip)).spec).apart


# ---- what was written is compared -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_that_are_off_there_are_refused(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another rotary base, which only their library is told: small enough to pass for rounding of half types."""
    module = import_module("brickformer.hf.verify")
    honest = module._asked

    def misled(folder: Path, *more: Any) -> Any:
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = config["rope_theta"] = 8000.0
        (folder / "config.json").write_text(json.dumps(config))
        return honest(folder, *more)

    model: DecoderModel = shaken(small("llama")).to(dtype)
    hf.save(model, tmp_path / "good")
    assert hf.load(tmp_path / "good").model.embed.tokens.weight.dtype == dtype  # type: ignore[union-attr]
    monkeypatch.setattr(module, "_asked", misled)
    with pytest.raises(RunError, match="transformers reads logits that are off by"):
        hf.save(model, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["good"]


def test_what_is_there_stays(tmp_path: Path) -> None:
    """A file, a link to nowhere, what a killed export left beside."""
    model = shaken(small("llama"))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(RunError, match="is there already"):
            hf.save(model, tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine" and (tmp_path / "link").is_symlink()
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part" / "model.safetensors").write_text("half")
    hf.save(model, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "out"]


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Each of the packages that write says it in its own way; a limit of the size of a file stands for the disk."""
    code = """
import resource
from brickformer import hf
from brickformer.cli import main
from brickformer.presets import llama
hf.save(llama(vocab=13, dim=64, depth=1, heads=4, hidden=900).build().eval(), "in")
main(["import", "in", "--name", "run"])
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
run = "runs/run-001"
for form, words in {
    "hf": ["export", run, "--to", "hf", "out/hf"],
    "gguf": ["export", run, "--to", "gguf", "out/gguf", "--no-tokenizer"],
    "onnx": ["export", run, "--to", "onnx", "out/onnx"],
    "import": ["import", "in", "--out", "out/runs"],
}.items():
    assert main(words) == 2
"""
    (tmp_path / "out/runs").mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("brick:")]
    assert done.returncode == 0 and len(said) == 4, done.stderr
    assert all("cannot be written: " in line for line in said)
    assert all("too large" in line or "the disk is full" in line for line in said)
    assert [str(p.relative_to(tmp_path)) for p in (tmp_path / "out").rglob("*")] == ["out/runs"]


# ---- tokenizers -----------------------------------------------------------------------------------------------------

TEXTS = ["e\u0301 é \U0001f600 a\x00b\r\n\ttab  two ", "<pad>", "<bos> <|eos|>"]


@pytest.mark.parametrize("specials", [False, True])
@pytest.mark.parametrize("words", [False, True])
def test_tokenizers_are_theirs(words: bool, specials: bool, tmp_path: Path) -> None:
    """Every text of known tokens has the same ids and comes back; one with an unknown token is no other's."""
    kind = WordTokenizer if words else CharTokenizer
    ours = kind.of(" ".join(TEXTS), specials=specials)
    for name, text in plain_tokenizer(ours.tokens, words=words, first=ours.first).files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    theirs = t.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode(text)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    with pytest.raises(DataError):
        ours.encode("ž")
    with pytest.raises(Exception, match="Missing .UNK. token"):
        theirs("ž")
    named = (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id)
    assert named == ((0, 1, 2) if specials else (None, None, None))
