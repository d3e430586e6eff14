"""A run as data: what is learnt, by which model, how it is trained.

    Run = task + model + train + seed + name

The vocabulary of a model is known only when the data is: a recipe writes `FROM_DATA` for it, and `completed` fills in
what the tokenizers have. `forward` is what training calls: a batch of the task in, logits out.
"""

from __future__ import annotations

from typing import Final, final

from torch import Tensor, nn

from brickformer.errors import SpecError
from brickformer.mask import Span
from brickformer.models import Decoder, DecoderModel, EncoderDecoder, EncoderDecoderModel, ModelSpec
from brickformer.spec import Spec, spec
from brickformer.tasks.batch import Batch
from brickformer.tasks.task import Data, Task
from brickformer.train.settings import Training

FROM_DATA: Final = 1
"""A vocabulary still to be taken from the data; one token would leave nothing to choose from."""


@final
@spec("run")
class Run(Spec):
    """Everything that decides how a run goes.

    task: what is learnt. model: what learns it; its vocabulary may be FROM_DATA. train: how. seed: of the data, the
    initial values and the dropout. name: of its folder. answers: how many held-out sequences a validation answers in
    full, to count those that are exactly right.
    """

    task: Task
    model: ModelSpec
    train: Training = Training()
    seed: int = 0
    name: str = "run"
    answers: int = 500

    def check(self) -> None:
        """A seed that every generator takes, some answers."""
        if not 0 <= self.seed < 2**63:
            raise self.refuse("seed", "0 or more, below 2 to the power of 63")
        if self.answers < 1:
            raise self.refuse("answers", "1 or more")


def completed(run: Run, data: Data) -> Run:
    """The run with the vocabularies of its data. Errors: SpecError when model and task do not fit each other."""
    model, task = run.model, run.task.kind
    match model:
        case EncoderDecoder():
            if data.source is None:
                raise SpecError(
                    f"model: an encoder_decoder needs a source to read, and {task!r} has none. Use a decoder."
                )
            encoder = model.encoder.but(vocab=_vocab(model.encoder.vocab, data.source.vocab, "model.encoder.vocab"))
            decoder = model.decoder.but(vocab=_vocab(model.decoder.vocab, data.target.vocab, "model.decoder.vocab"))
            model = EncoderDecoder(encoder, decoder, shared=model.shared)
        case Decoder():
            if data.source is not None:
                raise SpecError(
                    f"model: {task!r} has a source to read, and a decoder reads none. Use an encoder_decoder."
                )
            model = model.but(vocab=_vocab(model.vocab, data.target.vocab, "model.vocab"))
        case _:
            raise SpecError(f"model: {task!r} is learnt by a decoder or an encoder_decoder; got {model.kind!r}.")
    return run.but(model=model)


def _vocab(asked: int, known: int, path: str) -> int:
    """The vocabulary to build: that of the data, or a larger one that was asked for."""
    if asked == FROM_DATA:
        return known
    if asked < known:
        raise SpecError(f"{path}: got {asked}, expected at least {known}, the tokens in the data. Leave it out to fit.")
    return asked


def check_lengths(model: nn.Module, data: Data) -> None:
    """Let the position tables meet the longest row now and not after an hour. Errors: BrickError naming the table."""
    match model:
        case EncoderDecoderModel():
            embeds = [(model.encoder.embed, data.max_source), (model.decoder.embed, data.max_target)]
        case DecoderModel():
            embeds = [(model.embed, data.max_target)]
        case _:
            embeds = []
    for embed, longest in embeds:
        ids = embed.tokens.weight.new_zeros(1, longest).long()
        embed(ids, Span(0, longest))


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Teacher forcing: the logits (B, T, V) of a batch, wherever the model is."""
    device = next(model.parameters()).device
    batch = batch.to(device)
    match model:
        case EncoderDecoderModel():
            assert batch.src is not None, "completed() lets no other task through"
            out: Tensor = model(batch.src, batch.inputs, batch.src_valid)
            return out
        case DecoderModel():
            out = model(batch.inputs, None if batch.valid is None else Span.of(batch.inputs, valid=batch.valid))
            return out
        case _:
            raise AssertionError(f"completed() lets no {type(model).__name__} through")
