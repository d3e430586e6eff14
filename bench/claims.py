"""Every claim of the article this project began with, measured: docs/claims.md.

    python bench/claims.py                 the rows that are not measured yet, then the page
    python bench/claims.py mask scale      these alone, anew
    python bench/claims.py --fresh         all of them, anew
    python bench/claims.py --page          only the page, from what is measured

A row is a function in bench/rows; what it found is kept in bench/results/claims/NAME.json, so that a run that was
stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

import torch
from common import ROOT, machine, table
from rows import FOUND, PICTURES, ROWS, Row

from brickformer.files import write_whole

PAGE = ROOT / "docs" / "claims.md"


def measure(name: str) -> None:
    """One row, kept whole or not at all."""
    torch.manual_seed(0)
    began = time.perf_counter()
    row: Row = ROWS[name]()
    data = {**asdict(row), "seconds": time.perf_counter() - began, "machine": machine()}
    FOUND.mkdir(parents=True, exist_ok=True)
    write_whole(FOUND / f"{name}.json", (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode())
    print(f"{name}: {row.here} [{row.verdict}; {data['seconds']:.0f} s]", flush=True)


def page() -> str:
    """docs/claims.md from what is measured."""
    rows = {name: json.loads(f.read_text()) for name in ROWS if (f := FOUND / f"{name}.json").is_file()}
    missing = [name for name in ROWS if name not in rows]
    short = [(f"[{r['claim']}](#{name})", r["article"], r["here"], f"**{r['verdict']}**") for name, r in rows.items()]
    out = [
        "# The article, measured",
        "This project began with an article about building a Transformer from bricks. What it claims is measured here, "
        "claim by claim, with this library. Where our figure is another one, the row says so, and why.",
        table(("claim", "in the article", "here", "verdict"), short),
    ]
    if missing:
        out.append(f"Not measured yet: {', '.join(missing)} (`python bench/claims.py`).")
    for name, r in rows.items():
        out += [
            f'<a id="{name}"></a>\n\n## {r["claim"]}',
            f"**In the article:** {r['article']}. **Here:** {r['here']}.",
        ]
        out += [r["how"], *([r["why"]] if r["why"] else []), *([r["table"]] if r["table"] else [])]
        if (PICTURES / f"claim-{name}.png").is_file():
            out.append(f"![{r['claim']}](pictures/claim-{name}.png)")
        out.append(f"`python bench/claims.py {name}` · {r['seconds']:.0f} s")
    machines = dict.fromkeys(r["machine"] for r in rows.values())
    out.append("Measured on: " + "; ".join(machines) + ". All rows: `make claims`.")
    return "\n\n".join(out) + "\n"


def main() -> None:
    """Measure what was asked for, write the page."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ROWS))
    p.add_argument("--fresh", action="store_true", help="measure all rows again")
    p.add_argument("--page", action="store_true", help="measure nothing")
    args = p.parse_args()
    unknown = [name for name in args.names if name not in ROWS]
    if unknown:
        p.error(f"no such row: {unknown[0]}; there are {', '.join(ROWS)}")
    names = args.names or [n for n in ROWS if args.fresh or not (FOUND / f"{n}.json").is_file()]
    write()
    for name in [] if args.page else names:
        measure(name)
        write()
    print(f"written: {PAGE.relative_to(ROOT)}", file=sys.stderr)


def write() -> None:
    """The page as it stands, whole or not at all."""
    write_whole(PAGE, page().encode())


if __name__ == "__main__":
    main()
