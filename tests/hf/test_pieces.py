"""SentencePiece models, trained here: read, written in, given back; every id as the transformers library has it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers as t
from hf.cases import quiet, shake

import brickformer
from brickformer.cli import main
from brickformer.errors import DataError
from brickformer.generate import Beam, Sampling, Stop
from brickformer.recipes import Trained
from brickformer.recipes.published import imported
from brickformer.tasks import PiecesTokenizer, Tokenizer

pytestmark = pytest.mark.unchecked

LINES = """the quick brown fox jumps over the lazy dog
Hello world, how are you today?
日本語 のテキスト です
naïve café résumé <x>
numbers 123 and 4567, done.
double  spaces\there"""
NASTY = [
    *("", " ", "   ", " a", "a ", "  the  quick  ", "the\nfox", "\n", "\n\n the", "\t", "a\tb\t\tc", "\r\n"),
    *("▁", "▁a▁", "日本語です", "中文", "😀 fox", "👩\u200d👩\u200d👧", "e\u0301 é", "ﬁ ① Ａ ½ a…b", "``q''"),
    *("ü" * 3, "\ufeff", "\u00a0x", "\u2028", "\x00", "a\x00b", "\x01\x1f\x7f", "\u200b", "<0x41>", "numbers 4567"),
    *("Hello world", "<s>", "a<s>b", " <s> a", "the </s> fox", "<unk>", "<pad>", "<bos> x", "[CLS] a [SEP]"),
    *("a [MASK] b", "<turn>a", "x <extra_id_1> y", ">>fr<< hello", ">>xx<< hello", ">> <<", ">>fr<<", " >>fr<<"),
    *("</s></s>", "the <pad>2<pad>fox"),
]


@cache
def model_of(**options: Any) -> bytes:
    """A SentencePiece model of the lines above."""
    made = BytesIO()
    lines = iter(LINES.splitlines() * 5)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=made, minloglevel=9, num_threads=1, **options
    )
    return made.getvalue()


BYTES = {"model_type": "bpe", "vocab_size": 350, "byte_fallback": True, "character_coverage": 0.98}
BYTES |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
GEMMA = {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
GEMMA |= {"bos_piece": "<bos>", "eos_piece": "<eos>", "user_defined_symbols": "<mask>,<turn>"}
UNIGRAM = {"model_type": "unigram", "vocab_size": 64}
ALBERT = {"pad_id": 0, "unk_id": 1, "eos_id": -1, "bos_id": -1}
ALBERT |= {"control_symbols": "[CLS],[SEP]", "user_defined_symbols": "[MASK]"}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
PAIRS = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
PAIRS |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 3}
PAIRS |= {"forced_eos_token_id": None}
T5 = {"vocab_size": 68, "eos_token_id": 1, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0}


@dataclass(frozen=True)
class Kind:
    """model: their class. options: of its configuration. files: SentencePiece models by name, and how they are trained.
    setup: tokenizer_config.json; None is no such file. opened: each text begins with a special token."""

    model: Any
    options: dict[str, Any]
    files: dict[str, dict[str, Any]]
    setup: dict[str, Any] | None = field(default_factory=dict)
    opened: bool = True


LLAMA = Kind(t.LlamaForCausalLM, SIZES, {"tokenizer.model": BYTES}, {"add_bos_token": True, "legacy": False})
KINDS = {
    "llama": LLAMA,
    "llama-bare": Kind(t.LlamaForCausalLM, SIZES, {"tokenizer.model": BYTES}, None, opened=False),
    "llama-unigram": Kind(t.LlamaForCausalLM, SIZES, {"tokenizer.model": UNIGRAM}, None, opened=False),
    "mistral": Kind(t.MistralForCausalLM, SIZES | {"num_key_value_heads": 2}, {"tokenizer.model": BYTES}, opened=False),
    "gemma": Kind(
        t.GemmaForCausalLM,
        SIZES | {"head_dim": 8, "num_key_value_heads": 1},
        {"tokenizer.model": BYTES | GEMMA},
        {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True},
    ),
    "albert": Kind(t.AlbertForMaskedLM, SIZES | {"embedding_size": 8}, {"spiece.model": UNIGRAM | ALBERT}),
    "t5": Kind(
        t.T5ForConditionalGeneration,
        T5,
        {"spiece.model": UNIGRAM | {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}},
        {"extra_ids": 4},
        opened=False,
    ),
    "marian": Kind(
        t.MarianMTModel,
        PAIRS,
        {"source.spm": UNIGRAM, "target.spm": UNIGRAM | {"vocab_size": 60, "byte_fallback": False}},
        {"source_lang": "en", "additional_special_tokens": ["<pad>2"]},
        opened=False,
    ),
    "marian-bytes": Kind(t.MarianMTModel, PAIRS, {"source.spm": BYTES, "target.spm": UNIGRAM}, None, opened=False),
}


@cache
def written(name: str, root: Path) -> Path:
    """The folder of such a model, with random weights, as their library and SentencePiece write it."""
    kind, folder = KINDS[name], root / name
    models = {file: model_of(**options) for file, options in kind.files.items()}
    sizes = {"vocab_size": 400, "eos_token_id": 2, "pad_token_id": 0} | kind.options
    if "source.spm" in models:  # in another order than either model has them
        words = ["<x>", "é", "</s>", "<pad>", "<unk>", ">>fr<<", "<pad>2"]
        words = list(dict.fromkeys(words + pieces(models["source.spm"])[::-1] + pieces(models["target.spm"])))
        models["vocab.json"] = json.dumps({word: i for i, word in enumerate(words)}).encode()
        sizes["vocab_size"] = len(words)
    torch.manual_seed(0)
    with quiet():
        config = kind.model.config_class(**sizes)
        model = kind.model(config)
        shake(model, 3.0)
        model.save_pretrained(folder)
    for file, data in models.items():
        (folder / file).write_bytes(data)
    if kind.setup is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(kind.setup))
    return folder


def pieces(model: bytes) -> list[str]:
    read = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [read.id_to_piece(i) for i in range(3, read.get_piece_size())]


def theirs(folder: Path) -> Any:
    with quiet():
        return t.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pieces")


def same(ours: Tokenizer, there: Any, opened: bool, *, target: bool = False) -> None:
    """Every id of every text, and every text of these ids."""
    for text in NASTY:
        ids = there(text_target=text)["input_ids"] if target else there(text)["input_ids"]
        assert ours.encode(text) == ids, repr(text)
        said = there.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids) == said or (not opened and ours.decode(ids)[1:] == said), repr(text)


@pytest.mark.parametrize("name", KINDS)
def test_every_id_is_theirs(name: str, root: Path, tmp_path: Path) -> None:
    """In a folder, in a run, and in what is exported, which has every file as it was."""
    folder, kind = written(name, root), KINDS[name]
    there = theirs(folder)
    trained = brickformer.load(folder)
    run = Trained.open(imported(trained, tmp_path / "runs").path)
    brickformer.save(run, tmp_path / "out")
    again = brickformer.load(tmp_path / "out")
    out = theirs(tmp_path / "out")
    assert run.target == trained.target == again.target and run.start == trained.start == again.start
    whole = kind.opened or trained.source is not None
    for ours in (trained, again):
        if ours.source is None:
            same(ours.target, there, whole)
        else:
            assert [ours.source.encode(text) for text in NASTY] == [there(text)["input_ids"] for text in NASTY]
            same(ours.target, there, whole, target=True)
    assert [out(text)["input_ids"] for text in NASTY] == [there(text)["input_ids"] for text in NASTY]
    assert not (tmp_path / "out/target").exists(), "both sides have the same files"
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("name", ["t5", "marian", "marian-bytes"])
def test_answers_are_theirs(name: str, root: Path) -> None:
    """They begin where the configuration says, and are whole texts: no space before them."""
    folder, text = written(name, root), "the quick brown fox"
    with quiet():
        model = KINDS[name].model.from_pretrained(folder).eval()
        there = t.AutoTokenizer.from_pretrained(folder)
        said = model.generate(**there(text, return_tensors="pt"), max_new_tokens=9, do_sample=False, num_beams=1)[0]
    trained = brickformer.load(folder)
    result = trained.generate([text], Sampling(), Stop(max_tokens=9)).results[0]
    assert [*trained.start, *result.tokens] == said.tolist()
    assert result.text == there.decode(said, skip_special_tokens=True)
    score = trained.score([f"{text}\tHello world"])[0]
    assert score.error is None and len(score.logprobs) == len(there(text_target="Hello world")["input_ids"])


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_llama_cpp_is_told_the_same_pieces(name: str, root: Path, tmp_path: Path) -> None:
    """Their kinds as SentencePiece has them, and scores in its order: what is joined first has the larger one."""
    from gguf import GGUFReader

    folder = written(name, root)
    run = imported(brickformer.load(folder), tmp_path / "runs").path
    assert main(["export", str(run), "--to", "gguf", str(tmp_path / "out.gguf"), "--dtype", "f32"]) == 0
    fields = GGUFReader(tmp_path / "out.gguf").fields
    told = {k.removeprefix("tokenizer.ggml."): field.contents() for k, field in fields.items()}
    read = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    count = read.get_piece_size()
    assert told["model"] == "llama" and told["tokens"][:count] == [read.id_to_piece(i) for i in range(count)]
    for i in range(count):
        user = "turn" in read.id_to_piece(i)  # <mask> is special there, by the name of its class
        kind = 2 if read.is_unknown(i) else 3 if read.is_control(i) else 4 if user else 6 if read.is_byte(i) else 1
        assert told["token_type"][i] == kind or read.id_to_piece(i) == "<mask>", read.id_to_piece(i)
    joined = [i for i in range(count) if len(read.id_to_piece(i)) > 1 and told["token_type"][i] == 1]
    assert len(joined) > 20
    assert sorted(joined, key=lambda i: -told["scores"][i]) == sorted(joined, key=lambda i: -read.get_score(i))
    assert told["add_space_prefix"] == (name == "llama") and told["add_bos_token"]


def test_on_the_command_line(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, runs = written("marian", root), tmp_path / "runs"
    assert main(["import", str(folder), "--out", str(runs)]) == 0
    assert "use it:  brick generate" in capsys.readouterr().out
    assert main(["generate", str(runs / "marian-001"), "the fox", "--set", "max_tokens=5"]) == 0
    assert (
        capsys.readouterr().out.strip() == brickformer.load(folder).generate(["the fox"], None, Stop(5)).results[0].text
    )
    assert main(["export", str(runs / "marian-001"), "--to", "gguf", str(tmp_path / "out.gguf")]) == 2
    assert "no decoder" in capsys.readouterr().err and not (tmp_path / "out.gguf").exists()


BROKEN = {
    "cut off": (
        "llama",
        lambda f: cut(f / "tokenizer.model"),
        r"tokenizer\.model: broken: it is no SentencePiece model",
    ),
    "empty": ("t5", lambda f: (f / "spiece.model").write_bytes(b""), r"spiece\.model: broken: it is no Sentence"),
    "a side cut off": ("marian", lambda f: cut(f / "target.spm"), r"target\.spm: broken: it is no SentencePiece"),
    "a side missing": ("marian", lambda f: (f / "target.spm").unlink(), r"target\.spm: missing"),
    "no list": ("marian", lambda f: (f / "vocab.json").unlink(), r"vocab\.json: missing beside source\.spm"),
    "no JSON": ("marian", lambda f: (f / "vocab.json").write_text("{"), r"vocab\.json: broken: it is not JSON"),
    "a list": ("marian", lambda f: (f / "vocab.json").write_text("[1]"), r"vocab\.json: broken: expected a JSON obj"),
    "words": ("marian", lambda f: listed(f, {"a": "b"}), r"vocab\.json: 'a': got 'b', expected an id"),
    "twice": ("marian", lambda f: listed(f, {"a": 0, "b": 0}), "two pieces have one id"),
    "a gap": (
        "marian",
        lambda f: listed(f, {"</s>": 0, "<unk>": 1, "<pad>": 2**31 - 1}),
        r"\d pieces, and '<pad>' has id 2147483647",
    ),
    "a large number": ("marian", lambda f: setup(f, added_tokens_decoder={"9" * 5000: "a"}), "tokens by id"),
    "no end": ("marian", lambda f: listed(f, {"<unk>": 0, "<pad>": 1}), r"vocab\.json: has no '</s>'"),
    "two lists": ("marian", lambda f: setup(f, separate_vocabs=True), "separate_vocabs: the pieces of both sides"),
    "a number": ("marian", lambda f: setup(f, eos_token=3), r"eos_token: got '3', expected a text"),
    "spaces": (
        "marian",
        lambda f: setup(f, added_tokens_decoder={"2": {"content": "</s>", "lstrip": True}}),
        "lstrip, rstrip and single_word are not read",
    ),
}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-900])


def listed(folder: Path, words: dict[str, Any]) -> None:
    (folder / "vocab.json").write_text(json.dumps(words))


def setup(folder: Path, **fields: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_one_line(what: str, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name, spoil, says = BROKEN[what]
    shutil.copytree(written(name, root), tmp_path / "model")
    spoil(tmp_path / "model")
    capfd.readouterr()
    with pytest.raises(DataError, match=says) as caught:
        brickformer.load(tmp_path / "model")
    assert "\n" not in str(caught.value) and not any(capfd.readouterr())


@pytest.mark.parametrize("package", ["transformers", "sentencepiece", "google.protobuf"])
def test_what_has_to_be_installed(package: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(
        DataError, match=rf"has tokenizer\.model and no tokenizer\.json\. Install {package.removeprefix('google.')}"
    ):
        brickformer.load(written("llama", root))
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"source\.spm: the package `sentencepiece` is not installed"):
        brickformer.load(written("marian", root))


def test_a_run_keeps_bytes_as_text(root: Path) -> None:
    """Read back equal; what is damaged is one line."""
    for ours in (brickformer.load(written("marian", root)).target, brickformer.load(written("t5", root)).target):
        data = json.loads(json.dumps(ours.to_json()))
        assert Tokenizer.from_json(data) == ours and hash(Tokenizer.from_json(data)) == hash(ours)
        for field_, value in (("bytes", {"source.spm": "*"}), ("bytes", [1]), ("files", {"a": 1}), ("ends", ["x"])):
            with pytest.raises(DataError, match=rf"tokenizer\.{field_}"):
                Tokenizer.from_json(data | {field_: value})
        with pytest.raises(DataError, match="no such field"):
            Tokenizer.from_json(data | {"more": 1})
        with pytest.raises(DataError, match=r"id 10000, expected 0 to"):
            ours.decode([10000])
        with pytest.raises(DataError, match=r"side: got|whole: got"):
            Tokenizer.from_json(data | {"side": 3} if isinstance(ours, PiecesTokenizer) else data | {"whole": 3})


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_what_may_not_be_written_is_not(name: str, root: Path, tmp_path: Path) -> None:
    """Real Marian models forbid their padding, which they would write otherwise; alone, and in beams."""
    text = "the quick brown fox"
    first = brickformer.load(written(name, root)).generate([text], Sampling(), Stop(max_tokens=1)).results[0].tokens[0]
    shutil.copytree(written(name, root), folder := tmp_path / "model")
    told = json.loads((folder / "generation_config.json").read_text())
    told["bad_words_ids"] = [[first], [4], [first, first + 1]]
    (folder / "generation_config.json").write_text(json.dumps(told))
    with quiet():
        model = KINDS[name].model.from_pretrained(folder).eval()
        ids = t.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
        greedy = model.generate(**ids, max_new_tokens=6, do_sample=False, num_beams=1)[0]
        beams = model.generate(**ids, max_new_tokens=6, do_sample=False, num_beams=3, early_stopping=True)[0]
    run = Trained.open(imported(brickformer.load(folder), tmp_path / "runs").path)
    stop = Stop(max_tokens=6)
    assert [*run.start, *run.generate([text], Sampling(), stop).results[0].tokens] == greedy.tolist()
    assert [*run.start, *run.search([text], Beam(width=3), stop).results[0].tokens] == beams.tolist()
    stream = run.stream(text, None, stop)
    assert "".join(stream) == stream.result.text
    assert first not in greedy and stream.result.tokens == greedy[1:].tolist()
