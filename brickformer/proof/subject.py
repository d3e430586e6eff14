"""The subject of a proof: one small model in float64, and one way to ask all three families.

Its parameters are shaken: initial values are too small and too regular to show what a brick does. Every call gives the
logits (vectors, for an encoder without a head); a decoder of an encoder-decoder reads a fixed source whose rows
differ in length.

Shapes: ids (B, T); S source tokens; logits (B, T, V).
"""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor, nn

from brickformer.attend import Attend
from brickformer.errors import BrickError
from brickformer.layers import Stack
from brickformer.mask import Span
from brickformer.mixers.cross import Memory
from brickformer.models import AnyModel, DecoderModel, EncoderDecoderModel, EncoderModel, ModelSpec
from brickformer.state import StackState

SEED: Final = 0


class Broken(AssertionError):  # noqa: N818  (a finding, not an error)
    """A property does not hold; the message has the numbers."""


@final
class Subject:
    """A small model under proof. allowed: how far two ways to the same number may differ.

    flex: the attentions that were asked to use FlexAttention; it is slow on a CPU and has no gradient there, so it is
    tried only where kernels are compared.
    """

    def __init__(self, spec: ModelSpec, tokens: int) -> None:
        self.spec, self.tokens = spec, tokens
        self.model = _built(spec, SEED).double()
        self.flex = off_flex(self.model)
        shake(self.model)
        self.allowed = 1e-9
        try:
            self.say(self.ids(1))
        except BrickError:
            raise
        except Exception:  # a brick that computes in one type only: asked in that one
            self.model = self.model.float()
            self.allowed = 1e-4
            self.say(self.ids(1))

    def again(self, seed: int = SEED) -> AnyModel:
        """Another model of the same spec with these parameters and buffers."""
        other = _built(self.spec, seed).to(next(self.model.parameters()).dtype)
        off_flex(other)
        other.load_state_dict(self.model.state_dict())
        return other

    def fresh(self) -> AnyModel:
        """As it starts training."""
        model = _built(self.spec, SEED)
        off_flex(model)
        return model

    @property
    def side(self) -> DecoderModel | EncoderModel:
        """The model that reads the sequence: the decoder of an encoder-decoder."""
        return self.model.decoder if isinstance(self.model, EncoderDecoderModel) else self.model

    @property
    def stacks(self) -> dict[str, Stack]:
        """Every stack by the beginning of its path in the spec."""
        if isinstance(self.model, EncoderDecoderModel):
            return {"encoder.": self.model.encoder.stack, "decoder.": self.model.decoder.stack}
        return {"": self.model.stack}

    @property
    def causal(self) -> bool:
        """Whether no mixer of the sequence sees the future."""
        return all(mixer.causal for mixer in self.side.stack.mixers())

    @property
    def decodes(self) -> bool:
        """Whether it goes on from a state."""
        return not isinstance(self.model, EncoderModel)

    def ids(self, rows: int, tokens: int | None = None, seed: int = 0) -> Tensor:
        """Random ids, (rows, tokens); the rows of a smaller batch are the first rows of a larger one."""
        drawn = torch.randint(0, self.side.spec.vocab, (8, 64), generator=torch.Generator().manual_seed(seed))
        return drawn[:rows, : tokens or self.tokens].contiguous()

    def source(self, rows: int) -> tuple[Tensor, Tensor]:
        """Source ids and where they are real, (rows, S): odd rows are shorter."""
        length = min(7, self.tokens)
        valid = torch.ones(8, length, dtype=torch.bool)
        valid[1::2, length - length // 3 :] = False
        return self.ids(rows, length, seed=5), valid[:rows]

    def empty(self, rows: int) -> StackState:
        """An empty state. Errors: StateError where the model keeps none."""
        stack, weight = self.side.stack, self.side.embed.tokens.weight
        return stack.init_state(rows, self.tokens, device=weight.device, dtype=weight.dtype)

    def memory(self, rows: int, model: AnyModel | None = None) -> Memory | None:
        """The memory of the source; None for models without one."""
        model = model or self.model
        return model.encode(*self.source(rows)) if isinstance(model, EncoderDecoderModel) else None

    def say(
        self,
        ids: Tensor,
        at: Span | None = None,
        state: StackState | None = None,
        memory: Memory | None = None,
        model: AnyModel | None = None,
    ) -> Tensor:
        """Logits by the model's own call; without a state or a memory given, of the source as it is."""
        match model or self.model:
            case DecoderModel() as decoder:
                return decoder(ids, at, state)
            case EncoderDecoderModel() as both:
                if memory is None and (state is None or state.length == 0):
                    memory = self.memory(len(ids), both)
                return both.decode(ids, memory, at, state)
            case EncoderModel() as encoder:
                h = encoder(ids, None if at is None else at.real())
                return h if encoder.head is None else encoder.logits(h)


def _built(spec: ModelSpec, seed: int) -> AnyModel:
    torch.manual_seed(seed)
    return spec.build().eval()


def off_flex(module: nn.Module) -> frozenset[Attend]:
    """Let every attention take what a CPU is good at; those that were told to use FlexAttention."""
    told = frozenset(m for m in module.modules() if isinstance(m, Attend) and m.backend == "flex")
    for attend in told:
        attend.backend = "auto"
    return told


def shake(model: nn.Module) -> None:
    """Noise on every parameter, the same each time."""
    noise = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            size = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.data.add_(
                (torch.randn(parameter.shape, generator=noise, dtype=torch.float64) * size).to(parameter)
            )


def worst(got: Tensor, expected: Tensor, what: str) -> tuple[float, int]:
    """How far (..., T, V) differ at most, as a part of max(1, |expected|), and at which token. Errors: Broken."""
    if got.shape != expected.shape:
        raise Broken(f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if not bool(got.isfinite().all()):
        raise Broken(f"{what}: not finite")
    if not got.numel():
        return 0.0, 0
    off = ((got - expected).abs() / expected.abs().clamp_min(1.0)).amax(-1)
    off = off.flatten(0, -2).amax(0) if off.ndim > 1 else off  # of each token, in its worst row
    token = int(off.argmax())
    return float(off[token]), token


def number(x: float) -> str:
    """0, 3e-16, 0.013, 5.7."""
    return "0" if x == 0.0 else f"{x:.2g}"


def short(name: str) -> str:
    """The end of a parameter's name, inside its layer."""
    return name.partition("stack.layers.")[2].partition(".")[2] or name
