"""Specs: strict in, exact out, and errors that say where, what was found, what was expected and what was meant."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import brickformer
from brickformer.cli.settings import parse_setting
from brickformer.embed import Embed, Head
from brickformer.errors import SpecError
from brickformer.feedforward import GLU, MLP
from brickformer.layers import Layer, pattern
from brickformer.mask import FULL, Mask
from brickformer.mixers.attention import Attention
from brickformer.mixers.cross import Cross
from brickformer.models import Decoder, Encoder, EncoderDecoder, ModelSpec
from brickformer.norms import LayerNorm, NormSpec, RMSNorm
from brickformer.positions import Learned, Rope, Sinusoid
from brickformer.schema import json_schema
from brickformer.spec import _REGISTRY, Spec, fields_of, kinds_of, read, spec

LAYER = Layer(Attention(heads=4, kv_heads=2, position=Rope()), GLU(24))
OTHER = Layer(Attention(heads=4, mask=Mask(window=3)), MLP(24), norm=LayerNorm(), place="post", dropout=0.1)
DECODER = Decoder(vocab=11, dim=16, layers=(LAYER, OTHER, LAYER), embed=Embed(position=Learned(9), scaled=True))
PAIR = EncoderDecoder(
    Encoder(11, 16, pattern([Layer(Attention(4, mask=FULL), MLP(8))], 2), embed=Embed(Sinusoid(), norm=LayerNorm())),
    Decoder(11, 16, pattern([Layer(Attention(4), MLP(8), cross=Cross(2, qk_norm=RMSNorm()))], 4), head=Head(softcap=3)),
    shared=True,
)
MASKED = Encoder(7, 8, (Layer(Attention(2, mask=FULL), MLP(8)),), head=Head(tied=False))
SPECS = [DECODER, PAIR, MASKED, LAYER, OTHER, Rope(theta=500), Mask(False, 4), Embed()]


@pytest.fixture
def registry() -> Iterator[dict[str, type[Spec]]]:
    """The registry of kinds, put back after the test."""
    before = dict(_REGISTRY)
    yield _REGISTRY
    _REGISTRY.clear()
    _REGISTRY.update(before)


class ToySlot(Spec):
    """A slot of this file's own."""

    __slots__ = ()


@spec("toy_point")
class Point(ToySlot):
    """Scalars of every type."""

    x: int
    y: float = 0.5
    name: str = "p"
    on: bool = True


@spec("toy_box")
class Box(ToySlot):
    """Choices, unions and tuples."""

    inside: ToySlot | None = None
    side: Literal["left", "right", 3] = "left"
    points: tuple[Point, ...] = ()
    pair: tuple[int, str] | None = None
    size: int | Point = 1

    def check(self) -> None:
        """No bad size."""
        if self.size == 13:
            raise self.refuse("size", "a lucky number", "Take 7.")


# ---- out and in again -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("it", SPECS, ids=lambda s: s.kind)
def test_text_gives_back_the_same_spec(it: Spec) -> None:
    for text, reader in ((it.to_json(), type(it).from_json), (it.to_yaml(), type(it).from_yaml)):
        again = reader(text)
        assert again == it and hash(again) == hash(it) and type(again) is type(it)
        assert again.to_json() == it.to_json()
    assert json.loads(it.to_json()) == yaml.safe_load(it.to_yaml()) == it.to_dict()


@pytest.mark.parametrize("it", SPECS, ids=lambda s: s.kind)
def test_what_is_shown_is_python_that_builds_it(it: Spec) -> None:
    names = {cls.__name__: cls for cls in kinds_of(Spec).values()}
    assert eval(repr(it), {**names, "pattern": pattern}) == it


def test_the_human_view_leaves_out_defaults_and_folds_layers() -> None:
    assert repr(Attention(heads=4)) == "Attention(heads=4)"
    assert repr(Mask(causal=False)) == "Mask(causal=False)"
    many = Decoder(11, 16, pattern([LAYER, OTHER], 6))
    assert repr(many).count("GLU(") == 1 and "depth=6" in repr(many)


def test_every_field_is_stored() -> None:
    def walk(it: Spec, data: Any) -> None:
        assert set(data) == {"kind", *fields_of(type(it))} and data["kind"] == it.kind
        for name in fields_of(type(it)):
            value = getattr(it, name)
            if isinstance(value, Spec):
                walk(value, data[name])
            elif isinstance(value, tuple):
                for part, plain in zip(value, data[name], strict=True):
                    walk(part, plain)
            else:
                assert data[name] == value

    for it in (DECODER, PAIR, MASKED):
        walk(it, json.loads(it.to_json()))


def test_it_is_a_value() -> None:
    assert copy.deepcopy(DECODER) == DECODER and pickle.loads(pickle.dumps(LAYER)) == LAYER
    assert {Rope(): 1, Rope(theta=10_000): 2} == {Rope(): 2}
    with pytest.raises(dataclasses.FrozenInstanceError):
        LAYER.place = "post"  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        LAYER.anything = 1  # type: ignore[attr-defined]
    assert Rope(theta=500) == Rope(theta=500.0) and type(Rope(theta=500).theta) is float


# ---- strict ---------------------------------------------------------------------------------------------------------

WRONG: list[tuple[Any, str]] = [
    (
        {"kind": "toy_point", "x": "4"},
        "spec.x: got '4' (str), expected int. Text is not a number: write 4 without quotes.",
    ),
    ({"kind": "toy_point", "x": True}, "spec.x: got True (bool), expected int."),
    ({"kind": "toy_point", "x": 1.0}, "spec.x: got 1.0 (float), expected int."),
    ({"kind": "toy_point", "x": None}, "spec.x: got None (NoneType), expected int."),
    ({"kind": "toy_point", "x": 1, "y": True}, "spec.y: got True (bool), expected float."),
    ({"kind": "toy_point", "x": 1, "y": float("nan")}, "spec.y: got nan (float), expected a finite number."),
    ({"kind": "toy_point", "x": 1, "y": "1e-3"}, "YAML reads 1e-3 as text: write 1.0e-3"),
    ({"kind": "toy_point", "x": 1, "on": 1}, "spec.on: got 1 (int), expected bool."),
    ({"kind": "toy_point", "x": 1, "name": 1}, "spec.name: got 1 (int), expected str."),
    ({"kind": "toy_point"}, "spec.x: missing; 'toy_point' needs it."),
    ({"kind": "toy_point", "x": 1, "nam": "a"}, "spec.nam: 'toy_point' has no such field; did you mean 'name'?"),
    ({"kind": "toy_pint", "x": 1}, "spec.kind: got 'toy_pint', expected ToySlot; did you mean 'toy_point'?"),
    ({"kind": 3}, "spec.kind: got 3, expected ToySlot; known: toy_box, toy_point"),
    ({"kind": ["toy_box"]}, "spec.kind: got ['toy_box'], expected ToySlot"),
    ({"x": 1}, "spec.kind: missing; expected one of: toy_point, toy_box."),
    (4, "spec: got 4 (int), expected ToySlot (toy_point, toy_box)."),
    (["toy_box"], "spec: got ['toy_box'] (list), expected ToySlot (toy_point, toy_box)."),
    (
        {"kind": "toy_box", "side": "lefd"},
        "spec.side: got 'lefd' (str), expected 'left' | 'right' | 3. did you mean 'left'?",
    ),
    ({"kind": "toy_box", "side": 3.0}, "spec.side: got 3.0 (float), expected 'left' | 'right' | 3."),
    ({"kind": "toy_box", "points": {"x": 1}}, "spec.points: got {'x': 1} (dict), expected a list."),
    ({"kind": "toy_box", "points": [{"x": 1}, {"x": "a"}]}, "spec.points.1.x: got 'a' (str), expected int."),
    ({"kind": "toy_box", "pair": [1]}, "spec.pair: got [1] (list), expected a list of 2."),
    ({"kind": "toy_box", "pair": [1, 2]}, "spec.pair.1: got 2 (int), expected str."),
    (
        {"kind": "toy_box", "inside": {"kind": "toy_box", "inside": {"kind": "toy_point", "x": []}}},
        "spec.inside.inside.x: got []",
    ),
    (
        {"kind": "toy_box", "inside": {"kind": "toy_box", "size": 13}},
        "spec.inside.size: got 13, expected a lucky number. Take 7.",
    ),
    ({"kind": "toy_box", "size": "x"}, "spec.size"),
    ({"kind": "toy_box", "size": ["x"]}, "spec.size"),
    ({"kind": "toy_box", "size": {"kind": ["x"]}}, "spec.size"),
]


@pytest.mark.parametrize(("data", "says"), WRONG, ids=[says[:40] for _, says in WRONG])
def test_wrong_data_is_refused_with_path_and_hint(data: Any, says: str) -> None:
    with pytest.raises(SpecError) as refused:
        read(ToySlot, data)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_wrong_value_in_python_is_refused_too() -> None:
    with pytest.raises(SpecError, match=r"^toy_point\.x: got '4' \(str\), expected int"):
        Point("4")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"^layer\.ffn: got Attention\(heads=2\) .*, expected FeedForward"):
        Layer(Attention(2), Attention(2))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"^attention\.heads: got 0, expected at least 1"):
        Attention(0)


def test_right_data_is_taken_as_it_is() -> None:
    assert read(ToySlot, {"kind": "toy_point", "x": 1, "y": 2}) == Point(1, 2.0)
    assert read(ToySlot, "toy_box") == Box()
    assert read(Point, {"x": 3}) == Point(3)
    assert read(ToySlot, Point(1)) == Point(1)
    full = {
        "inside": {"kind": "toy_point", "x": 1},
        "side": 3,
        "points": [{"x": 2}],
        "pair": [1, "a"],
        "size": {"x": 5},
    }
    assert read(Box, full) == Box(Point(1), 3, (Point(2),), (1, "a"), Point(5))
    assert Box(points=[{"x": 2}]) == Box(points=(Point(2),))  # type: ignore[arg-type]


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.sampled_from(sorted(_REGISTRY)),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["kind", "x", "size", "layers", "mixer", "vocab", "heads"]), inner, max_size=4
            )
        ),
        max_leaves=8,
    )
)
def test_any_plain_data_is_read_or_refused(data: Any) -> None:
    """Whatever stands in a file: a spec that writes itself back, or a SpecError; never another exception."""
    for slot in (ToySlot, ModelSpec):
        try:
            made = read(slot, data)
        except SpecError as e:
            assert str(e).startswith("spec")
        else:
            assert read(slot, made.to_dict()) == made


@pytest.mark.parametrize("text", ["", "{", "[1,", "{'kind': 1}", "nul"])
def test_broken_text_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(SpecError, match=r"^here: not JSON: .* at line \d+, column \d+"):
        Decoder.from_json(text, "here")


def test_broken_yaml_is_refused_in_one_line() -> None:
    with pytest.raises(SpecError, match=r"^here: not YAML: ") as refused:
        Decoder.from_yaml("a: [1,\nb: }", "here")
    assert "\n" not in str(refused.value)
    with pytest.raises(SpecError, match="^here: got None"):
        Decoder.from_yaml("", "here")


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(SpecError, match=r"spec\.kind: got 'encoder', expected decoder"):
        Decoder.from_json(MASKED.to_json())
    assert ModelSpec.from_json(MASKED.to_json()) == MASKED


# ---- but ------------------------------------------------------------------------------------------------------------


def test_but_changes_what_the_path_names_and_nothing_else() -> None:
    changed = DECODER.but(**{"layers.1.mixer.heads": 8, "embed.position": Sinusoid(), "vocab": 12})
    assert changed.layers[1].mixer == Attention(heads=8, mask=Mask(window=3))
    assert changed.embed == Embed(Sinusoid(), scaled=True) and changed.vocab == 12
    assert (changed.layers[0], changed.layers[2]) == (LAYER, LAYER)
    assert DECODER.layers[1].mixer == OTHER.mixer
    every = DECODER.but(**{"layers.*.dropout": 0.5})
    assert [layer.dropout for layer in every.layers] == [0.5] * 3
    assert DECODER.but(**{"layers.-1.place": "peri"}).layers[2].place == "peri"
    assert DECODER.but(**{"layers.*.mixer": {"kind": "attention", "heads": 2}}).layers[0].mixer == Attention(2)
    assert DECODER.but(**{"layers.0.norm": "layernorm"}).layers[0].norm == LayerNorm()
    assert DECODER.but() == DECODER


def test_but_checks_rules_when_all_changes_are_made() -> None:
    """Each of these alone breaks a rule; together, in either order, they don't."""
    tied = {"layers.0.mixer.kv_heads": 3, "layers.0.mixer.heads": 9}
    for changes in (tied, dict(reversed(tied.items()))):
        assert DECODER.but(**changes).layers[0].mixer == dataclasses.replace(LAYER.mixer, heads=9, kv_heads=3)
    for path, value in tied.items():
        with pytest.raises(SpecError):
            DECODER.but(**{path: value})
    later = DECODER.but(**{"layers.0.mixer.heads": 8, "layers.0.mixer": Attention(2), "layers.0.mixer.bias": True})
    assert later.layers[0].mixer == Attention(2, bias=True)
    with pytest.raises(SpecError, match=r"^layers\.0\.mixer\.kv_heads: got 3, expected"):
        DECODER.but(**{"layers.0.mixer.heads": 8, "layers.0.mixer.kv_heads": 3})


def test_a_key_that_is_written_twice_is_refused() -> None:
    for read_text, text in (
        (Layer.from_json, '{"kind": "layer", "place": "pre", "mixer": {"kind": "lstm"}, "place": "post"}'),
        (Layer.from_yaml, "kind: layer\nplace: pre\nmixer: {kind: lstm}\nplace: post\n"),
        (Layer.from_yaml, "kind: layer\nmixer: {kind: lstm, place: 1, place: 2}\n"),
    ):
        with pytest.raises(SpecError, match=r"here: 'place' is written twice in one mapping\. Remove one of them\."):
            read_text(text, "here")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("layers.*.mixer.heds", 4, "layers.0.mixer.heds: 'attention' has no such field; did you mean 'heads'?"),
        ("layers.3.mixer.heads", 4, "layers.3: expected a number from 0 to 2, or *."),
        ("layers.-4.mixer.heads", 4, "layers.-4: expected a number from 0 to 2, or *."),
        ("layers.first.mixer", 4, "layers.first: expected a number from 0 to 2, or *."),
        ("layers.0.mixer.heads", "4", "layers.0.mixer.heads: got '4' (str), expected int."),
        ("layers.0.mixer.heads", 3, "layers.0.mixer.kv_heads: got 2, expected a divisor of heads=3"),
        ("vocab.size", 3, "vocab.size: vocab is 11, which has no fields."),
        ("layers.0.mixer.qk_norm.eps", 3, "is None, which has no fields."),
        ("layers.0.place", "pst", "layers.0.place: got 'pst' (str), expected 'pre' | 'post'"),
        ("", 1, "has no such field"),
    ],
)
def test_but_refuses_what_does_not_fit(path: str, value: Any, says: str) -> None:
    with pytest.raises(SpecError) as refused:
        DECODER.but(**{path: value})
    assert says in str(refused.value)


def test_a_star_among_parts_is_every_part_that_has_the_rest_of_the_path() -> None:
    assert PAIR.but(**{"*.dim": 8}).decoder.dim == 8
    both = PAIR.but(**{"*.layers.*.dropout": 0.25})
    assert {layer.dropout for side in (both.encoder, both.decoder) for layer in side.layers} == {0.25}
    with pytest.raises(SpecError, match=r"^\*\.heads: \* stands for nothing here; no part has such a field"):
        DECODER.but(**{"*.heads": 3})


def test_a_brick_by_its_name_is_given_its_fields_by_later_changes() -> None:
    for first in ("mlp", {"kind": "mlp"}):
        changed = DECODER.but(**{"layers.0.ffn": first, "layers.0.ffn.hidden": 9})
        assert changed.layers[0].ffn == MLP(9)
    given = {"kind": "mlp", "hidden": 3}
    assert DECODER.but(**{"layers.0.ffn": given, "layers.0.ffn.hidden": 9}).layers[0].ffn == MLP(9)
    assert given == {"kind": "mlp", "hidden": 3}  # what was given is not written into
    with pytest.raises(SpecError, match=r"^layers\.0\.ffn\.hidden: missing; 'mlp' needs it"):
        DECODER.but(**{"layers.0.ffn": "mlp"})


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("layers.*.mixer.heads=4", "layers.*.mixer.heads", 4),
        ("a=1e-3", "a", 0.001),
        ("a=true", "a", True),
        ("a=null", "a", None),
        ("place=post", "place", "post"),
        (' a ={"kind": "rope"}', "a", {"kind": "rope"}),
        ("a=b=c", "a", "b=c"),
        ("a=", "a", ""),
    ],
)
def test_settings_of_the_command_line(text: str, path: str, value: Any) -> None:
    assert parse_setting(text) == (path, value)


@pytest.mark.parametrize("text", ["heads", "=4", "  =4"])
def test_a_setting_without_a_path_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="expected path=value"):
        parse_setting(text)


# ---- bricks of the user's own ---------------------------------------------------------------------------------------


def test_a_users_brick_joins_the_union_of_its_slot(registry: dict[str, type[Spec]]) -> None:
    from torch import nn

    @spec("my_norm")
    class MyNorm(NormSpec):
        """A norm of the user's own."""

        strength: float = 1.0

        def build(self, dim: int) -> nn.Module:
            """The module."""
            return nn.LayerNorm(dim)

    assert kinds_of(NormSpec)["my_norm"] is MyNorm and MyNorm.kind == "my_norm"
    mine = Layer(Attention(2), MLP(8), norm=MyNorm(2))
    assert Layer.from_json(mine.to_json()) == mine
    assert DECODER.but(**{"layers.*.norm": "my_norm"}).build()
    with pytest.raises(SpecError, match=r"layer\.norm\.kind: got 'my_nrm', expected Norm; did you mean 'my_norm'"):
        Layer(Attention(2), MLP(8), norm="my_nrm")  # type: ignore[arg-type]
    assert "my_norm" in json_schema(Layer)["$defs"]


def test_two_specs_with_one_name_are_refused(registry: dict[str, type[Spec]]) -> None:
    with pytest.raises(
        SpecError, match=r"@spec\('rmsnorm'\).*already belongs to brickformer\.norms\.RMSNorm. Choose another"
    ):

        @spec("rmsnorm")
        class Another(NormSpec):
            """A clash."""

            def build(self, dim: int) -> Any:
                """None."""

    assert kinds_of(NormSpec)["rmsnorm"] is RMSNorm


def test_a_slot_builds_nothing_and_has_no_kind() -> None:
    class Slot(Spec):
        """A slot."""

        __slots__ = ()

        @abstractmethod
        def build(self) -> int:
            """A number."""

    with pytest.raises(TypeError):
        Slot()  # type: ignore[abstract]
    assert Slot.kind == "" and kinds_of(Slot) == {}


# ---- JSON Schema ----------------------------------------------------------------------------------------------------


def test_the_schema_says_what_read_says() -> None:
    """A small validator, of the few words the schema uses, takes what `read` takes and refuses what `read` refuses."""
    schema = json.loads(json.dumps(json_schema(ModelSpec)))
    good = [it.to_dict() for it in (DECODER, PAIR, MASKED)]
    for data in good:
        assert _valid(data, schema, schema), data["kind"]
    for path, value in (("vocab", "11"), ("vocab", 1.5), ("kind", "x"), ("layers", {}), ("more", 1), ("embed", None)):
        for data in good:
            if data["kind"] != "encoder_decoder":
                assert not _valid({**data, path: value}, schema, schema), f"{path}={value!r}"
    toys = json_schema(ToySlot)
    for data, _ in WRONG:
        named = isinstance(data, dict) and "kind" in data and data.get("y") != data.get("y", 0)
        lucky = "13" in str(data)
        assert named or lucky or not _valid(data, toys, toys), data


def _valid(data: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    types: dict[str, Any] = {"integer": int, "number": (int, float), "boolean": bool, "string": str, "null": type(None)}
    if "$ref" in schema:
        return _valid(data, root["$defs"][schema["$ref"].split("/")[-1]], root)
    if "anyOf" in schema:
        return any(_valid(data, one, root) for one in schema["anyOf"])
    if "enum" in schema:
        return any(type(data) is type(one) and data == one for one in schema["enum"])
    if "const" in schema:
        return bool(data == schema["const"])
    if schema.get("type") == "array":
        if not isinstance(data, list) or len(data) < schema.get("minItems", 0):
            return False
        items = schema.get("prefixItems") or [schema["items"]] * len(data)
        return len(items) == len(data) and all(_valid(d, s, root) for d, s in zip(data, items, strict=True))
    if schema.get("type") == "object":
        known = schema["properties"]
        return (
            isinstance(data, dict)
            and set(schema["required"]) <= set(data) <= set(known)
            and all(_valid(v, known[k], root) for k, v in data.items())
        )
    return isinstance(data, types[schema["type"]]) and (schema["type"] == "boolean" or not isinstance(data, bool))


# ---- the public names -----------------------------------------------------------------------------------------------


def test_public_names_are_there() -> None:
    names = brickformer.__all__
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(brickformer, name) is not None
    assert set(names) <= set(dir(brickformer))
    with pytest.raises(AttributeError, match="NoSuchBrick"):
        brickformer.NoSuchBrick  # noqa: B018
