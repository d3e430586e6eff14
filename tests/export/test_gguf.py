"""GGUF files, read by two others: the transformers library (which takes each block of numbers apart again, and turns
rotary rows and transposes back by itself), and llama.cpp where its Python package is installed."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from hf.cases import NO_IDS, off, quiet, shake
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from brickformer import hf
from brickformer.cli import main
from brickformer.errors import BrickError, RunError, SpecError
from brickformer.export.gguf import write_gguf
from brickformer.export.llama_check import installed
from brickformer.export.llamacpp import ARCHITECTURES, architecture, fields
from brickformer.export.vocabulary import vocabulary
from brickformer.feedforward import MLP
from brickformer.hf.save import configuration, theirs
from brickformer.hf.tokenizer import plain_tokenizer
from brickformer.mixers.lstm import LSTM
from brickformer.presets import gpt2, llama, vaswani_small
from brickformer.quant import Int8, quantize
from brickformer.recipes.gguf import export_gguf
from brickformer.recipes.published import load
from brickformer.recipes.run import Run
from brickformer.recipes.trained import Trained
from brickformer.tasks import CharTokenizer, Imported, WordTokenizer

pytestmark = pytest.mark.unchecked

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64, **NO_IDS}
TEXT = "Hello wörld, naïve “café” 日本!\n  two  spaces"


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **options}}


LLAMA3 = rope("llama3", factor=8.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0)
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama biases": (transformers.LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama wide": (transformers.LlamaForCausalLM, {"head_dim": 32}),
    "llama linear": (transformers.LlamaForCausalLM, rope("linear", factor=3.0)),
    "llama yarn": (transformers.LlamaForCausalLM, rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama llama3": (transformers.LlamaForCausalLM, LLAMA3),
    "mistral": (transformers.MistralForCausalLM, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3ForCausalLM, {"head_dim": 16}),
    "olmo2": (transformers.Olmo2ForCausalLM, {}),
    "gemma": (transformers.GemmaForCausalLM, {"head_dim": 16}),
    "gemma2": (transformers.Gemma2ForCausalLM, {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "gpt2": (transformers.GPT2LMHeadModel, {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}
READ_THERE = ("llama", "qwen2", "qwen3", "gpt2")
"""Families whose files the transformers library reads."""


def trained(name: str, folder: Path) -> Trained:
    """A random model of theirs, read by ours."""
    kind, options = FAMILIES[name]
    sizes = {"vocab_size": 96, **NO_IDS} if name == "gpt2" else SIZES
    torch.manual_seed(1)
    with quiet():
        model = kind(kind.config_class(**sizes | options)).float().eval()
        shake(model)
        model.save_pretrained(folder)
    return load(folder)


def characters(spec: Any) -> Trained:
    """A model of characters, as `brick train text` makes."""
    model = spec.build().eval()
    shake(model)
    return Trained(Run(task=Imported("x"), model=spec, name="x"), model, None, CharTokenizer.of(TEXT))


def ids_of(vocab: int = 96) -> torch.Tensor:
    return torch.randint(vocab, (1, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [n for n in FAMILIES if n.split()[0] in READ_THERE and n.split()[-1] in READ_THERE])
@torch.no_grad()
def test_the_transformers_library_reads_the_same(name: str, tmp_path: Path) -> None:
    run = trained(name, tmp_path / "theirs")
    export_gguf(run, tmp_path / "out.gguf", "f32", tokenizer=False)
    with quiet():
        again = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(tmp_path / "theirs"), attn_implementation="eager"
        ).eval()
        told = load_gguf_checkpoint(str(tmp_path / "out.gguf"), return_tensors=True, model_to_load=again)
    missing, unexpected = again.load_state_dict(told["tensors"], strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, "lm_head is the table of tokens where it is tied"
    model: Any = run.model
    assert off(model(ids_of()), again(input_ids=ids_of()).logits) <= 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_answers_the_same(name: str, tmp_path: Path) -> None:
    """In float32 as in half; the exporter compares, and leaves no file that is off."""
    if not installed():
        pytest.skip("llama-cpp-python is not installed: llama.cpp was not asked. pip install llama-cpp-python")
    run = trained(name, tmp_path / "theirs")
    for kind in ("f32", "f16"):
        off_there = export_gguf(run, tmp_path / f"{kind}.gguf", kind, tokenizer=False).off
        assert off_there is not None and off_there < 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_has_its_place(name: str, tmp_path: Path) -> None:
    """As many numbers as the model has, each under a name of the family's own list; llama3's factors beside them."""
    run = trained(name, tmp_path / "theirs")
    export_gguf(run, tmp_path / "out.gguf", "f32", tokenizer=False)
    read = gguf.GGUFReader(tmp_path / "out.gguf")
    numbers = {t.name: int(t.n_elements) for t in read.tensors}
    assert numbers.pop("rope_freqs.weight", 0) == (8 if name == "llama llama3" else 0)
    assert sum(numbers.values()) == sum(p.numel() for p in run.model.parameters())
    assert bytes(read.fields["general.architecture"].parts[-1]).decode() == ARCHITECTURES[name.split()[0]].name


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_every_file_is_read_back(name: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without llama.cpp too: equal in float32 (but for 1 + g), near in others; numbers that are off are refused."""
    module = import_module("brickformer.export.gguf")
    run = trained(name, tmp_path / "theirs")
    back = export_gguf(run, tmp_path / "good.gguf", kind, tokenizer=False).back
    assert back <= {"f32": 2e-5 if name == "gemma2" else 0.0, "f16": 0.05, "q8_0": 0.5, "q4_0": 20.0}[kind]
    assert back > 0.0 or kind == "f32"
    honest = module.stored

    def spoiled(theirs: str, tensor: Any, *more: Any) -> Any:
        return honest(theirs, tensor.roll(1, 0) if "down_proj" in theirs or "c_fc.w" in theirs else tensor, *more)

    monkeypatch.setattr(module, "stored", spoiled)
    with pytest.raises(RunError, match=r"read back, (model\.)?\S+ is off by"):
        export_gguf(run, tmp_path / "out.gguf", kind, tokenizer=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good.gguf", "theirs"]


def test_numbers_too_large_for_half(tmp_path: Path) -> None:
    run = characters(llama(vocab=len(set(TEXT)), dim=64, depth=1, heads=4, hidden=80))
    run.model.stack.layers[0].ffn.out.weight.data[0, 0] = 1e5  # type: ignore[union-attr]
    with pytest.raises(SpecError, match=r"down_proj\.weight: too large for half"):
        export_gguf(run, tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())
    export_gguf(run, tmp_path / "out.gguf", "f32")


@pytest.mark.parametrize("name", ["gemma", "gemma2"])
def test_gains_of_gemma_have_their_one(name: str, tmp_path: Path) -> None:
    """Every norm, and nothing else, is stored as 1 + g."""
    run = trained(name, tmp_path / "theirs")
    export_gguf(run, tmp_path / "out.gguf", "f32", tokenizer=False)
    read = {t.name: torch.from_numpy(t.data.copy()) for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").state_dict()
    assert torch.equal(read["output_norm.weight"], 1.0 + theirs["model.norm.weight"])
    for mine, there in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
        if mine == "ffn_norm" and name == "gemma2":
            there = "pre_feedforward_layernorm"
        assert torch.equal(read[f"blk.0.{mine}.weight"], 1.0 + theirs[f"model.layers.0.{there}.weight"]), mine
    assert torch.equal(read["blk.1.ffn_up.weight"], theirs["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize(("kind", "near"), [("f16", 1e-3), ("q8_0", 1e-2), ("q4_0", 0.13)])
def test_smaller_numbers(kind: Any, near: float, tmp_path: Path) -> None:
    """Matrices are near what they were, by as much as the blocks allow; norms are as they were."""
    run = characters(llama(vocab=len(set(TEXT)), dim=64, depth=1, heads=4, hidden=80))
    made = export_gguf(run, tmp_path / "out.gguf", kind)
    read = {t.name: t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    kept = [] if kind == "f16" else ["blk.0.ffn_down.weight"]  # rows of 80 numbers are no blocks of 32
    assert list(made.written.kept) == kept
    expected = {"blk.0.ffn_up.weight": kind, "token_embd.weight": "q8_0" if kind == "q4_0" else kind}
    for name, stored in (expected | dict.fromkeys(kept, "f16")).items():
        assert read[name].tensor_type.name == stored.upper(), name
    model: Any = run.model
    layer = model.stack.layers[0]
    got = torch.from_numpy(gguf.dequantize(read["blk.0.ffn_up.weight"].data, read["blk.0.ffn_up.weight"].tensor_type))
    up = layer.ffn.gate_up.part(1)
    blocks = up.detach().unflatten(-1, (-1, 32))
    worst = (got.unflatten(-1, (-1, 32)) - blocks).abs().amax(-1) / blocks.abs().amax(-1)
    assert 0.0 < float(worst.max()) <= near
    norm = torch.from_numpy(read["blk.0.attn_norm.weight"].data.copy())
    assert torch.equal(norm, layer.around_mixer.into.weight.detach())


def test_characters_become_bytes_that_join() -> None:
    """Merges give back every character of the vocabulary, told apart from its bytes."""
    tokenizer = CharTokenizer.of(TEXT)
    files = plain_tokenizer(tokenizer.tokens, words=False).files
    words = vocabulary(files["tokenizer.json"], tokenizer.vocab, bos=None, eos=None)
    assert words.model == "gpt2" and words.fields["pre"] == "gpt-2" and "left out" in words.note
    visible = bytes_to_unicode()
    assert words.tokens == ["".join(visible[b] for b in token.encode()) for token in tokenizer.tokens]
    for token in words.tokens:
        made = list(token)
        while len(made) > 1:  # the first pair that has a merge, as BPE does
            i = next(i for i in range(len(made) - 1) if f"{made[i]} {made[i + 1]}" in words.merges)
            made[i : i + 2] = [made[i] + made[i + 1]]
        assert made == [token]


def test_characters_of_one_byte_have_merges_too(tmp_path: Path) -> None:
    """llama.cpp reads no file of this kind without any; one that is there joins nothing."""
    tokenizer = CharTokenizer.of("plain text\n")
    files = plain_tokenizer(tokenizer.tokens, words=False).files
    words = vocabulary(files["tokenizer.json"], tokenizer.vocab, bos=None, eos=None)
    assert len(words.merges) == 1 and all(len(half) > 1 for half in words.merges[0].split(" "))
    run = characters(llama(vocab=len(set(TEXT)), dim=64, depth=1, heads=4, hidden=64))
    write_gguf(tmp_path / "out.gguf", *_checkpoint(run), words, vocab=len(set(TEXT)))
    assert "tokenizer.ggml.merges" in gguf.GGUFReader(tmp_path / "out.gguf").fields


def _checkpoint(run: Trained) -> tuple[Any, Any]:
    family, config = configuration(run.model, None, {})
    return config, theirs(run.model, family)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.update(normalizer={"type": "Lowercase"}), "a normalizer Lowercase"),
        (lambda t: t["pre_tokenizer"].update(add_prefix_space=True), "add_prefix_space"),
        (lambda t: t["model"].update(ignore_merges=True), "ignore_merges True with cuts of gpt-2"),
        (lambda t: t["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix '</w>'"),
        (lambda t: t.update(post_processor={"type": "RobertaProcessing"}), "RobertaProcessing after its tokens"),
        (lambda t: t.update(post_processor=template("b")), "b around every text"),
        (lambda t: t.update(model={"type": "Unigram", "vocab": [["a", 0.0]]}), "Unigram"),
    ],
)
def test_a_tokenizer_that_cuts_otherwise_is_refused(change: Any, says: str) -> None:
    """What llama.cpp would read and not do: the same text would be other ids there."""
    data: dict[str, Any] = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    }
    assert vocabulary(json.dumps(data), 3, bos=None, eos=None).merges == ["a b"]
    data["post_processor"] = template("a")
    assert vocabulary(json.dumps(data), 3, bos=0, eos=None).fields["add_bos_token"] is True
    change(data)
    with pytest.raises(BrickError, match=re.escape(says)):
        vocabulary(json.dumps(data), 3, bos=0, eos=None)


def template(token: str) -> dict[str, Any]:
    parts = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": parts}


def test_llama_cpp_cuts_text_as_we_do(tmp_path: Path) -> None:
    if not installed():
        pytest.skip("llama-cpp-python is not installed: its tokenizer was not asked. pip install llama-cpp-python")
    import llama_cpp

    run = characters(gpt2(vocab=len(set(TEXT)), dim=64, depth=1, heads=4, max_len=64))
    export_gguf(run, tmp_path / "out.gguf", "f32")
    there = llama_cpp.Llama(str(tmp_path / "out.gguf"), vocab_only=True, verbose=False)
    assert there.tokenize(TEXT.encode(), add_bos=False) == run.target.encode(TEXT)


def test_scores_are_the_order_of_merges(shared_data: Path) -> None:
    folder = shared_data / "tinystories-656k"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: a vocabulary that falls back to bytes is not tested")
    text = (folder / "tokenizer.json").read_text("utf-8")
    words = vocabulary(text, 2048, bos=1, eos=2)
    assert words.model == "llama" and words.fields["add_bos_token"] and words.fields["add_space_prefix"]
    assert words.types[:3] == [2, 3, 3]
    merges = json.loads(text)["model"]["merges"]
    made = ["".join(m if isinstance(m, list) else m.split(" ")) for m in merges]
    scores = dict(zip(words.tokens, words.scores, strict=True))
    listed = [scores[token] for token in dict.fromkeys(made)]
    assert listed == sorted(listed, reverse=True) and len(set(listed)) == len(listed)


# ---- what llama.cpp does not compute --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "lama"}, "llama"),
        ({"model_type": "mistral", "sliding_window": 4}, "sliding_window"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "activation"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 8}, "query_pre_attn_scalar"),
        ({"model_type": "gemma2", "head_dim": 256, "attn_logit_softcapping": None}, "attn_logit_softcapping"),
        ({"model_type": "llama", **rope("dynamic", factor=2.0)}, "rope scaling"),
        ({"model_type": "llama", **rope("yarn", factor=2.0, beta_fast=8)}, "beta_fast"),
    ],
)
def test_refused(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        architecture(SIZES | config)
        fields(SIZES | config, 96)
    assert len(str(refused.value).splitlines()) == 1


def test_a_model_that_llama_cpp_does_not_have() -> None:
    spec = llama(vocab=len(set(TEXT)), dim=64, depth=2, heads=4)
    for other in (spec.but(**{"layers.1.mixer": LSTM()}), spec.but(**{"layers.*.ffn": MLP(64)})):
        with pytest.raises(SpecError):
            export_gguf(characters(other), Path("never.gguf"))
    both = vaswani_small(vocab=20)
    run = Trained(Run(task=Imported("x"), model=both, name="x"), both.build(), None, WordTokenizer.of("a b"))
    with pytest.raises(SpecError, match="no decoder"):
        export_gguf(run, Path("never.gguf"))


def test_a_quantized_model_has_codes_of_its_own(tmp_path: Path) -> None:
    run = characters(llama(vocab=len(set(TEXT)), dim=64, depth=1, heads=4))
    quantize(run.model, Int8())
    with pytest.raises(RunError, match="the model is quantized"):
        export_gguf(run, tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())


def test_words_have_no_tokenizer_there(tmp_path: Path) -> None:
    files = plain_tokenizer(["one", "two"], words=True).files
    with pytest.raises(BrickError, match="--no-tokenizer"):
        vocabulary(files["tokenizer.json"], 2, bos=None, eos=None)
    with pytest.raises(BrickError, match="belong together"):
        vocabulary(files["tokenizer.json"], 1, bos=None, eos=None)


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    run = characters(llama(vocab=len(set(TEXT)), dim=64, depth=1, heads=4))
    target = tmp_path / "out.gguf"
    tensors = [("model.embed_tokens.weight", torch.zeros(4, 64)), ("model.odd.weight", torch.zeros(4))]
    words = vocabulary(None, 4, bos=None, eos=None)
    with pytest.raises(SpecError, match=r"model\.odd\.weight"):
        write_gguf(target, SIZES | {"model_type": "llama"}, tensors, words, vocab=4)
    assert not list(tmp_path.iterdir()), "something was left behind"
    target.write_text("mine")
    with pytest.raises(RunError, match="already"):
        export_gguf(run, target)
    assert target.read_text() == "mine"
    with pytest.raises(RunError, match="cannot be written"):
        export_gguf(run, target / "out.gguf")
    assert target.read_text() == "mine"


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained("llama", tmp_path / "theirs")
    assert hf.load(tmp_path / "theirs").family.model_type == "llama"
    assert main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "runs"), "--name", "x"]) == 0
    run, target = next(str(p) for p in (tmp_path / "runs").iterdir()), str(tmp_path / "out.gguf")
    assert main(["export", run, "--to", "gguf", target]) == 2
    assert "--no-tokenizer" in capsys.readouterr().err
    assert main(["export", run, "--to", "gguf", target, "--dtype", "q8_0", "--no-tokenizer"]) == 0
    assert "of q8_0" in capsys.readouterr().out and Path(target).is_file()
    assert main(["export", run, "--to", "hf", str(tmp_path / "h"), "--dtype", "f16"]) == 2
    assert "--dtype" in capsys.readouterr().err
