"""Every family of encoders and encoder-decoders against the transformers library, as test_decoders.py does decoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from hf.cases import LEFT, NEAR, NO_IDS, RIGHT, V, ids_of, off, quiet, same_files, shake
from torch import Tensor, nn

from brickformer import hf
from brickformer.hf import FAMILIES
from brickformer.mask import EMPTY, Span
from brickformer.models import Decoder, EncoderDecoderModel, EncoderModel

pytestmark = pytest.mark.unchecked

SIZES = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    **NO_IDS,
}


def nothing(model: Any) -> None:
    """A model as it is."""


@dataclass(frozen=True)
class Case:
    """name: the family, and what is flipped. kind: their class. options: of its configuration. segments: how many its
    tokens may be of. skip: the first position theirs reads. after: what is done to the model before it is saved."""

    name: str
    kind: Any
    options: dict[str, Any] = field(default_factory=dict)
    segments: int = 0
    skip: int = 0
    after: Callable[[Any], None] = nothing
    positions: bool = True

    @property
    def family(self) -> str:
        return self.name.split("-")[0]


def bert(name: str, kind: Any = t.BertForMaskedLM, **options: Any) -> Case:
    return Case(f"bert-{name}", kind, SIZES | options, segments=2)


def roberta(name: str, kind: Any = t.RobertaForMaskedLM, **options: Any) -> Case:
    return Case(f"roberta-{name}", kind, SIZES | {"pad_token_id": 0, "type_vocab_size": 1} | options, skip=1)


def distilbert(name: str, kind: Any = t.DistilBertForMaskedLM, **options: Any) -> Case:
    sizes = {"vocab_size": V, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}
    return Case(f"distilbert-{name}", kind, sizes | NO_IDS | options)


def albert(name: str, kind: Any = t.AlbertForMaskedLM, **options: Any) -> Case:
    return Case(f"albert-{name}", kind, SIZES | {"embedding_size": 6, "num_hidden_layers": 3} | options, segments=2)


def modernbert(name: str, kind: Any = t.ModernBertForMaskedLM, **options: Any) -> Case:
    sizes = SIZES | {"num_hidden_layers": 4, "local_attention": 4, "cls_token_id": None, "sep_token_id": None}
    return Case(f"modernbert-{name}", kind, sizes | options)


def t5(name: str, after: Callable[[Any], None] = nothing, **options: Any) -> Case:
    sizes = {"vocab_size": V, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    sizes |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    ids = {"pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0}
    return Case(f"t5-{name}", t.T5ForConditionalGeneration, sizes | ids | options, after=after)


def own_head(model: Any) -> None:
    """The head of T5 1.1: the library ties it unless a file holds both."""
    model.lm_head.weight = nn.Parameter(torch.randn(V, 16, generator=torch.Generator().manual_seed(5)) / 4)
    model.all_tied_weights_keys.pop("lm_head.weight")


def two_sides(name: str, kind: Any, **options: Any) -> Case:
    """bart and marian."""
    sizes = {f"{s}_{k}": n for s in ("encoder", "decoder") for k, n in (("layers", 2), ("attention_heads", 4))}
    sizes |= {"vocab_size": V, "d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 20}
    sizes |= {"max_position_embeddings": 32}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "decoder_start_token_id": 0}
    return Case(name, kind, sizes | ids | {"forced_eos_token_id": None} | options, after=with_bias)


def with_bias(model: Any) -> None:
    """A bias of logits that is not zero, and fixed positions as they were before every parameter was shaken."""
    bias = model.final_logits_bias
    bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(6)))
    for side in (model.model.encoder, model.model.decoder):
        if isinstance(model, t.MarianMTModel):
            side.embed_positions.weight.data = side.embed_positions.create_weight()


def bart(name: str, **options: Any) -> Case:
    return two_sides(f"bart-{name}", t.BartForConditionalGeneration, **options)


def marian(name: str, **options: Any) -> Case:
    return two_sides(f"marian-{name}", t.MarianMTModel, **options)


CASES = [
    bert("plain"),
    bert("others", hidden_act="relu", layer_norm_eps=1e-2, type_vocab_size=3),
    bert("body", t.BertModel),
    roberta("plain"),
    roberta("padding", pad_token_id=1, type_vocab_size=2, hidden_act="relu"),
    roberta("body", t.RobertaModel),
    distilbert("plain"),
    distilbert("others", activation="relu"),
    distilbert("body", t.DistilBertModel),
    albert("plain"),
    albert("inner", inner_group_num=2, num_hidden_layers=2, embedding_size=16, hidden_act="relu"),
    albert("body", t.AlbertModel),
    modernbert("plain"),
    modernbert(
        "others",
        attention_bias=True,
        mlp_bias=True,
        norm_bias=True,
        norm_eps=1e-2,
        classifier_bias=True,
        classifier_activation="silu",
        hidden_activation="silu",
        layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    modernbert("no bias", decoder_bias=False, local_attention=2),
    modernbert("body", t.ModernBertModel),
    t5("plain"),
    t5("gated", own_head, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    t5("gated tied", feed_forward_proj="gated-silu", tie_word_embeddings=False, num_decoder_layers=1),
    t5("others", feed_forward_proj="gelu", layer_norm_epsilon=1e-2),
    bart("plain"),
    bart("scaled", scale_embedding=True, activation_function="relu", decoder_layers=1),
    marian("plain", scale_embedding=True, activation_function="swish"),
    marian("two tables", share_encoder_decoder_embeddings=False, decoder_vocab_size=V + 2),
]


def written(case: Case, folder: Path) -> Any:
    """Their model, every parameter random, and the folder it was saved to."""
    torch.manual_seed(1)
    with quiet(), torch.no_grad():
        config = case.kind.config_class(**case.options)
        config._attn_implementation = "eager"
        model = case.kind(config).float().eval()
        shake(model)
        case.after(model)
        model.save_pretrained(folder)
    return model


def out_of(theirs: Any, **inputs: Any) -> Tensor:
    """Logits; vectors of a body."""
    out = theirs(**inputs)
    told: Tensor = out.last_hidden_state if "last_hidden_state" in out else out.logits
    return told


def says(mine: EncoderModel, ids: Tensor, valid: Tensor | None = None, segment: Tensor | None = None) -> Tensor:
    h = mine(ids, valid, segment)
    return h if mine.head is None else mine.logits(h)


def of_an_encoder(case: Case, mine: EncoderModel, theirs: Any) -> None:
    """Full, with segments, padded on either side; what is pooled."""
    ids = ids_of() % (V - 2) + 2  # an id that is padding would move roberta's positions
    assert off(says(mine, ids), out_of(theirs, input_ids=ids)) <= NEAR, f"{case.name}: full"
    if case.segments:
        segment = torch.randint(0, case.segments, ids.shape, generator=torch.Generator().manual_seed(3))
        told = out_of(theirs, input_ids=ids, token_type_ids=segment)
        assert off(says(mine, ids, segment=segment), told) <= NEAR, f"{case.name}: segments"
        assert off(told, out_of(theirs, input_ids=ids)) > NEAR
    for valid in (LEFT, RIGHT):
        at = Span.of(ids, valid=valid)
        assert at.pos is not None
        skip = 0 if theirs.config.pad_token_id is None or not case.skip else theirs.config.pad_token_id + 1
        told_where = {"position_ids": at.pos.masked_fill(at.pos == EMPTY, 0) + skip}
        if case.family == "modernbert":
            told_where = {}  # rotary: only distances count
        told = out_of(theirs, input_ids=ids, attention_mask=valid.long(), **told_where)
        assert off(says(mine, ids, valid)[valid], told[valid]) <= NEAR, f"{case.name}: padded"
    if mine.pooler is not None:
        assert off(mine.pooled(mine(ids)), theirs(input_ids=ids).pooler_output) <= NEAR, f"{case.name}: pooled"


def of_two_sides(case: Case, mine: EncoderDecoderModel, theirs: Any) -> None:
    """Full, a padded source, token by token with a state, a padded target."""
    src, tgt = ids_of(), ids_of(seed=4, tokens=7)
    full = out_of_both(theirs, src, tgt)
    assert off(mine(src, tgt), full) <= NEAR, f"{case.name}: full"
    for valid in (LEFT, RIGHT):
        if not (valid is LEFT and case.family != "t5"):  # positions of theirs are places, not counts
            told = out_of_both(theirs, src, tgt, attention_mask=valid.long())
            assert off(mine(src, tgt, valid), told) <= NEAR, f"{case.name}: padded source"
    told = out_of_both(theirs, src, tgt, attention_mask=RIGHT.long())
    state, memory = mine.init_state(2, 7), mine.encode(src, RIGHT)
    steps = [mine.decode(tgt[:, i : i + 1], memory if i == 0 else None, state=state) for i in range(7)]
    assert off(torch.cat(steps, 1), told) <= NEAR, f"{case.name}: step by step"


def out_of_both(theirs: Any, src: Tensor, tgt: Tensor, **more: Any) -> Tensor:
    told: Tensor = theirs(input_ids=src, decoder_input_ids=tgt, **more).logits
    return told


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@torch.no_grad()
def test_family(case: Case, tmp_path: Path) -> None:
    theirs = written(case, tmp_path / "theirs")
    checkpoint = hf.load(tmp_path / "theirs")
    match checkpoint.model:
        case EncoderModel():
            of_an_encoder(case, checkpoint.model, theirs)
        case EncoderDecoderModel():
            of_two_sides(case, checkpoint.model, theirs)
        case other:
            raise AssertionError(other)
    same_files(case.family, checkpoint.model, checkpoint.config, tmp_path / "theirs", tmp_path)


def test_every_family_has_its_cases() -> None:
    others = {name for name, family in FAMILIES.items() if family.kind is not Decoder}
    assert others == {case.family for case in CASES}
