"""JSON Schema of specs: what an editor needs to complete and check a spec file as it is typed."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin

from brickformer.spec import Spec, fields_of, kinds_of, plain


def json_schema(expected: Any) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a spec class, a slot, or any type a field may have."""
    defs: dict[str, Any] = {}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_schema(expected, defs), "$defs": defs}


def _schema(t: Any, defs: dict[str, Any]) -> dict[str, Any]:
    origin = get_origin(t)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(a, defs) for a in get_args(t)]}
    if origin is Literal:
        return {"enum": list(get_args(t))}
    if origin is tuple:
        args = get_args(t)
        if len(args) == 2 and args[1] is Ellipsis:
            return {"type": "array", "items": _schema(args[0], defs)}
        fixed = [_schema(a, defs) for a in args]
        return {"type": "array", "prefixItems": fixed, "minItems": len(args), "maxItems": len(args)}
    if isinstance(t, type) and issubclass(t, Spec):
        for kind, cls in kinds_of(t).items():
            if kind not in defs:
                defs[kind] = {}  # placeholder: a brick may contain its own slot
                defs[kind] = _object_schema(kind, cls, defs)
        return {"anyOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds_of(t)]}
    scalars: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}
    return {"type": scalars[t]}


def _object_schema(kind: str, cls: type[Spec], defs: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {"kind": {"const": kind}}
    required = ["kind"]
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        properties[f.name] = _schema(fields_of(cls)[f.name], defs)
        if f.default is not dataclasses.MISSING:
            properties[f.name] = {**properties[f.name], "default": plain(f.default)}
        elif f.default_factory is dataclasses.MISSING:
            required.append(f.name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
