"""Every field of every configuration class: what is flipped is computed as theirs does, or refused; never otherwise.

The fields are those of the library's own classes, so one that it adds is asked for without a line here.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf import test_decoders as decoders
from hf import test_encoders as encoders
from hf.cases import V, ids_of, off, quiet, shake

from brickformer import hf
from brickformer.errors import BrickError
from brickformer.hf.config import SILENT
from brickformer.models import EncoderDecoderModel, EncoderModel

pytestmark = pytest.mark.unchecked

AnyCase = decoders.Case | encoders.Case
BASE: dict[str, AnyCase] = {}
for _case in (*decoders.CASES, *encoders.CASES):
    BASE.setdefault(_case.family, _case)
every_family = pytest.mark.parametrize("family", list(BASE))
NEAR = 3e-5

ACTIVATIONS = ["relu", "gelu", "gelu_new", "quick_gelu"]
WINDOWS = [["sliding_attention", "full_attention"], ["chunked_attention", "full_attention"]]
SCALED = {"rope_theta": 1e4, "original_max_position_embeddings": 8, "factor": 2.0}
FLIPS: dict[str, list[Any]] = {
    **dict.fromkeys(("hidden_act", "activation", "hidden_activation", "activation_function"), ACTIVATIONS),
    "classifier_activation": ACTIVATIONS[:2],
    "layer_types": WINDOWS,
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 50.0},
        {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", **SCALED, "mscale_all_dim": 0.7},
        {"rope_type": "yarn", **SCALED, "attention_factor": 1.3, "truncate": False},
        {"rope_type": "llama3", **SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", **SCALED, "short_factor": [1.0, 1.1], "long_factor": [2.0, 2.1]},
    ],
    "time_step_limit": [[0.5, 0.9]],
    "mlp_only_layers": [[0]],
    "feed_forward_proj": ["gelu", "gated-gelu", "gated-silu", "tanh"],
    "attn_config": [{"clip_qkv": 0.5}, {"softmax_scale": 0.7}, {"alibi": False}, {"qk_ln": True}],
    "logit_scale": [2.0],
    "architectures": [["SomethingElse"]],
    "classifier_pooling": ["mean"],
    "dtype": ["bfloat16"],
    "torch_dtype": ["float16"],
    "attn_implementation": ["eager"],
}
"""Values for fields of which another number or its opposite says nothing."""
UNTOUCHED = {"transformers_version", "id2label", "label2id", "return_dict", "problem_type", "is_encoder_decoder"}
"""What the library checks against itself, or returns a tuple for."""


def flips(name: str, value: Any, kind: str) -> Iterator[Any]:
    """Other values of a field."""
    match value:
        case _ if name in FLIPS:
            yield from FLIPS[name]
        case bool():
            yield not value
        case int():
            yield value + 3 if name == "vocab_size" else value * 2 or 1
        case float():
            yield 3.0 * value + 0.1
        case str():
            yield "other"
        case None if "bool" in kind:
            yield True
        case None if "int" in kind or "float" in kind:
            yield 2
        case _:
            pass


def says(case: AnyCase, model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of theirs."""
    more = {"decoder_input_ids": ids} if isinstance(model, encoders.t.PreTrainedModel) and sided(model) else {}
    return encoders.out_of(model, input_ids=ids, **more)


def sided(model: Any) -> bool:
    return bool(model.config.is_encoder_decoder)


def ours(model: Any, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor
    match model:
        case EncoderDecoderModel():
            out = model(ids, ids)
        case EncoderModel():
            out = encoders.says(model, ids)
        case _:
            out = model(ids)
    return out


@torch.no_grad()
def gap(case: AnyCase, options: dict[str, Any], folder: Path) -> float | None:
    """How far off our logits are from those of their model of these options; None where it or we refuse them."""
    ids = ids_of() % (V - 3) + 2
    try:
        with quiet():
            config = case.kind.config_class(**copy.deepcopy(options))
            config._attn_implementation = config._experts_implementation = "eager"
            theirs = case.kind(config).float().eval()
            shake(theirs, getattr(case, "noise", 1.5))
            getattr(case, "after", encoders.nothing)(theirs)
            expected = says(case, theirs, ids)
            theirs.save_pretrained(folder)
    except Exception:  # whatever theirs makes of a value that makes no sense
        return None
    try:
        mine = hf.load(folder).model
    except BrickError:
        return None
    return off(ours(mine, ids), expected)


def fields_of(case: AnyCase) -> dict[str, tuple[Any, str]]:
    """Every field of its configuration: the value here, and what may be there."""
    config = case.kind.config_class(**case.options)
    return {f.name: (getattr(config, f.name, None), str(f.type)) for f in dataclasses.fields(config)}


@every_family
def test_a_flipped_field_is_computed_or_refused(family: str, tmp_path: Path) -> None:
    """Those that are known to change nothing all at once, every other one alone."""
    case, known = BASE[family], SILENT | set(hf.FAMILIES[family].silent)
    alone = {k: v for k, v in fields_of(case).items() if k not in UNTOUCHED}
    together: dict[str, Any] = {}
    for name in sorted(set(alone) & known - {"architectures", "pad_token_id", "max_position_embeddings"}):
        value = next(flips(name, *alone.pop(name)), None)
        if value is not None:
            together[name] = value
    assert together
    away = gap(case, {**case.options, **together}, tmp_path / "together")
    assert away is not None and away <= NEAR, f"{family}: {together}: {away}"
    computed = 0
    for name, (value, kind) in alone.items():
        for i, other in enumerate(flips(name, value, kind)):
            away = gap(case, {**case.options, name: other}, tmp_path / f"{name}{i}")
            assert away is None or away <= NEAR, f"{family}.{name}: {other!r}: {away}"
            computed += away is not None
    assert computed >= 8, f"{family}: nearly everything is refused"


def written(case: AnyCase) -> dict[str, Any]:
    """Its configuration as a file says it, every field."""
    config = case.kind.config_class(architectures=[case.kind.__name__], **case.options)
    data: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return data


@every_family
def test_what_is_absent_means_what_it_means_there(family: str) -> None:
    """A field that is left out is the default of their class, or is asked for."""
    case, read = BASE[family], hf.FAMILIES[family].spec
    for case in (c for c in (*decoders.CASES, *encoders.CASES) if c.family == family):
        data = written(case)
        for f in dataclasses.fields(case.kind.config_class):
            if f.name == "architectures" or f.default is dataclasses.MISSING:
                continue
            without = {k: v for k, v in data.items() if k != f.name}
            try:
                absent = read(without)
            except BrickError:
                continue
            default = json.loads(json.dumps(f.default, default=str))
            try:
                assert absent == read(without | {f.name: default}), f"{family}.{f.name} = {default!r}"
            except BrickError as e:  # a default for another size of model, or written under two names
                assert f.name in ("num_key_value_heads", "num_experts"), e


WRONG = (None, "x", "4", [], [1], ["x"], {}, {"a": 1}, True, 1.5, 0, -1, 2, 10**9, 10**400, math.nan, math.inf)


@every_family
def test_no_value_of_any_field_is_more_than_a_refusal(family: str) -> None:
    """Missing, null, of another type, absurd: a spec or one line."""
    read, data, refused = hf.FAMILIES[family].spec, written(BASE[family]), 0
    changed = [{k: v for k, v in data.items() if k != name} for name in data]
    changed += [data | {name: value} for name in data for value in WRONG]
    for outer in (name for name, value in data.items() if isinstance(value, dict)):
        changed += [data | {outer: data[outer] | {name: value}} for name in data[outer] for value in WRONG]
    for each in changed:
        try:
            read(each)
        except BrickError as e:
            assert "\n" not in str(e) and len(str(e)) < 400
            refused += 1
    assert refused > 50


def test_a_name_that_theirs_does_not_read_says_nothing_else() -> None:
    """GPT-NeoX reads its own two names of rotary fields, and the others not at all."""
    data = {k: v for k, v in written(BASE["gpt_neox"]).items() if k != "rope_parameters"} | {"num_attention_heads": 2}
    read = hf.FAMILIES["gpt_neox"].spec
    plain = read(data)
    assert read(data | {"rope_theta": 1e4, "partial_rotary_factor": 0.25}) == plain
    assert read(data | {"rotary_emb_base": 50, "rope_theta": 50.0}) != plain
    for field in ({"rope_theta": 50.0}, {"partial_rotary_factor": 0.5}):
        with pytest.raises(BrickError, match=f"{next(iter(field))}: got .*as rotary_"):
            read(data | field)
    with pytest.raises(BrickError, match="rope_theta: got 50"):
        read(data | {"rope_theta": 50, "rotary_emb_base": 60.0})


def test_the_length_of_training_is_said_once() -> None:
    """Beside a scaling it is not read there; so it has to say the same."""
    scaled = {"rope_parameters": {"rope_type": "yarn", **SCALED}}
    data, read = written(BASE["llama"]) | scaled, hf.FAMILIES["llama"].spec
    assert read(data | {"original_max_position_embeddings": 8}) == read(data)
    with pytest.raises(BrickError, match="original_max_position_embeddings: got 32, expected 8"):
        read(data | {"original_max_position_embeddings": 32})
