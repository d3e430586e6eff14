"""Loss curves in a terminal: two lines in one frame of characters."""

from __future__ import annotations

from collections.abc import Sequence


def curves(lines: dict[str, Sequence[float]], width: int = 72, height: int = 14) -> list[str]:
    """Each curve is drawn with the first letter of its name; both start at the left and share the scale."""
    finite = [x for xs in lines.values() for x in xs if x == x and abs(x) != float("inf")]
    if not finite:
        return ["(no finite loss)"]
    low, high = min(0.0, *finite), max(finite)
    high = high if high > low else low + 1.0
    longest = max(len(xs) for xs in lines.values())
    grid = [[" "] * width for _ in range(height)]
    for name, xs in lines.items():
        for column in range(width):
            begin = column * longest // width
            part = [x for x in xs[begin : max(begin + 1, (column + 1) * longest // width)] if x == x]
            if not part:
                continue
            value = min(max(sum(part) / len(part), low), high)
            row = round((high - value) / (high - low) * (height - 1))
            grid[row][column] = "*" if grid[row][column] not in (" ", name[0]) else name[0]
    out = []
    for i, row_ in enumerate(grid):
        value = high - (high - low) * i / (height - 1)
        out.append(f"{value:7.2f} |{''.join(row_).rstrip()}")
    out.append(f"{'':7} +{'-' * width}")
    out.append(f"{'':9}step 1{f'step {longest}':>{width - 6}}")
    out.append(f"{'':9}" + ", ".join(f"{name[0]} = {name}: {xs[-1]:.3g}" for name, xs in lines.items()) + ", * = both")
    return out
