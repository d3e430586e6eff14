"""A model without numbers: every shape is there, no memory is used, so that the largest is looked at in a moment.

Parameters go to torch's meta device at the moment they are registered. (Building under `torch.device("meta")` would put
every tensor there, also those that a brick computes its settings from, and reads.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from brickformer.errors import BrickError, SpecError
from brickformer.models import AnyModel, ModelSpec


def shapes_of(spec: ModelSpec) -> AnyModel:
    """The model of a spec on the meta device. Errors: SpecError, as its build."""
    return unfilled(spec).to("meta")  # buffers too: from now on everything computes shapes


def unfilled(spec: ModelSpec) -> AnyModel:
    """The same with its buffers: what bricks compute for themselves (tables, slopes) is there, and each parameter, on
    the meta device, waits to be put in its place by whoever has its numbers. Errors: SpecError, as its build.
    """
    try:
        with _parameters_on_meta(), _Undrawn():
            return spec.build()
    except BrickError:
        raise
    except Exception as e:  # whatever a brick of somebody's own raises
        text = " ".join(str(e).split())
        raise SpecError(f"{spec.kind}: cannot be built: {type(e).__name__}: {text[:160]}") from e


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


_DRAWING = {Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_}
_DRAWING |= {nn.init.kaiming_uniform_, nn.init.kaiming_normal_, nn.init.xavier_uniform_, nn.init.xavier_normal_}


class _Undrawn(TorchFunctionMode):
    """Initial values of a tensor without data are not drawn: torch would load its compiler, half a second, to do so."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWING:
            tensor: Tensor = args[0] if args else kwargs["tensor"]
            if tensor.device.type == "meta":
                return tensor
        return func(*args, **kwargs)
