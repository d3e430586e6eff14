"""Text piece by piece: no character is split, the pieces are the text, and nothing of a stop string gets out."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import tokenizers
import torch
from generate.worlds import PROMPTS, Letters, decoder, encoder_decoder, naive_greedy
from hypothesis import given
from hypothesis import strategies as st

from brickformer.errors import BrickError
from brickformer.generate import GREEDY, Sampling, Stop, Writer, generate, stream
from brickformer.generate.text import Detokenizer
from brickformer.tasks.pretrained import PretrainedTokenizer


class Pieces:
    """A byte-level tokenizer: id i is any run of bytes; bytes that are no character decode to U+FFFD."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.vocab = len(pieces)

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


class Words(Letters):
    """Spaces between words; id 0 has no text."""

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.alphabet[i - 1] * 2 for i in ids if i)


TEXT = st.text(alphabet=st.sampled_from("aé中🙂\u0301 \n\u200d"), max_size=12)


@given(TEXT, st.lists(st.integers(1, 5), min_size=60, max_size=60))
def test_bytes_cut_anywhere_give_whole_characters(text: str, cuts: list[int]) -> None:
    data, pieces = text.encode(), []
    while data:
        n = cuts.pop()
        pieces.append(data[:n])
        data = data[n:]
    writer = Detokenizer(Pieces(pieces))
    out = [writer.push(i) for i in range(len(pieces))]
    so_far, read = "", b""
    for piece, part in zip(out, pieces, strict=True):
        read += part
        so_far += piece
        assert "\ufffd" not in piece
        whole = read.decode("utf-8", errors="ignore")
        assert whole.startswith(so_far)
        assert so_far == whole or whole.encode() != read, "nothing is held back where a character ends"
    assert "".join(out) + writer.finish() == text == writer.text


@given(st.lists(st.sampled_from([b"a", b"\xe4", b"\xb8", b"\xad", b"\xff", b"b\xe4\xb8"]), max_size=12))
def test_bytes_that_are_no_text_come_out_as_they_decode(pieces: list[bytes]) -> None:
    writer = Detokenizer(Pieces(pieces))
    out = "".join(writer.push(i) for i in range(len(pieces))) + writer.finish()
    assert out == b"".join(pieces).decode("utf-8", errors="replace")


@given(st.lists(st.integers(0, 4), max_size=12))
def test_spaces_between_words_and_tokens_without_text(ids: list[int]) -> None:
    writer = Detokenizer(Words())
    assert "".join([writer.push(i) for i in ids] + [writer.finish()]) == Words().decode(ids)


@given(st.lists(st.integers(1, 3), max_size=14), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_text_is_cut_before_the_first_stop_string(ids: list[int], stops: list[str]) -> None:
    """What is released after each token never has to be taken back."""
    writer, text, released = Detokenizer(Letters(), stops), "", ""
    for i in ids:
        text += Letters().decode([i])
        at = min((text.find(s) for s in stops if s in text), default=None)
        released += writer.push(i)
        assert writer.stopped == (at is not None)
        if at is not None:
            assert released == text[:at] == writer.text and writer.finish() == ""
            return
        assert text.startswith(released) and len(text) - len(released) < max(map(len, stops), default=1)
    assert released + writer.finish() == text == writer.text


def test_a_real_byte_level_tokenizer_streams_its_text() -> None:
    """Trained on a little text, so that characters outside it fall apart into bytes."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    text = "the 狐 jumps: 🦊🦊 é"
    ids = bpe.encode(text).ids
    assert len(ids) > len(text)

    class Bytes:
        vocab = bpe.get_vocab_size()
        encode = staticmethod(lambda text: bpe.encode(text).ids)
        decode = staticmethod(lambda ids: bpe.decode(list(ids)))

    writer = Detokenizer(Bytes())
    pieces = [writer.push(i) for i in ids] + [writer.finish()]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert "狐" in pieces and sum(p == "🦊" for p in pieces) == 2


def fallback() -> PretrainedTokenizer:
    """A vocabulary that falls back to bytes: one broken byte makes the good ones around it decode as broken too."""
    known = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "好"]
    bpe = tokenizers.models.BPE(
        vocab={t: i for i, t in enumerate(known)}, merges=[], unk_token="<unk>", byte_fallback=True
    )
    inner = tokenizers.Tokenizer(bpe)
    inner.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    inner.decoder = tokenizers.decoders.Sequence(parts)
    return PretrainedTokenizer({"tokenizer.json": inner.to_str()})


def test_bytes_of_a_vocabulary_are_whole_characters() -> None:
    known, text = fallback(), "a 好 é🦊 e\u0301b 你"
    ids = known.encode(text)
    assert len(ids) > len(text) + 6
    writer = Detokenizer(known)
    pieces = [writer.push(i) for i in ids] + [writer.finish()]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces) and "🦊" in pieces and "你" in pieces


def test_a_broken_byte_spoils_no_character_that_was_written() -> None:
    known = fallback()
    e, broken, a = known.encode("é"), known.encode("你")[:1], known.encode("a")
    assert known.decode([*e, *broken, *a]) == "\ufffd\ufffd\ufffda", "the whole loses the é"
    writer = Detokenizer(known)
    assert [writer.push(i) for i in (*e, *broken, *a)] == ["", "é", "", "\ufffda"]
    assert writer.finish() == ""


# ---- the stream


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=2)])
def test_a_stream_is_the_text_of_generate(sampling: Sampling) -> None:
    model = decoder()
    pieces = [
        b"a",
        b"\xe4",
        b"\xb8",
        b"\xad",
        "é".encode(),
        b"\xc3",
        b"\xa9",
        b" ",
        *(bytes([98 + i]) for i in range(9)),
    ]
    for tokenizer in (Pieces(pieces), Letters(), Words()):
        writer = Writer(model, tokenizer)
        expected = generate(writer, PROMPTS[:1], sampling, Stop(max_tokens=30)).results[0]
        s = stream(writer, PROMPTS[0], sampling, Stop(max_tokens=30))
        out = list(s)
        assert "".join(out) == expected.text and all(out)
        assert s.result == expected
        assert s.stats.decode_tokens == 29


def test_a_stream_stops_before_a_stop_string_and_at_a_stop_id() -> None:
    writer = Writer(encoder_decoder(), Letters(), start=[1])
    ids = naive_greedy(writer, PROMPTS[0], 12)[0]
    text = Letters().decode(ids)
    stop = text[3:6]
    s = stream(writer, PROMPTS[0], GREEDY, Stop(max_tokens=12, texts=(stop,)))
    assert "".join(s) == text[: text.index(stop)] == s.result.text and s.result.finish == "stop"
    s = stream(writer, PROMPTS[0], GREEDY, Stop(max_tokens=12, ids=(ids[4],)))
    assert "".join(s) == Letters().decode(ids[: ids.index(ids[4])])


def test_nothing_leaks_between_pieces() -> None:
    """Not inference mode, not eval mode: also when the reader walks away."""
    model = decoder().train()
    s = stream(Writer(model, Letters()), "bcd", GREEDY, Stop(max_tokens=8))
    next(s)
    assert model.training and not torch.is_inference_mode_enabled()
    assert torch.ones(1, requires_grad=True).mul(2).requires_grad


def test_a_prompt_that_cannot_be_answered_streams_nothing() -> None:
    s = stream(Writer(decoder(), Letters()), "")
    assert list(s) == [] and "empty" in str(s.result.error) and s.result.finish == "error"
    with pytest.raises(BrickError, match="no tokenizer"):
        stream(Writer(decoder()), [1, 2])
