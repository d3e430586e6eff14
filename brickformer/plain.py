"""JSON and YAML text as plain data, strictly: what a lenient reader drops or dies of is an error with the place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from brickformer.errors import SpecError


def json_data(text: str, where: str) -> Any:
    """JSON text as plain data. Errors: SpecError: not JSON, a key written twice, nested too deeply."""
    try:
        return json.loads(text, object_pairs_hook=partial(_once, where=where))
    except json.JSONDecodeError as e:
        raise SpecError(f"{where}: not JSON: {e.msg} at line {e.lineno}, column {e.colno}.") from None
    except RecursionError:
        raise SpecError(f"{where}: nested too deeply to be a spec.") from None


def yaml_data(text: str, where: str) -> Any:
    """YAML text as plain data; nothing but plain data is made. Errors: SpecError as `json_data`."""
    import yaml

    try:
        return yaml.load(text, Loader=_yaml_loader(where))
    except yaml.YAMLError as e:
        raise SpecError(f"{where}: not YAML: {' '.join(str(e).split())}") from None
    except RecursionError:
        raise SpecError(f"{where}: nested too deeply to be a spec.") from None


def _once(pairs: Sequence[tuple[Any, Any]], where: str) -> dict[Any, Any]:
    """A mapping as it is written, unless a key is written twice: one of the two would be dropped."""
    out: dict[Any, Any] = {}
    for key, value in pairs:
        if key in out:
            raise SpecError(f"{where}: {key!r} is written twice in one mapping. Remove one of them.")
        out[key] = value
    return out


def _yaml_loader(where: str) -> type:
    """YAML's safe loader, which by itself keeps the last of two equal keys."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _once([(self.construct_object(key, deep=True), None) for key, _ in node.value], where)
            return dict(super().construct_mapping(node, deep))

    return Loader
