"""A model without numbers: every shape is there, no memory is used, so that the largest is looked at in a moment.

Parameters go to torch's meta device at the moment they are registered. (Building under `torch.device("meta")` would put
every tensor there, also those that a brick computes its settings from, and reads.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from brickformer.models import AnyModel, ModelSpec


def shapes_of(spec: ModelSpec) -> AnyModel:
    """The model of a spec on the meta device. Errors: SpecError, as its build."""
    with _parameters_on_meta():
        model = spec.build()
    return model.to("meta")  # buffers too: from now on everything computes shapes


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
