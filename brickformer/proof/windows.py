"""Windows: a mixer whose mask has one sees all of it and nothing beyond, on each side that the mask allows.

Each such mixer is asked alone, also one inside another (attention behind a short convolution): over several layers
windows add up, and an error of one token would hide in the sum.

Shapes: x (1, T, D).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from brickformer.mask import Mask, Span
from brickformer.mixers.base import MixerSpec
from brickformer.proof.subject import Broken, Subject, number, off_flex, shake, worst
from brickformer.proof.twin import parts, sides
from brickformer.spec import Spec


def windowed(spec: Spec) -> Iterator[tuple[MixerSpec, Mask]]:
    """Mixers that have a mask with a window, in a spec and its parts."""
    if isinstance(spec, MixerSpec):
        for part in parts(spec):
            if isinstance(part, Mask) and part.window is not None:
                yield spec, part
    for part in parts(spec):
        yield from windowed(part)


def has_window(s: Subject) -> bool:
    """Whether any mixer has one."""
    return any(True for _ in windowed(s.spec))


@torch.no_grad()
def window(s: Subject) -> str:
    """Every token out of reach changed: the output stays. The furthest in reach changed: it does not."""
    dim, most, asked = next(iter(sides(s.spec).values())).dim, 0.0, list(dict.fromkeys(windowed(s.spec)))
    dtype = next(s.model.parameters()).dtype
    for spec, mask in asked:
        torch.manual_seed(0)
        mixer = spec.build(dim).to(dtype).eval()
        off_flex(mixer)
        shake(mixer)
        assert mask.window is not None
        tokens = max(s.tokens, 2 * mask.window + 1)
        x = torch.randn(1, tokens, dim, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        x = x.to(dtype)
        at = Span(0, tokens)
        calm = mixer(x, at)
        where = torch.arange(tokens)
        for t in range(tokens):
            seen = ((where - t).abs() < mask.window) & ((where <= t) | torch.tensor(not mask.causal))
            out = mixer(torch.where(seen[None, :, None], x, -2.0 * x), at)
            off, _ = worst(out[:, t : t + 1], calm[:, t : t + 1], f"output {t} after a change of tokens out of reach")
            if off > s.allowed:
                raise Broken(
                    f"changing tokens outside the window of {mask.window} changed the output at token {t} by "
                    f"{number(off)}, allowed {s.allowed:g}"
                )
            most = max(most, off)
            for edge in {int(where[seen].min()), int(where[seen].max())}:
                nudged = x.clone()
                nudged[:, edge] *= -2.0
                if torch.equal(mixer(nudged, at)[:, t], calm[:, t]):
                    raise Broken(
                        f"changing token {edge} left the output at token {t} as it was: it is inside the window of "
                        f"{mask.window}"
                    )
    return f"mixers with one: {len(asked)}; off by {number(most)}"
