"""Rotary positions of a configuration: `rope_parameters` of today, `rope_theta` and `rope_scaling` of before.

read_rope(config, width)  ->  Rope            width: of a head; part of it may be turned
rope_fields(rope, width)  ->  fields          as both generations of the library read them
"""

from __future__ import annotations

import math
from typing import Any

from brickformer.errors import SpecError
from brickformer.hf.config import Config
from brickformer.positions import Dynamic, Linear, Llama3, Rope, Yarn
from brickformer.positions.rotary import Layout, RopeScaling


def read_rope(
    config: Config, width: int, *, theta: float = 10_000.0, part: float | None = None, layout: Layout = "half"
) -> Rope:
    """Theta, the turned part of a head of `width`, and the scaling.

    theta, part: what the family has by default; part None: it turns whole heads, and can do nothing else.
    Errors: SpecError: an unknown scaling, a field of it that is missing or not understood.
    """
    theta = config.get("rope_theta", float, theta)
    whole, part = part is None, config.get("partial_rotary_factor", float, part or 1.0)
    found: list[tuple[float, float, RopeScaling | None]] = []
    for name in ("rope_parameters", "rope_scaling"):
        if config.has(name):
            inside = config.part(name)
            own = inside.get("rope_theta", float, theta), inside.get("partial_rotary_factor", float, part)
            found.append((*own, _scaling(inside, config)))
            inside.finish()
    if len(found) == 2 and found[0] != found[1]:
        raise config.refuse("rope_scaling", "what rope_parameters says, or neither", "Remove one of the two.")
    theta, part, scaling = found[0] if found else (theta, part, None)
    if whole and part != 1.0:
        raise SpecError(
            f"{config.where}: partial_rotary_factor: got {part:g}, expected 1: this family turns whole heads."
        )
    turned = int(width * part)
    return Rope(theta, width=None if turned == width else turned, layout=layout, scaling=scaling)


def _scaling(inside: Config, config: Config) -> RopeScaling | None:
    kind = inside.get("rope_type|type", str, "default")
    match kind:
        case "default":
            return None
        case "linear":
            return Linear(inside.get("factor", float))
        case "dynamic":
            inside.skip("original_max_position_embeddings")
            return Dynamic(inside.get("factor", float), original=config.get("max_position_embeddings", int, 2048))
        case "llama3":
            return Llama3(
                factor=inside.get("factor", float),
                original=_original(inside, config),
                low=inside.get("low_freq_factor", float),
                high=inside.get("high_freq_factor", float),
            )
        case "yarn":
            return _yarn(inside, config)
        case _:
            raise inside.refuse("rope_type", "default, linear, dynamic, llama3 or yarn", "Others have no brick.")


def _yarn(inside: Config, config: Config) -> Yarn:
    inside.only("truncate", True)
    original, factor = _original(inside, config), inside.get("factor", float, None)
    if factor is None:
        factor = config.get("max_position_embeddings", int) / original
    sharpening = inside.get("attention_factor", float, None)
    whole, part = inside.get("mscale", float, None), inside.get("mscale_all_dim", float, None)
    if sharpening is None and whole and part:
        sharpening = sharpened(factor, whole) / sharpened(factor, part)
    fast, slow = inside.get("beta_fast", float, None) or 32.0, inside.get("beta_slow", float, None) or 1.0
    return Yarn(factor, original, fast=fast, slow=slow, sharpening=sharpening)


def _original(inside: Config, config: Config) -> int:
    """The length of training: in the scaling, else the longest length. What is said beside it has to be the same."""
    own = inside.get("original_max_position_embeddings", int, None)
    beside = config.get("original_max_position_embeddings", int, None)
    length = own or config.get("max_position_embeddings", int)
    if beside not in (None, length):
        raise config.refuse("original_max_position_embeddings", f"{length}, as rope_scaling says, or nothing")
    return length


def sharpened(factor: float, strength: float = 1.0) -> float:
    """0.1 · strength · ln(factor) + 1: what YaRN multiplies queries and keys with (arXiv 2309.00071, 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * strength * math.log(factor) + 1.0


def rope_fields(rope: Rope, width: int) -> dict[str, Any]:
    """The fields of `rope` on heads of `width`; the partial factor only where part of a head is turned."""
    scaling = _scaling_fields(rope.scaling)
    fields: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": scaling}
    if isinstance(rope.scaling, Dynamic):
        fields["max_position_embeddings"] = rope.scaling.original
    if rope.width is not None and rope.width != width:
        fields["partial_rotary_factor"] = rope.width / width
    fields["rope_parameters"] = {
        "rope_type": "default",
        **(scaling or {}),
        **{name: fields[name] for name in ("rope_theta", "partial_rotary_factor") if name in fields},
    }
    return fields


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
    match scaling:
        case Linear():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Dynamic():
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case Llama3():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
            }
        case Yarn():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original,
                "beta_fast": scaling.fast,
                "beta_slow": scaling.slow,
                **({} if scaling.sharpening is None else {"attention_factor": scaling.sharpening}),
            }
        case _:  # none, or one that no configuration can say: the comparison of specs will name it
            return None
