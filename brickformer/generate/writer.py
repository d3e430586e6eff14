"""Writer: what generation sees of a model: a decoder, an encoder where there is one, their limits and tokenizers.

The one place where the two kinds of models differ. A prompt of a decoder is the beginning of the text; a prompt of an
encoder-decoder is the source, and the target begins with `start`.
Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Final, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from brickformer.embed import Embed
from brickformer.errors import BrickError, DataError, StateError
from brickformer.generate.compile import Backend, CompiledStep
from brickformer.generate.pack import Packed
from brickformer.generate.result import Tokenizer
from brickformer.mask import EMPTY, Span
from brickformer.mixers.cross import Memory
from brickformer.models import AnyModel, DecoderModel, EncoderDecoderModel, EncoderModel
from brickformer.state import CacheType, StackState, check_cache

Prompt = Sequence[int] | str
"""Ids, or text for the tokenizer."""

WritingModel = DecoderModel | EncoderDecoderModel

SLOTS: Final = 4096
"""Slots that are set aside at most at the start, however long an answer may become."""


@final
class Writer:
    """A model that can write, and what it takes to write with it; every function of this package takes one.

    tokenizer: reads texts given as prompts and writes the text of answers. source_tokenizer: reads the texts, where
    that is another one. start: the tokens an encoder-decoder's target begins with. max_len: the most tokens the decoder
    is fed in a row, where that should be less than the model's own limit. compiled: see compile.py. cache: "int8" keeps
    keys and values in a quarter of the bytes, slightly rounded. packed: see pack.py; one prompt on a CPU is answered
    faster, for another copy of the decoder's matrices.
    Errors: BrickError for a model that cannot write (an encoder), for start tokens that do not fit it, and for packed
    weights in a compiled step.
    """

    def __init__(
        self,
        model: AnyModel,
        tokenizer: Tokenizer | None = None,
        *,
        source_tokenizer: Tokenizer | None = None,
        start: Sequence[int] = (),
        max_len: int | None = None,
        compiled: bool | Backend = False,
        cache: CacheType = "float",
        packed: bool = False,
    ) -> None:
        self.model: WritingModel
        match model:
            case DecoderModel():
                self.model, self.decoder, self.encoder = model, model, None
            case EncoderDecoderModel():
                self.model, self.decoder, self.encoder = model, model.decoder, model.encoder
            case EncoderModel():
                raise BrickError("generate: got an encoder, which writes nothing. Use a Decoder or an EncoderDecoder.")
        if max_len is not None and (type(max_len) is not int or max_len < 1):
            raise BrickError(f"generate: got max_len={max_len!r}, expected a whole number, at least 1.")
        check_cache(cache)
        if packed and compiled:
            raise BrickError(
                "generate: a compiled step does not read packed weights. Give compiled or packed, not both."
            )
        self.tokenizer, self.source_tokenizer = tokenizer, source_tokenizer or tokenizer
        self.vocab = self.decoder.spec.vocab
        self.limit = smallest(positions(self.decoder.spec.embed), max_len)
        self.start, self.cache = list(start), cache
        self.compiled = CompiledStep(self.decoder, "inductor" if compiled is True else compiled) if compiled else None
        self.packed = Packed(self.decoder) if packed else None
        self._single: DecoderModel | None = None  # the packed twin, once one row has been written
        self._check_start()

    @classmethod
    def of(cls, model: Writer | AnyModel) -> Writer:
        """A writer as it is; a model with nothing else."""
        return model if isinstance(model, Writer) else cls(model)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.decoder.embed.tokens.weight.device

    def given(self, prompt: Prompt) -> tuple[list[int], list[int] | None]:
        """What a prompt gives the decoder, and the encoder. Errors: DataError: empty, no token, past the limit."""
        ids = self._ids(prompt, self.source_tokenizer)
        if self.encoder is None:
            self._check("prompt", ids, self.vocab, self.limit, 0)
            return ids, None
        spec = self.encoder.spec
        self._check("source", ids, spec.vocab, positions(spec.embed), 0)
        return list(self.start), ids

    def reads(self, source: Sequence[int] | None) -> bool:
        """Whether the encoder has a place for every token of a source (None: there is no source to read)."""
        limit = None if self.encoder is None else positions(self.encoder.spec.embed)
        return source is None or limit is None or len(source) <= limit

    def more_ids(self, text: Prompt, written: int, *, last_is_fed: bool = True) -> list[int]:
        """Ids that go on after `written` tokens of the decoder; none is fine. Errors: DataError: no token, too many."""
        ids = self._ids(text, self.tokenizer)
        limit = None if self.limit is None else self.limit + (not last_is_fed)
        self._check("prompt" if last_is_fed else "answer", ids, self.vocab, limit, written)
        return ids

    @staticmethod
    def _ids(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
        if not isinstance(prompt, str):
            try:
                return [index(i) for i in prompt]
            except TypeError:
                raise DataError(f"prompt: got {prompt!r:.50}, expected a text or a list of ids (integers).") from None
        if tokenizer is None:
            raise DataError("prompt: got text without a tokenizer. Give Writer(model, tokenizer), or ids.")
        return tokenizer.encode(prompt)

    def _check_start(self) -> None:
        if self.encoder is None:
            if self.start:
                raise BrickError("generate: got start tokens for a decoder. Put them at the front of the prompts.")
        elif not self.start:
            raise BrickError("generate: an encoder-decoder needs the tokens a target begins with. Give start=[bos].")
        else:
            self._check("start", self.start, self.vocab, self.limit, 0)

    @staticmethod
    def _check(what: str, ids: list[int], vocab: int, limit: int | None, written: int) -> None:
        if not ids and not written:
            raise DataError(f"{what}: empty; expected at least one token.")
        for at, token in enumerate(ids, 1):
            if not 0 <= token < vocab:
                raise DataError(f"{what}, token {at}: got id {token}, expected 0 to {vocab - 1}.")
        if limit is not None and written + len(ids) > limit:
            raise DataError(
                f"{what}: {written + len(ids)} tokens, expected at most {limit} (the model's positions, or max_len). "
                f"Shorten it."
            )

    @property
    def spare(self) -> int:
        """Slots that are never written: one where a step that fills the last would have to be compiled anew."""
        return 0 if self.compiled is None else 1

    def init_state(self, batch: int, max_len: int) -> StackState:
        """An empty state of the decoder, its cache kept as asked for. Errors: StateError: more than memory holds."""
        self.repack()
        if max_len < EMPTY:
            try:
                return self.decoder.init_state(batch, max_len, cache=self.cache)
            except (RuntimeError, MemoryError) as e:
                if not isinstance(e, MemoryError | torch.OutOfMemoryError) and "allocate" not in str(e):
                    raise
        raise StateError(
            f"cache: got {batch} rows of {max_len} tokens, more than memory holds. Lower max_tokens, room or batch."
        )

    def repack(self) -> None:
        """A batch of answers begins: weights may have changed since the last one, and modules too."""
        self._single = None
        if self.compiled is not None:
            self.compiled.renew()

    def step(self, ids: Int[Tensor, "B 1"], state: StackState) -> Float[Tensor, "B V"]:
        """Logits after one more token a row."""
        if self.compiled is not None:
            return self.compiled(ids, state)
        decoder = self.decoder
        if self.packed is not None and len(ids) == 1:  # packed when first needed: a batch of rows never is
            self._single = self._single or self.packed.fresh()
            decoder = self._single
        return decoder.logits(decoder.hidden(ids, None, state))[:, -1]

    def read(self, sources: Sequence[Sequence[int]]) -> Memory:
        """The memory of some sources, padded on the right."""
        assert self.encoder is not None
        longest = max(map(len, sources))
        ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sources], device=self.device)
        if all(len(s) == longest for s in sources):
            return self.encoder.encode(ids)
        lengths = torch.tensor([len(s) for s in sources], device=self.device)
        return self.encoder.encode(ids, torch.arange(longest, device=self.device) < lengths[:, None])

    def pack(self, rows: Sequence[Sequence[int]], start: int = 0) -> tuple[Tensor, Span]:
        """Rows as one (B, T) table, padded on the left, and where its tokens sit. start: slots written before them."""
        longest = max(map(len, rows))
        ids = torch.tensor([[*[0] * (longest - len(row)), *row] for row in rows], device=self.device)
        if all(len(row) == longest for row in rows):
            return ids, Span(start, longest)
        padding = torch.tensor([longest - len(row) for row in rows], device=self.device)
        valid = torch.arange(longest, device=self.device) >= padding[:, None]
        return ids, Span.of(ids, start=start, valid=valid)


def positions(embed: Embed) -> int | None:
    """The most tokens an embedding can number; None without a limit."""
    return None if embed.position is None else embed.position.limit()


def room(writer: Writer, tokens: int, more: int) -> int:
    """Slots to set aside for `tokens` that are there and at most `more` to come; when these are full, ask again.

    Twice as many each time: what is read again is then less than what is written."""
    most = tokens + min(more, max(SLOTS, tokens))
    return smallest(most, writer.limit) or most


def smallest(*limits: int | None) -> int | None:
    """The smallest of some limits, None meaning none."""
    return min((n for n in limits if n is not None), default=None)


@final
class evaluating:  # noqa: N801  (a context manager, used like a function)
    """Dropout off inside; every module as it was afterwards. Cheap to enter again when nothing was training."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.training: list[nn.Module] | None = None

    def __enter__(self) -> None:
        if self.training is None or self.model.training:
            self.training = [m for m in self.model.modules() if m.training]
        for m in self.training:
            m.training = False

    def __exit__(self, *_: object) -> None:
        for m in self.training or []:
            m.training = True
