"""The laws of the design as tests: every file's syntax tree is read, nothing is imported.

Each law is a function from one source file to complaints. Every law is tried on planted sources first, on some that
break it and on some that do not, so that a law that never complains cannot pass for a tree that obeys.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from jaxtyping import TypeCheckError, install_import_hook
from shape_checks import CORE as CHECKED

CORE = ["errors", *CHECKED]  # in the order in which they may import
LEAVES = "tasks generate train proof quant look hf export doctor".split()
UNITS = [*CORE, *LEAVES, "recipes", "cli", "__init__", "__main__"]
MAX_LINES = 330
MAX_ARGUMENTS = 4
PLAIN_DATA = {
    "spec": {"getattr", "isinstance", "issubclass", "__name__"},  # where the types of plain data are read
    "schema": {"issubclass"},  # describes every type a field may have
    "init": {"isinstance"},  # gives each kind of parameter its value; knows tables and projections, no bricks of a slot
}

FORWARD_EXEMPT = {"attend"}  # the one door to the kernels takes what a kernel takes
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CLOCKS = {
    f"{name}{unit}"
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for unit in ("", "_ns")
}

ROOT = Path(__file__).resolve().parent.parent
Complaints = Iterator[tuple[int, str]]


@dataclass(frozen=True)
class Source:
    """One file. `path` is relative to the root of the checkout, with forward slashes."""

    path: str
    text: str
    bricks: frozenset[str] = frozenset()  # class names of the whole core that are modules or specs
    tree: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", ast.parse(self.text, self.path))

    @property
    def unit(self) -> str:
        """The place in the order of imports: brickformer/mixers/lstm.py is in `mixers`."""
        return self.path.split("/")[1].removesuffix(".py")

    @property
    def in_core(self) -> bool:
        return self.unit in CORE


# ---- the laws


def one_way(source: Source) -> Complaints:
    """Imports go one way: the core in its order, leaves import only the core, recipes join leaves, cli imports all."""
    if source.unit not in UNITS:
        yield 1, f"{source.unit!r} has no place in the order of imports"
        return
    for line, target in _targets(source):
        if target not in UNITS:
            yield line, f"{target!r} has no place in the order of imports"
        elif not _may_import(source.unit, target):
            yield line, f"{source.unit} may not import {target}"


def _may_import(unit: str, target: str) -> bool:
    if unit == target or unit in ("cli", "__main__"):
        return True
    if unit == "__init__":
        return target not in ("cli", "__main__")
    if target in CORE:
        return unit not in CORE or CORE.index(target) < CORE.index(unit)
    return unit == "recipes" and target in LEAVES


def _targets(source: Source) -> Iterator[tuple[int, str]]:
    """Every import of a part of the package, wherever it stands: at the top, in a function, under TYPE_CHECKING."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                above = source.path.split("/")[: -node.level] if node.level else []
                stem = ".".join([*above, *([node.module] if node.module else [])])
                names = [f"{stem}.{alias.name}" for alias in node.names]
                if stem == "brickformer":  # a part, or a public name that __init__ gives away
                    names = [n if n.split(".")[1] in UNITS or _is_file(n) else stem for n in names]
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if _last(node.func) in (
                "import_module",
                "__import__",
            ):
                names = [name]
            case _:
                continue
        for name in names:
            package, *rest = name.split(".")
            if package == "brickformer":
                yield node.lineno, rest[0] if rest else "__init__"


def _is_file(module: str) -> bool:
    place = ROOT.joinpath(*module.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


def no_sniffing(source: Source) -> Complaints:
    """The core asks no brick what it is: no hasattr, getattr, isinstance on bricks, comparison of class names."""
    if not source.in_core:
        return
    allowed = PLAIN_DATA.get(source.unit, set())
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name(id="hasattr" | "getattr" as name)) if name not in allowed:
                yield node.lineno, f"{name}: say in the slot's interface what every brick has"
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass" as name), args=[_, kinds]) if (
                name not in allowed
            ):
                for brick in sorted(_names(kinds) & source.bricks):
                    yield node.lineno, f"{name} on the brick {brick}: give its slot a method"
            case ast.MatchClass(cls=kind) if "isinstance" not in allowed:
                for brick in sorted(_names(kind) & source.bricks):
                    yield node.lineno, f"match on the brick {brick}: give its slot a method"
            case ast.Compare(left=left, comparators=others):
                sides = [left, *others]
                if any(isinstance(s, ast.Call) and _last(s.func) == "type" for s in sides):
                    for brick in sorted(set().union(*map(_names, sides)) & source.bricks):
                        yield node.lineno, f"type() is the brick {brick}: give its slot a method"
                if any(_has_name(s) for s in sides) and "__name__" not in allowed:
                    yield node.lineno, "a class is known by its name: give its slot a method"
            case ast.Call(func=ast.Attribute(value=value, attr="startswith" | "endswith")):
                if _has_name(value) and "__name__" not in allowed:
                    yield node.lineno, "a class is known by its name: give its slot a method"


def _has_name(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr in ("__name__", "__qualname__") for n in ast.walk(node))


def small_forward(source: Source) -> Complaints:
    """`forward` takes at most four arguments besides self, and neither *args nor **kwargs."""
    for cls in ast.walk(source.tree):
        if not isinstance(cls, ast.ClassDef) or "Function" in map(_last, cls.bases):  # torch.autograd.Function
            continue
        for node in cls.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name != "forward":
                continue
            args = node.args
            if args.kwarg:
                yield node.lineno, f"{cls.name}.forward takes **{args.kwarg.arg}: name the arguments"
            if args.vararg:
                yield node.lineno, f"{cls.name}.forward takes *{args.vararg.arg}: name the arguments"
            count = len([*args.posonlyargs, *args.args, *args.kwonlyargs]) - 1
            if count > MAX_ARGUMENTS and source.unit not in FORWARD_EXEMPT:
                yield node.lineno, f"{cls.name}.forward takes {count} arguments; {MAX_ARGUMENTS} at most"


def nothing_unpickled(source: Source) -> Complaints:
    """No pickle in any dress; torch.load only with weights_only=True; numpy.load never with allow_pickle."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=names) if {a.name.split(".")[0] for a in names} & UNPICKLERS:
                yield node.lineno, "an unpickler is imported: weights are safetensors, the rest is JSON"
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in UNPICKLERS:
                yield node.lineno, "an unpickler is imported: weights are safetensors, the rest is JSON"
            case ast.ImportFrom(module="torch" | "torch.serialization", names=names) if "load" in {
                a.name for a in names
            }:
                yield node.lineno, "write torch.load, so that its weights_only=True can be seen"
            case ast.Call(func=ast.Attribute(attr="load") as func) if _names(func) & {"torch", "serialization"}:
                if not _passes(node, "weights_only", True):
                    yield node.lineno, "torch.load without weights_only=True"
            case ast.Call(keywords=keywords) if "allow_pickle" in {k.arg for k in keywords}:
                if not _passes(node, "allow_pickle", False):
                    yield node.lineno, "allow_pickle: nothing is unpickled"


def _passes(call: ast.Call, name: str, value: bool) -> bool:
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is value for k in call.keywords)


def small_files(source: Source) -> Complaints:
    """One concept a file: about 300 lines, 330 at most."""
    lines = len(source.text.splitlines())
    if lines > MAX_LINES:
        yield MAX_LINES + 1, f"{lines} lines; {MAX_LINES} at most: is it one concept?"


def module_says_what_it_is(source: Source) -> Complaints:
    """Every file opens with a docstring."""
    if not ast.get_docstring(source.tree):
        yield 1, "no docstring: open with the formula, the shape legend and the paper, or what the file is for"


def public_says_what_it_does(source: Source) -> Complaints:
    """Public functions and classes have a docstring, and so does every method that a slot asks of its bricks."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    for node in source.tree.body:
        if not isinstance(node, functions | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node) and "overload" not in map(_last, node.decorator_list):
            yield node.lineno, f"{node.name}: no docstring"
        for method in node.body if isinstance(node, ast.ClassDef) else []:
            if not isinstance(method, functions) or method.name.startswith("_"):
                continue
            if "abstractmethod" in map(_last, method.decorator_list) and not ast.get_docstring(method):
                yield method.lineno, f"{node.name}.{method.name}: an abstract method without a docstring"


def late_torch(source: Source) -> Complaints:
    """The command line imports torch inside functions: --help must not wait for it."""
    if source.unit not in ("cli", "__main__"):
        return
    for node in _at_import(source.tree.body):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        if "torch" in {name.split(".")[0] for name in names}:
            yield node.lineno, "torch at the top of a command: import it in the function that needs it"


def _at_import(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported."""
    for node in body:
        yield node
        match node:
            case ast.If(test=test) if "TYPE_CHECKING" in _names(test):
                yield from _at_import(node.orelse)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                pass
            case _:
                for part in ("body", "orelse", "finalbody"):
                    yield from _at_import(getattr(node, part, []))
                for handler in getattr(node, "handlers", []):
                    yield from _at_import(handler.body)


def no_clock(source: Source) -> Complaints:
    """A test asserts no time: machines differ. Whatever is computed from a clock in the same function counts."""
    functions = [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for scope in functions or [source.tree]:
        timed: set[str] = set()
        before = -1
        while len(timed) != before:
            before = len(timed)
            for node in ast.walk(scope):
                match node:
                    case ast.Assign(targets=targets, value=value) if _is_timed(value, timed):
                        timed |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                    case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                        timed |= _names(target) if _is_timed(value, timed) else set()
                    case ast.AnnAssign(target=target, value=ast.expr() as value) if _is_timed(value, timed):
                        timed |= _names(target)
                    case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append" | "extend")):
                        timed |= {name} if any(_is_timed(a, timed) for a in node.args) else set()
        for node in ast.walk(scope):
            if isinstance(node, ast.Assert) and _is_timed(node.test, timed):
                yield node.lineno, "asserts a time: assert a count, an order or a value instead"


def _is_timed(node: ast.AST, timed: set[str]) -> bool:
    for n in ast.walk(node):
        if isinstance(n, ast.Name) and n.id in timed:
            return True
        if isinstance(n, ast.Call) and (_last(n.func) in CLOCKS or "timeit" in _names(n.func)):
            return True
    return False


def _last(node: ast.AST) -> str:
    """a.b.c(...) -> c"""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=func) | ast.Subscript(value=func):
            return _last(func)
        case _:
            return ""


def _names(node: ast.AST) -> set[str]:
    """Every name and attribute in an expression."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


# ---- what they are held against


def _bricks(trees: Iterable[ast.Module]) -> frozenset[str]:
    """The names of all classes that descend from torch's Module or from Spec."""
    bases = {n.name: {_last(b) for b in n.bases} for t in trees for n in ast.walk(t) if isinstance(n, ast.ClassDef)}
    known, before = {"Module", "Spec"}, 0
    while len(known) != before:
        before = len(known)
        known |= {name for name, above in bases.items() if above & known}
    return frozenset(known - {"Module"})


def _package() -> list[Source]:
    files = [(p.relative_to(ROOT).as_posix(), p.read_text("utf-8")) for p in sorted(ROOT.glob("brickformer/**/*.py"))]
    bricks = _bricks(ast.parse(text, path) for path, text in files if Source(path, "").in_core)
    return [Source(path, text, bricks) for path, text in files]


def _tests() -> list[Source]:
    return [Source(p.relative_to(ROOT).as_posix(), p.read_text("utf-8")) for p in sorted(ROOT.glob("tests/**/*.py"))]


@dataclass(frozen=True, repr=False)
class Law:
    """A law, the files it holds for, and sources (path, text) that break it or keep it."""

    check: Callable[[Source], Complaints]
    broken: list[tuple[str, str]]
    kept: list[tuple[str, str]]
    files: Callable[[], list[Source]] = _package


_FORWARD = "class A:\n    def forward(self, {}): ...\n"
_CLOCK = "import time\ndef test_fast():\n    t = time.perf_counter()\n    run()\n    {}\n"

LAWS = [
    Law(
        one_way,
        broken=[
            ("brickformer/mask.py", "from brickformer.attend import Attend"),
            ("brickformer/mask.py", "import brickformer.attend"),
            ("brickformer/mask.py", "from brickformer import attend"),
            ("brickformer/mask.py", "from . import attend"),
            ("brickformer/mask.py", "def f():\n    from brickformer.layers import Stack"),
            ("brickformer/mask.py", "if TYPE_CHECKING:\n    from brickformer.models import DecoderModel"),
            ("brickformer/mask.py", "importlib.import_module('brickformer.attend')"),
            ("brickformer/norms.py", "from brickformer import RMSNorm"),
            ("brickformer/norms.py", "import brickformer"),
            ("brickformer/mixers/lstm.py", "from ..layers import Layer"),
            ("brickformer/presets/llama.py", "from brickformer.train.loop import Training"),
            ("brickformer/train/loop.py", "from brickformer.generate import engine"),
            ("brickformer/train/loop.py", "from ..tasks.task import Data"),
            ("brickformer/doctor/report.py", "def f():\n    import brickformer.look.page"),
            ("brickformer/train/loop.py", "from brickformer.recipes import reverse"),
            ("brickformer/recipes/reverse.py", "from brickformer.cli import main"),
            ("brickformer/recipes/reverse.py", "from brickformer import Attention"),
            ("brickformer/__init__.py", "from brickformer.cli import main"),
            ("brickformer/utils.py", "x = 1"),
            ("brickformer/layers.py", "from brickformer.utils import helper"),
        ],
        kept=[
            (
                "brickformer/attend.py",
                "import torch\nfrom brickformer.mask import Mask\nfrom .errors import BrickError",
            ),
            ("brickformer/layers.py", "from brickformer import mixers\nfrom brickformer.mixers.mixer import Mixer"),
            ("brickformer/mixers/lstm.py", "from brickformer.mixers.mixer import Mixer\nfrom .mixer import Mixer"),
            ("brickformer/mixers/lstm.py", "from ..state import State\nfrom .. import spec"),
            ("brickformer/train/loop.py", "from brickformer.train.optim import AdamW\nimport brickformer.presets"),
            (
                "brickformer/recipes/reverse.py",
                "from brickformer.tasks import reverse\nfrom brickformer.train import loop",
            ),
            ("brickformer/cli/train.py", "from brickformer import Attention\nfrom brickformer.recipes import reverse"),
            ("brickformer/__init__.py", "from brickformer.recipes import Run\nfrom .train import fit"),
        ],
    ),
    Law(
        no_sniffing,
        broken=[
            ("brickformer/layers.py", "ok = hasattr(mixer, 'window')"),
            ("brickformer/layers.py", "w = getattr(mixer, 'window', None)"),
            ("brickformer/spec.py", "ok = hasattr(value, 'kind')"),
            ("brickformer/layers.py", "class A(nn.Module): ...\nok = isinstance(x, A)"),
            ("brickformer/layers.py", "class A(Spec): ...\nclass B(A): ...\nok = isinstance(x, int | B)"),
            ("brickformer/layers.py", "class A(torch.nn.Module): ...\nok = issubclass(k, (int, A))"),
            ("brickformer/layers.py", "class A(nn.Module): ...\nmatch x:\n    case A(): ..."),
            ("brickformer/layers.py", "class A(nn.Module): ...\nok = type(x) is A"),
            ("brickformer/layers.py", "ok = type(x).__name__ == 'A'"),
            ("brickformer/layers.py", "ok = 'Attention' in x.__class__.__name__"),
            ("brickformer/layers.py", "ok = type(x).__qualname__.endswith('Mixer')"),
        ],
        kept=[
            ("brickformer/spec.py", "class A(Spec): ...\nok = isinstance(x, A) and getattr(x, 'f')"),
            (
                "brickformer/mask.py",
                "class Dense: ...\nmatch x:\n    case Dense(): ...\nok = isinstance(x, Dense | int)",
            ),
            ("brickformer/init.py", "class A(nn.Module): ...\nok = isinstance(x, nn.Linear)"),
            ("brickformer/doctor/subject.py", "class A(nn.Module): ...\nok = hasattr(x, 'y') or isinstance(x, A)"),
        ],
    ),
    Law(
        small_forward,
        broken=[
            ("brickformer/layers.py", _FORWARD.format("x, **kwargs")),
            ("brickformer/attend.py", _FORWARD.format("x, **kwargs")),
            ("brickformer/layers.py", _FORWARD.format("*args")),
            ("brickformer/layers.py", _FORWARD.format("a, b, c, d, e")),
            ("brickformer/layers.py", _FORWARD.format("a, /, b, c, *, d, e=1")),
            ("brickformer/hf/names.py", _FORWARD.format("a, b, c, d, e=None")),
        ],
        kept=[
            ("brickformer/layers.py", _FORWARD.format("a, b, c, d=None")),
            ("brickformer/attend.py", _FORWARD.format("q, k, v, q_at, k_at, bias=None")),
            ("brickformer/layers.py", "class A:\n    def build(self, a, b, c, d, e, **kwargs): ..."),
            ("brickformer/moe.py", "class A(torch.autograd.Function):\n    def forward(ctx, a, b, c, d, e): ..."),
        ],
    ),
    Law(
        nothing_unpickled,
        broken=[
            ("brickformer/train/checkpoint.py", "import pickle"),
            ("brickformer/train/checkpoint.py", "def f():\n    from pickle import loads"),
            ("brickformer/train/checkpoint.py", "import joblib.numpy_pickle as j"),
            ("brickformer/train/checkpoint.py", "torch.load(path)"),
            ("brickformer/train/checkpoint.py", "torch.load(path, weights_only=False)"),
            ("brickformer/train/checkpoint.py", "torch.load(path, weights_only=flag)"),
            ("brickformer/train/checkpoint.py", "from torch import load"),
            ("brickformer/train/checkpoint.py", "np.load(path, allow_pickle=True)"),
        ],
        kept=[
            ("brickformer/train/checkpoint.py", "torch.load(path, weights_only=True)\njson.load(f)\nhf.load(name)"),
            ("brickformer/train/checkpoint.py", "np.load(path, allow_pickle=False)"),
        ],
    ),
    Law(
        small_files,
        broken=[("brickformer/layers.py", "x = 1\n" * (MAX_LINES + 1))],
        kept=[("brickformer/layers.py", "x = 1\n" * MAX_LINES)],
    ),
    Law(
        module_says_what_it_is,
        broken=[
            ("brickformer/layers.py", "x = 1"),
            ("brickformer/tasks/__init__.py", ""),
            ("brickformer/mask.py", '""'),
        ],
        kept=[("brickformer/layers.py", '"""Layers."""')],
    ),
    Law(
        public_says_what_it_does,
        broken=[
            ("brickformer/layers.py", "def pattern(): ..."),
            ("brickformer/layers.py", "async def pattern(): ..."),
            ("brickformer/layers.py", "class Stack: ..."),
            ("brickformer/state.py", 'class A(ABC):\n    """A."""\n    @abstractmethod\n    def f(self): ...'),
        ],
        kept=[
            ("brickformer/layers.py", 'def pattern():\n    """P."""\ndef _f(): ...\nclass _A: ...'),
            ("brickformer/layers.py", 'class Stack:\n    """S."""\n    def forward(self): ...'),
            ("brickformer/layers.py", '@overload\ndef f(x: int): ...\ndef f(x):\n    """F."""'),
        ],
    ),
    Law(
        late_torch,
        broken=[
            ("brickformer/cli/train.py", "import torch"),
            ("brickformer/cli/train.py", "import os, torch.nn as nn"),
            ("brickformer/cli/train.py", "from torch import nn"),
            ("brickformer/cli/train.py", "try:\n    import torch\nexcept ImportError:\n    pass"),
            ("brickformer/cli/train.py", "class A:\n    import torch"),
            ("brickformer/cli/train.py", "if not TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
        ],
        kept=[
            ("brickformer/cli/train.py", "def f():\n    import torch\nif TYPE_CHECKING:\n    import torch"),
            ("brickformer/train/loop.py", "import torch"),
        ],
    ),
    Law(
        no_clock,
        broken=[
            ("tests/test_a.py", _CLOCK.format("assert time.perf_counter() - t < 1")),
            ("tests/test_a.py", _CLOCK.format("took = time.perf_counter() - t\n    assert took < 1")),
            ("tests/test_a.py", _CLOCK.format("a, b = t, 2\n    c = [a]\n    assert min(c) < 1")),
            ("tests/test_a.py", _CLOCK.format("all = []\n    all.append(time.time() - t)\n    assert sum(all) < 1")),
            ("tests/test_a.py", "def test_a():\n    assert timeit.timeit(f) < 1"),
            ("tests/test_a.py", "def test_a():\n    assert (took := monotonic()) and took < 1"),
            ("tests/test_a.py", "assert time.time() > 0"),
        ],
        kept=[
            ("tests/test_a.py", _CLOCK.format("print(time.perf_counter() - t)\n    assert run() == 1")),
            ("tests/test_a.py", "def test_a():\n    t = time.time()\ndef test_b():\n    t = 1\n    assert t == 1"),
        ],
        files=_tests,
    ),
]


def _complaints(law: Law, source: Source) -> list[str]:
    return [f"{source.path}:{line}: {what}" for line, what in law.check(source)]


def _planted(which: str) -> list[object]:
    return [
        pytest.param(law, *case, id=f"{law.check.__name__}-{i}")
        for law in LAWS
        for i, case in enumerate(law.broken if which == "broken" else law.kept)
    ]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.check.__name__)
def test_the_tree_obeys(law: Law) -> None:
    sources = law.files()
    assert sources, "no files were found: the law was held against nothing"
    found = [line for source in sources for line in _complaints(law, source)]
    assert not found, f"{law.check.__doc__}\n" + "\n".join(found)


@pytest.mark.parametrize(("law", "path", "text"), _planted("broken"))
def test_a_broken_law_is_noticed(law: Law, path: str, text: str) -> None:
    assert _complaints(law, Source(path, text, _bricks([ast.parse(text)])))


@pytest.mark.parametrize(("law", "path", "text"), _planted("kept"))
def test_a_kept_law_is_left_alone(law: Law, path: str, text: str) -> None:
    assert not _complaints(law, Source(path, text, _bricks([ast.parse(text)])))


# ---- laws that only a running program can show


def test_help_answers_without_torch() -> None:
    code = """
import sys
sys.argv = ["brick", "--help"]
code = 0
try:
    from brickformer.cli import main
    code = main() or 0
except SystemExit as stop:
    code = stop.code or 0
import json
print()
print(json.dumps({"code": code, "torch": "torch" in sys.modules}))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    *shown, last = run.stdout.strip().splitlines()
    assert json.loads(last) == {"code": 0, "torch": False}
    assert "train" in "\n".join(shown)


def test_shapes_are_checked_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The annotations are live under pytest: a wrong shape in a planted module raises, a wrong int does not."""
    import torch

    text = """
from __future__ import annotations
from jaxtyping import Float
from torch import Tensor

def double(x: Float[Tensor, "B D"], times: int = 2) -> Float[Tensor, "B D"]:
    return x.T if times == 0 else x * times
"""
    (tmp_path / "planted_shapes.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with install_import_hook("planted_shapes", "shape_checks.check"):
        from planted_shapes import double  # type: ignore[import-not-found]
    assert double(torch.ones(2, 3), times=2.0).sum() == 12
    with pytest.raises(TypeCheckError):
        double(torch.ones(2))
    with pytest.raises(TypeCheckError):
        double(torch.ones(2, 3), times=0)


def test_the_core_is_imported_with_its_shapes_checked() -> None:
    import brickformer.linear

    assert "jaxtyping" in type(brickformer.linear.__spec__.loader).__module__
