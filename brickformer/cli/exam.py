"""`brick doctor --exam`: the doctor before its planted bugs and clean variants, and the table of docs/doctor.md."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

BEGIN, END = "<!-- exam: begin -->", "<!-- exam: end -->"


def exam(only: str | None, table: str | None, seconds: float) -> int:
    """Print recall by family, alarms and causes; 1 below 95 % recall, 90 % named, or with a false alarm."""
    from brickformer.doctor import diagnose
    from brickformer.doctor.mutants import BUGS, CLEAN
    from brickformer.doctor.mutants.score import score
    from brickformer.errors import SpecError

    page = _page(table)
    bugs = [b for b in BUGS if only is None or only in b.name or only in b.probe]
    clean = [c for c in CLEAN if only is None or only in c.name]
    if not bugs and not clean:
        raise SpecError(f"doctor --exam --only {only}: no bug, family or variant of that name.")
    result = score(
        bugs, clean, partial(diagnose, seconds=seconds), lambda line: print(line, file=sys.stderr, flush=True)
    )
    lines = result.table()
    print("\n".join(lines))
    for name, said in result.alarms:
        print(f"false alarm: {name}: {said}")
    if page is not None:
        path, before, after = page
        from brickformer.files import write_whole

        write_whole(path, f"{before}{BEGIN}\n{chr(10).join(lines)}\n{END}{after}".encode())
    return 0 if result.recall >= 0.95 and result.named >= 0.9 and not result.alarms else 1


def _page(name: str | None) -> tuple[Path, str, str] | None:
    """The page and what stands around the table. Errors: SpecError: no such file, or no place for a table in it."""
    from brickformer.errors import SpecError

    if name is None:
        return None
    path = Path(name)
    if not path.is_file():
        raise SpecError(f"doctor --exam --table {name}: no such file.")
    before, begin, rest = path.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SpecError(f"doctor --exam --table {name}: expected the lines {BEGIN} and {END} in it.")
    return path, before, after
