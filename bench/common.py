"""What every benchmark needs: the machine in a line, tables in Markdown, turns taken so that noise hits all alike.

A benchmark measures ours and the peers in one run and states ratios: absolute times move from machine to machine.
Peers are optional: what is not installed, or has no script, is said in the table and not hidden.
"""

from __future__ import annotations

import io
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from brickformer.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

os.environ.pop("OPENBLAS_CORETYPE", None)  # a benchmark lets numpy choose its own kernels

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PEERS = Path(os.environ.get("BRICKFORMER_PEERS", ROOT.parent / "shared" / "peers"))
DATA = Path(os.environ.get("BRICKFORMER_DATA", ROOT.parent / "shared" / "data"))


def machine(*packages: str) -> str:
    """Processor, cores, versions: the line under a table."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        flags = next(line for line in lines if line.startswith("flags"))
        cpu += ", " + next((f"AVX-{n}" for n in ("512", "2") if f" avx{n}" in flags), "no AVX2")
    except (OSError, StopIteration):
        pass
    names = ["torch", *packages]
    threads = f", OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}" if "OMP_NUM_THREADS" in os.environ else ""
    versions = ", ".join(map(_versioned, names))
    return f"{cpu}, {os.cpu_count()} cores{threads}; Python {platform.python_version()}, {versions}"


def _versioned(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} not installed"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["--"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def keep(name: str, title: str, parts: Sequence[str], *packages: str) -> None:
    """Print the result and write it to bench/results/NAME.md, whole or not at all."""
    command = " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    text = "\n\n".join([f"# {title}", *parts, f"Rebuilt by `{command}`. {machine(*packages)}."]) + "\n"
    RESULTS.mkdir(exist_ok=True)
    write_whole(RESULTS / f"{name}.md", text.encode())
    print(text)


def take_turns(
    jobs: Mapping[str, Callable[[], object]], rounds: int, *, warm: int = 1, pause: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` of them, the jobs taking turns; `warm` calls of each come first, uncounted.

    pause: seconds before each call, where jobs have threads of their own that wait busily when they are done.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(-warm, rounds):
        for name, job in jobs.items():
            time.sleep(pause)
            began = time.perf_counter()
            job()
            if turn >= 0:
                times[name].append(time.perf_counter() - began)
    return times


def median(values: Iterable[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def smooth(values: Sequence[float], decay: float = 0.9) -> list[float]:
    """A running mean that starts at the first value."""
    out: list[float] = []
    for v in values:
        out.append(v if not out else decay * out[-1] + (1 - decay) * v)
    return out


def figure(width: float = 7.2, height: float = 4.2, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A white figure and its axes, row by row, tidied."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=144, layout="constrained")
    axes = list(made.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.8)
    return made, axes


def log_scale(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 times the powers of ten, in plain figures."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def keep_picture(name: str, made: Figure, folder: Path = RESULTS, dpi: float = 144) -> str:
    """Write FOLDER/NAME.png, whole or not at all; the Markdown that shows it to what stands beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    made.savefig(drawn, format="png", dpi=dpi)
    write_whole(folder / f"{name}.png", drawn.getvalue())
    return f"![{name}]({name}.png)"
