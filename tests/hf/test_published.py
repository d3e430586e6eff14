"""Real weights, tokenizers, generation and the command line: what a published model says, ours says too."""

from __future__ import annotations

import json
import weakref
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers as t
from hf.cases import Case, ids_of, quiet, written
from hf.test_decoders import SIZES, rope

import brickformer
from brickformer import hf
from brickformer.cli import main
from brickformer.embed import Head
from brickformer.errors import DataError, RunError, SpecError
from brickformer.feedforward import GLU
from brickformer.generate import Beam, Sampling, Stop, Writer, beam_search, generate
from brickformer.layers import Layer, pattern
from brickformer.mixers.attention import Attention
from brickformer.mixers.lstm import LSTM
from brickformer.models import Decoder
from brickformer.positions import Rope, Sinusoid
from brickformer.presets import gpt2, llama
from brickformer.recipes import FROM_DATA, Session, Trained
from brickformer.recipes import text as text_recipe
from brickformer.shapes import unfilled
from brickformer.tasks import PretrainedTokenizer, Tokenizer, WordTokenizer

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Path:
    """A small model that was really trained, with what transformers made of it beside it."""
    folder = shared_data / "tinystories-656k"
    if not folder.is_dir():
        pytest.skip("NOT TESTED: no tinystories-656k in the data folder")
    return folder


def test_real_weights_say_the_same(stories: Path) -> None:
    said = json.loads((stories / "hf_reference.json").read_text())
    model = brickformer.load(stories)
    ids = torch.tensor(said["ids"])
    with torch.no_grad():
        assert (model.model(ids)[0, -1] - torch.tensor(said["last_logits"])).abs().max() <= 1e-5
    expected = said["greedy80"][0]
    result = model.generate(["Once upon a time"], Sampling(), Stop(max_tokens=80)).results[0]
    assert said["ids"][0] + result.tokens == expected
    assert result.text == model.target.decode(expected[len(ids[0]) :])
    whole = t.AutoTokenizer.from_pretrained(str(stories)).decode(expected, skip_special_tokens=True)
    assert "Once upon a time" + result.text == whole.strip()


def test_its_tokenizer_is_theirs(stories: Path) -> None:
    theirs, ours = t.AutoTokenizer.from_pretrained(str(stories)), brickformer.load(stories).target
    for text in ("Once upon a time, there was", "A cat sat.\n", ""):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == text
    assert ours.decode(ours.encode("  two spaces")) == "  two spaces"  # which theirs cuts otherwise than the file says
    whole = ours.encode("Once upon a time")[1:]
    assert "".join(ours.decode([i]) for i in whole) == " Once upon a time"  # each goes on with what was before
    assert (ours.bos, ours.ends) == (1, (2,))
    again = Tokenizer.from_json(json.loads(json.dumps(ours.to_json())))
    assert again == ours and isinstance(again, PretrainedTokenizer)
    with pytest.raises(DataError, match=r"id 2048, expected 0 to 2047"):
        ours.decode([2048])


def test_import_and_export_give_back_what_was_there(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(stories), "--name", "stories"]) == 0
    assert main(["export", "runs/stories-001", "--to", "hf", "back"]) == 0
    assert ": 0 read back, " in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (stories / name).read_bytes()
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((stories / "config.json").read_text())
    got = safetensors.torch.load_file(tmp_path / "back/model.safetensors")
    expected = safetensors.torch.load_file(stories / "model.safetensors")
    tied = {"lm_head.weight": "model.embed_tokens.weight"}  # the file has the other name of the tied tensor
    assert {tied.get(k, k) for k in expected} == set(got)
    assert all(torch.equal(got[tied.get(k, k)], v) for k, v in expected.items())
    assert main(["generate", "runs/stories-001", "Once upon a time", "--set", "temperature=0.0"]) == 0
    assert capsys.readouterr().out.startswith("Once upon a time, a little girl named Lily")
    assert main(["train", "--resume", "runs/stories-001"]) == 2
    assert "was trained elsewhere" in capsys.readouterr().err


def test_families_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--families"]) == 0
    said = capsys.readouterr().out
    cases = {f"tests/hf/test_{kind}.py": import_module(f"hf.test_{kind}").CASES for kind in ("decoders", "encoders")}
    for name, family in hf.FAMILIES.items():
        assert f"{family.proof} -k {name}-" in said
        assert (Path(__file__).parents[2] / family.proof).is_file()
        assert any(case.name.startswith(f"{name}-") for case in cases[family.proof]), f"{family.proof} has no {name}"


# ---- generation -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Writer]:
    """A random llama, theirs and ours."""
    folder = tmp_path_factory.mktemp("pair")
    theirs = written(Case("llama", t.LlamaForCausalLM, SIZES | rope("default")), folder)
    return theirs, Writer(hf.load(folder).model)


def continued(theirs: Any, **options: Any) -> list[list[int]]:
    with quiet(), torch.no_grad():
        ids = ids_of()
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, pad_token_id=0, do_sample=False, **options
        )
    return [row[ids.shape[1] :].tolist() for row in out]


def test_greedy_is_theirs(pair: tuple[Any, Writer]) -> None:
    theirs, writer = pair
    made = generate(writer, ids_of().tolist(), Sampling(), Stop(max_tokens=9)).results
    assert [r.tokens for r in made] == continued(theirs)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_beams_are_theirs(pair: tuple[Any, Writer], alpha: float) -> None:
    theirs, writer = pair
    beam, stop = Beam(width=4, length_penalty=alpha, early=True), Stop(max_tokens=9, ids=(3, 5))
    made = [r.tokens for r in beam_search(writer, ids_of().tolist(), beam, stop).results]
    expected = continued(theirs, num_beams=4, length_penalty=alpha, early_stopping=True, eos_token_id=[3, 5])
    ends = [next((i + 1 for i, token in enumerate(row) if token in (3, 5)), len(row)) for row in expected]
    assert made == [row[:end] for row, end in zip(expected, ends, strict=True)]


# ---- a model of our own goes out ------------------------------------------------------------------------------------


def test_a_trained_character_model_says_the_same_there(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("the quick brown fox\njumps over the lazy dog. Ünïcode too?\n" * 30)
    layer = Layer(Attention(4, position=Rope()), GLU(24))
    model = Decoder(FROM_DATA, 16, pattern([layer], 2), head=Head(tied=False))
    run = text_recipe(str(tmp_path / "book.txt")).but(
        model=model, **{"train.steps": 4, "train.batch": 2, "train.schedule.warmup": 1}
    )
    session = Session.new(run)
    folder = session.create_folder(tmp_path / "runs")
    session.fit()
    trained = Trained.open(folder.path)
    saved = brickformer.save(trained, tmp_path / "out")
    assert saved.family.model_type == "llama" and saved.check.ours == 0.0
    theirs, tokenizer = (
        t.AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        t.AutoTokenizer.from_pretrained(str(tmp_path / "out")),
    )
    prompt = "the quick\nÜ"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == trained.target.encode(prompt) and tokenizer.decode(ids[0]) == prompt
    with quiet():
        seen = torch.ones_like(ids)  # else they take every line break, which is token 0, for padding
        out = theirs.generate(ids, attention_mask=seen, max_new_tokens=30, do_sample=False, pad_token_id=0)
    result = trained.generate([prompt], Sampling(), Stop(max_tokens=30)).results[0]
    assert result.tokens == out[0, ids.shape[1] :].tolist()
    assert result.text == tokenizer.decode(out[0, ids.shape[1] :])
    assert brickformer.load(tmp_path / "out").answer([prompt])[0]


def test_words_go_out_too(tmp_path: Path) -> None:
    from brickformer.hf.tokenizer import plain_tokenizer

    ours = WordTokenizer(["7", "dog", "a"], specials=True)
    for name, text in plain_tokenizer(ours.tokens, words=True, first=ours.first).files.items():
        (tmp_path / name).write_text(text)
    theirs = t.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert theirs("a dog 7")["input_ids"] == ours.encode("a dog 7")
    assert theirs.decode([1, 5, 4, 3, 2], skip_special_tokens=True) == ours.decode([1, 5, 4, 3, 2]) == "a dog 7"


def test_a_model_without_a_family_names_the_brick() -> None:
    spec = llama(vocab=9, dim=16, depth=2, heads=2)
    with pytest.raises(SpecError, match=r"layers\.1\.mixer\.sinks: got True.*nearest is llama, with False"):
        hf.fit(spec.but(**{"layers.1.mixer.sinks": True}))
    with pytest.raises(SpecError, match=r"layers\.0\.mixer: got LSTM\("):
        hf.fit(spec.but(**{"layers.0.mixer": LSTM()}))
    trained_otherwise = {"layers.*.dropout": 0.1, "layers.*.mixer.dropout": 0.2, "layers.*.mixer.backend": "sdpa"}
    assert hf.fit(spec.but(**trained_otherwise)).family.model_type == "llama"  # all of it is gone after training


def test_shards_say_what_one_file_says(tmp_path: Path) -> None:
    model = llama(vocab=9, dim=16, depth=2, heads=2, hidden=8).build().eval()
    hf.save(model, tmp_path / "one")
    hf.save(model, tmp_path / "many", shard=2000)
    assert len(list((tmp_path / "many").glob("model-0*.safetensors"))) > 2
    again = hf.load(tmp_path / "many").model
    with torch.no_grad():
        assert torch.equal(again(ids_of() % 9), model(ids_of() % 9))
    one = safetensors.torch.load_file(tmp_path / "one/model.safetensors")
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(one)


def test_half_types_stay_as_they_are(tmp_path: Path) -> None:
    model = llama(vocab=9, dim=16, depth=1, heads=2, hidden=8).build().eval().bfloat16()
    hf.save(model, tmp_path / "half")
    again = hf.load(tmp_path / "half").model
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in hf.load(tmp_path / "half", dtype=torch.float32).model.parameters()} == {torch.float32}


def test_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a tensor is read, none of those read before it is still there."""
    hf.save(llama(vocab=9, dim=16, depth=2, heads=2, hidden=8).build(), tmp_path / "model")
    module, alive, most = import_module("brickformer.hf.folder"), [], []
    honest = module.SafeTensors.read

    def watched(self: Any, name: str) -> torch.Tensor:
        most.append(sum(ref() is not None for ref in alive))
        out: torch.Tensor = honest(self, name)
        alive.append(weakref.ref(out))
        return out

    monkeypatch.setattr(module.SafeTensors, "read", watched)
    hf.load(tmp_path / "model")
    assert len(most) > 10 and max(most) <= 1  # the one whose rows have just been copied


def test_what_bricks_compute_is_there_before_the_numbers_are() -> None:
    spec = gpt2(vocab=9, dim=16, depth=1, heads=2).but(**{"embed.position": Sinusoid(max_len=8)})
    made, built = unfilled(spec), spec.build()
    assert all(p.is_meta for p in made.parameters())
    buffers = dict(built.named_buffers())
    assert buffers and all(torch.equal(buffer, buffers[name]) for name, buffer in made.named_buffers())


def test_a_name_on_the_hub_is_asked_for_there(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, "*.safetensors" in allow_patterns))
        if name != "somebody/stories":
            raise OSError("no such repository\nand more")
        return str(stories)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert brickformer.load("somebody/stories").run.model == brickformer.load(stories).run.model
    with pytest.raises(RunError, match=r"nobody/x: no such folder, and the hub does not give it: no such repository$"):
        brickformer.load("nobody/x")
    assert asked == [("somebody/stories", True), ("nobody/x", True)]


def test_the_older_form_is_asked_for_where_there_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    model = llama(vocab=9, dim=16, depth=1, heads=2, hidden=8).build()
    hf.save(model, tmp_path / "model")
    torch.save(safetensors.torch.load_file(tmp_path / "model/model.safetensors"), tmp_path / "weights")
    (tmp_path / "model/model.safetensors").unlink()

    def download(name: str, allow_patterns: list[str]) -> str:
        if "pytorch_model*.bin" in allow_patterns:
            (tmp_path / "weights").rename(tmp_path / "model/pytorch_model.bin")
        return str(tmp_path / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    again = brickformer.load("somebody/older").model.state_dict()
    assert all(torch.equal(again[name], p) for name, p in model.state_dict().items())
