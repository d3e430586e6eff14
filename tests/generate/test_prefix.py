"""A prompt read once goes on like one read again, from memory and from a file; a file of another model is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from generate.worlds import DECODERS, WRITERS, Letters, decoder, encoder_decoder, naive_greedy

from brickformer.errors import BrickError, DataError, RunError, StateError
from brickformer.generate import GREEDY, Prefix, Sampling, Stop, Writer, generate, read_prompt, stream
from brickformer.generate.prefix import checksum
from brickformer.layers import Layer
from brickformer.mask import Mask
from brickformer.mixers.attention import Attention
from brickformer.mixers.base import MixerSpec
from brickformer.mixers.delta import GatedDelta
from brickformer.mixers.differential import DifferentialAttention
from brickformer.mixers.latent import LatentAttention
from brickformer.mixers.lstm import LSTM
from brickformer.mixers.mamba import Mamba
from brickformer.mixers.mamba2 import Mamba2
from brickformer.mixers.shortconv import ShortConv
from brickformer.models import Decoder
from brickformer.positions import Rope
from brickformer.state import CacheType

HEAD = [3, 4, 5, 6, 7]
RESTS = [[], [1], [8, 9, 2]]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("where", ["memory", "file"])
def test_going_on_is_reading_it_all(kind: str, where: str, tmp_path: Path) -> None:
    """For an encoder-decoder the prefix is the source, and what goes on is the target."""
    writer = WRITERS[kind]()
    prefix = read_prompt(writer, HEAD, room=12)
    if where == "file":
        prefix.save(tmp_path / "a.safetensors")
        prefix = Prefix.load(tmp_path / "a.safetensors", writer)
        assert prefix.tokens == (HEAD if kind != "encoder-decoder" else [1])
    for use_cache in (True, False):
        made = generate(writer, RESTS, GREEDY, Stop(max_tokens=7), prefix=prefix, use_cache=use_cache)
        for rest, result in zip(RESTS, made.results, strict=True):
            if kind != "encoder-decoder":
                expected = naive_greedy(writer, [*HEAD, *rest], 7)
            else:
                expected = naive_greedy(Writer(writer.model, start=[1, *rest]), HEAD, 7)
            assert result.tokens == expected[0]
            assert result.logprobs == pytest.approx(expected[1], abs=1e-9)
    assert generate(writer, [[]], GREEDY, Stop(max_tokens=7), prefix=prefix).stats.prompt_tokens == 0


def test_it_is_not_used_up() -> None:
    writer = Writer(decoder())
    prefix, settings = read_prompt(writer, HEAD), Sampling(temperature=1.0)
    first = generate(writer, RESTS, settings, Stop(max_tokens=5), prefix=prefix, samples=2).results
    assert first == generate(writer, RESTS, settings, Stop(max_tokens=5), prefix=prefix, samples=2).results
    assert len({tuple(r.tokens) for r in first}) > 3


def test_more_than_its_room_is_read_again() -> None:
    """Slower, not wrong: in the middle of the answers, and at once when the rest does not fit."""
    writer = WRITERS["encoder-decoder"]()
    small = read_prompt(writer, HEAD, room=2)
    made = generate(writer, [[], [4, 4]], GREEDY, Stop(max_tokens=9), prefix=small)
    assert made.results[0].tokens == naive_greedy(writer, HEAD, 9)[0]
    assert made.results[1].tokens == naive_greedy(Writer(writer.model, start=[1, 4, 4]), HEAD, 9)[0]
    writer = Writer(decoder())
    for room in (0, 1, 3):
        made = generate(writer, RESTS, GREEDY, Stop(max_tokens=6), prefix=read_prompt(writer, HEAD, room=room))
        assert [r.tokens for r in made.results] == [naive_greedy(writer, [*HEAD, *r], 6)[0] for r in RESTS]


def test_a_file_holds_what_was_written_and_not_the_room(tmp_path: Path) -> None:
    writer = Writer(decoder())
    sizes = []
    for room in (10, 10_000):
        read_prompt(writer, HEAD, room=room).save(tmp_path / "a")
        sizes.append((tmp_path / "a").stat().st_size)
    assert sizes[1] - sizes[0] < 100
    assert [p.name for p in tmp_path.iterdir()] == ["a"], "nothing half-written is left"


def test_text_goes_on_and_streams() -> None:
    writer = Writer(decoder(), Letters())
    prefix = read_prompt(writer, "cdefg")
    expected = generate(writer, ["cdefgab"], GREEDY, Stop(max_tokens=6)).results[0].text
    assert generate(writer, ["ab"], GREEDY, Stop(max_tokens=6), prefix=prefix).results[0].text == expected
    assert "".join(stream(writer, "ab", GREEDY, Stop(max_tokens=6), prefix=prefix)) == expected


def test_a_bad_rest_is_an_error_of_its_row() -> None:
    writer = Writer(decoder(), max_len=8)
    made = generate(writer, [[1], [99], [1] * 4], GREEDY, Stop(max_tokens=3), prefix=read_prompt(writer, HEAD))
    assert made.results[0].tokens == naive_greedy(writer, [*HEAD, 1], 3)[0]
    assert "got id 99" in str(made.results[1].error) and "9 tokens, expected at most 8" in str(made.results[2].error)


def other_weights() -> Writer:
    """The same spec; one number of one matrix differs."""
    model = decoder()
    with torch.no_grad():
        model.stack.layers[1].ffn.out.weight[3, 5] += 1e-3
    return Writer(model)


OTHERS: dict[str, Callable[[], Writer]] = {
    "another seed": lambda: Writer(decoder(seed=1)),
    "one weight": other_weights,
    "another mixer": lambda: Writer(DECODERS["window"]()),
    "another depth": lambda: Writer(decoder(depth=3)),
    "half the digits": lambda: Writer(decoder().float()),
    "another kind": lambda: Writer(encoder_decoder(), start=[1]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_refuses_it(other: str, tmp_path: Path) -> None:
    prefix = read_prompt(decoder(), HEAD)
    prefix.save(tmp_path / "a.safetensors")
    with pytest.raises(StateError, match="another model"):
        Prefix.load(tmp_path / "a.safetensors", OTHERS[other]())
    with pytest.raises(StateError, match="another model"):
        generate(OTHERS[other](), [[]], prefix=prefix)


def seal(tensors: dict[str, torch.Tensor], path: Path, header: dict[str, str]) -> None:
    """A file that claims to be what was written."""
    header = {name: text for name, text in header.items() if name != "sum"}
    safetensors.torch.save_file(tensors, path, {**header, "sum": checksum(header, tensors)})


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    with safetensors.safe_open(path, "pt") as file:
        header = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    match how:
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_bytes(b"tokens\n" * 50)
        case "no header":
            safetensors.torch.save_file(tensors, path)
        case "a tensor less":
            tensors.pop(sorted(tensors)[0])
            seal(tensors, path, header)
        case "another shape":
            name = next(n for n in tensors if n.endswith(".k"))
            tensors[name] = torch.zeros(1, 2, 90, 9, dtype=tensors[name].dtype)
            seal(tensors, path, header)
        case "a field more":
            numbers = json.loads(header["numbers"])
            numbers["0.mixer"]["surprise"] = {"is": 1}
            seal(tensors, path, {**header, "numbers": json.dumps(numbers)})
        case "a layer less":
            numbers = json.loads(header["numbers"])
            del numbers["1.mixer"]
            seal(tensors, path, {**header, "numbers": json.dumps(numbers)})
        case "another version":
            safetensors.torch.save_file(tensors, path, {**header, "format": "brickformer prompt 99"})
        case "gone":
            path.unlink()


@pytest.mark.parametrize(
    "how",
    ["cut", "empty", "text", "no header", "a tensor less", "another shape", "a field more", "a layer less",
     "another version", "gone"],
)  # fmt: skip
def test_a_damaged_file_is_refused_in_one_line(how: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    read_prompt(decoder(), HEAD).save(path)
    damage(path, how)
    with pytest.raises(StateError) as error:
        Prefix.load(path, decoder())
    assert str(path) in str(error.value) and str(error.value).count("\n") == 0


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be written"):
        read_prompt(decoder(), HEAD).save(tmp_path / "missing" / "a.safetensors")


def test_a_prompt_that_cannot_be_read_is_an_error() -> None:
    for prompt, message in (([], "empty"), ([99], "got id 99")):
        with pytest.raises(DataError, match=message):
            read_prompt(decoder(), prompt)
    with pytest.raises(BrickError, match="start"):
        read_prompt(encoder_decoder(), [1])


@pytest.mark.parametrize(
    "mixer",
    [
        LSTM(),
        Mamba(state=3),
        Mamba2(head_dim=8, state=4),
        GatedDelta(heads=2),
        ShortConv(LSTM(), kernel=3),
        LatentAttention(2, rank=6, rope_dim=2),
        DifferentialAttention(2),
        Attention(2, mask=Mask(window=2)),
    ],
    ids=lambda mixer: mixer.kind,
)
@pytest.mark.parametrize("cache", ["float", "int8"])
def test_a_file_keeps_the_state_of_every_mixer(mixer: MixerSpec, cache: CacheType, tmp_path: Path) -> None:
    spec = Decoder(vocab=11, dim=16, layers=(Layer(mixer), Layer(Attention(2, position=Rope()))))
    writer = Writer(spec.build().double().eval(), cache=cache)
    read_prompt(writer, HEAD, room=9).save(tmp_path / "a")
    kept = Prefix.load(tmp_path / "a", writer)
    made = generate(writer, RESTS, stop=Stop(max_tokens=6), prefix=kept).results
    again = generate(writer, [[*HEAD, *rest] for rest in RESTS], stop=Stop(max_tokens=6)).results
    assert [r.tokens for r in made] == [r.tokens for r in again] and not any(r.error for r in made)


def test_one_altered_bit_is_noticed(tmp_path: Path) -> None:
    """Wherever it is: in the tokens, in a number of the header, in a key or a value."""
    path, model = tmp_path / "a.safetensors", decoder(depth=1)
    read_prompt(model, HEAD, room=2).save(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), len(whole) // 150):
        altered = bytearray(whole)
        altered[at] ^= 1 << at % 8
        path.write_bytes(altered)
        with pytest.raises(StateError) as error:
            Prefix.load(path, model)
        assert "\n" not in str(error.value)
    path.write_bytes(whole)
    assert Prefix.load(path, model).tokens == HEAD


def test_a_process_that_dies_while_saving_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "a.safetensors", decoder()
    read_prompt(model, HEAD).save(path)

    def dies(file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", dies)
    with pytest.raises(KeyboardInterrupt):
        read_prompt(model, [1, 2]).save(path)
    assert Prefix.load(path, model).tokens == HEAD
    assert list(tmp_path.iterdir()) == [path]


def test_keys_kept_as_int8_go_on_as_int8() -> None:
    kept = read_prompt(Writer(decoder(), cache="int8"), HEAD)
    with pytest.raises(StateError, match="cache='int8'"):
        generate(Writer(decoder()), [[]], prefix=kept)
