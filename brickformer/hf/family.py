"""A family: how one kind of published model is said in bricks.

Three functions, and everything else follows (see docs/huggingface.md, "a new family"):

    read(config)  -> spec        their configuration as ours; asks for every field that changes the computation
    guess(spec)   -> fields      ours as theirs, for a spec that may not fit at all: it takes what it finds
    table(spec)   -> lines       names of tensors, both ways (table.py)

`guess` need not judge. A spec fits a family when read(guess(spec)) is that spec again, which `fit.py` checks field by
field; where it is not, the first difference is the brick that has no place in the family, and read(guess(spec)) is the
nearest spec that has. So nothing is dropped on the way out, and no family says twice what it can do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from brickformer.hf.config import Config
from brickformer.hf.table import Table
from brickformer.models import Decoder, ModelSpec
from brickformer.spec import Spec

S = TypeVar("S", bound=Spec)


@final
@dataclass(frozen=True, slots=True)
class Family:
    """One model_type.

    model_type: as config.json names it. architecture: the class that `guess` is for; a spec may need another one, which
    `guess` then gives as "architectures". others: further classes whose checkpoints `read` and `table` know. body: the
    prefix of everything but the head, which a checkpoint of the body alone leaves out. kind: what it is a model of.
    silent: fields of the configuration that change nothing here. ignored: patterns of names of tensors that hold
    nothing, as masks and rotary rates. constant: fields written into every configuration.
    """

    model_type: str
    architecture: str
    read: Callable[[Config], ModelSpec]
    guess: Callable[[Any], dict[str, Any]]
    table: Callable[[Any], Table]
    body: str = "model."
    kind: type[ModelSpec] = Decoder
    others: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    constant: Mapping[str, Any] = field(default_factory=dict)

    @property
    def proof(self) -> str:
        """The file of the tests that compare it with their library; its cases there begin with its name."""
        return f"tests/hf/test_{'decoders' if self.kind is Decoder else 'encoders'}.py"

    def spec(self, data: Mapping[str, Any], where: str = "config.json", tensors: Collection[str] = ()) -> ModelSpec:
        """The spec that a configuration describes. tensors: the names of its weights, where they are known.

        Errors: SpecError: a field missing, wrong, or not understood.
        """
        config = Config(data, where, tensors)
        known = (self.architecture, *self.others)
        if config.architecture and config.architecture not in known:
            raise config.refuse("architectures", " or ".join(known), "Other heads and tasks have no table.")
        config.skip(*self.silent)
        spec = self.read(config)
        config.finish()
        return spec


def first(spec: Spec, kind: type[S], default: S) -> S:
    """The first part of that kind in a spec, else the default: what a `guess` takes its fields from."""
    return next((part for part in spec.parts() if isinstance(part, kind)), default)
