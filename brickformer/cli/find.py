"""What a name on the command line stands for: a run folder, a file with a spec, a preset, a recipe; what --set does."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar, get_type_hints

from brickformer.cli.settings import Setting, changed
from brickformer.errors import SpecError, nearest
from brickformer.files import read_text
from brickformer.models import ModelSpec
from brickformer.presets import PRESETS
from brickformer.recipes import RECIPES, Run
from brickformer.recipes.bricks import import_bricks
from brickformer.recipes.weighted import plain_spec
from brickformer.spec import Spec, fields_of, kinds_of, read
from brickformer.train.checkpoint import RunFolder

S = TypeVar("S", bound=Spec)
import_bricks()  # a name on the command line or in a file may be that of any brick


def use(files: Iterable[str]) -> None:
    """Import somebody's own bricks: every @spec in the files joins the union. Errors: SpecError with file and line."""
    for name in files:
        loaded(name, "--use", "Name a Python file with bricks of your own.")


def loaded(name: str, who: str, hint: str = "Name a Python file.") -> ModuleType:
    """A Python file as a module. who: begins every message. Errors: SpecError with file and line."""
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        near = nearest(path.stem, [p.stem for p in path.parent.glob("*.py")])  # .py would make all of them alike
        raise SpecError(f"{who} {name}: no such file{f'; {near}' if near.endswith('?') else '.'} {hint}")
    module_name, roots = _dotted(path.resolve())
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise SpecError(f"{who} {name}: not a Python file. Its name has to end in .py.")
    module = importlib.util.module_from_spec(spec)
    for folder in roots:
        if folder not in sys.path:
            sys.path.append(folder)  # so that the file can import its neighbours
    before = sys.modules.get(module_name)
    sys.modules[module_name] = module  # before it runs: dataclasses look their own module up
    try:
        if "." in module_name:
            importlib.import_module(module_name.rpartition(".")[0])  # relative imports look their package up
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        if before is None:
            del sys.modules[module_name]
        else:
            sys.modules[module_name] = before
        if isinstance(e, SpecError):
            raise
        said = f"{who} {name}, {_line(e, path)}: {type(e).__name__}: {e}"
        if isinstance(e, SystemExit):
            said += ". What runs when it is imported belongs under if __name__ == '__main__':"
        raise SpecError(said) from e
    return module


def _dotted(path: Path) -> tuple[str, list[str]]:
    """The name of a file as a module, with the packages that it lies in; folders from which it may import."""
    names, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        names.append(folder.name)
        folder = folder.parent
    return ".".join(reversed(names)), list(dict.fromkeys([str(folder), str(path.parent), os.getcwd()]))


def _line(error: BaseException, path: Path) -> str:
    """Where in the file it went wrong."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}"
    at, trace = None, error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == path.name:
            at = trace.tb_lineno
        trace = trace.tb_next
    return f"line {at}" if at else "while it was imported"


def recipe(name: str, data: str | None, settings: Sequence[Setting], model: str | None = None) -> Run:
    """The run of a recipe, with its changes. model: one of its shapes.

    Errors: SpecError: an unknown recipe, a file missing or too much, no such shape.
    """
    if name not in RECIPES:
        raise SpecError(f"train {name}: no such recipe; {nearest(name, RECIPES)}")
    make = RECIPES[name]
    takes_data = "data" in inspect.signature(make).parameters
    if takes_data and data is None:
        what = "two columns, source TAB target" if name == "pairs" else "any text"
        raise SpecError(f"train {name}: no data. Name a file ({what}): brick train {name} --data FILE")
    if not takes_data and data is not None:
        raise SpecError(f"train {name}: it makes its own data, so --data {data} would be ignored. Leave it out.")
    given = {"data": data, "model": model}
    run = make(**{key: value for key, value in given.items() if value is not None})
    return changed(run, settings)


def model_spec(what: str, settings: Sequence[Setting]) -> ModelSpec:
    """The model of a run folder, a JSON or YAML file, or a preset. Errors: BrickError: none of these, or broken."""
    path = Path(os.path.expanduser(what))  # a name nobody has stays as it is
    if path.is_dir():
        folder = RunFolder.open(path)
        made = own_spec(lambda: read(ModelSpec, plain_spec(folder), str(folder.path / "spec.json")))
        return changed(made, settings)
    if path.suffix in (".json", ".yaml", ".yml"):
        return changed(_file(path), settings)
    if what in PRESETS:
        return _preset(PRESETS[what], settings)
    raise SpecError(f"{what}: no run folder, no .json or .yaml file, no preset; {nearest(what, PRESETS)}")


def _file(path: Path) -> ModelSpec:
    """A model spec, or the model of a run spec."""
    if not path.is_file():
        raise SpecError(f"{path}: no such file.")
    text = read_text(path)
    of_text = Spec.from_json if path.suffix == ".json" else Spec.from_yaml
    spec = own_spec(lambda: of_text(text, str(path)))
    match spec:
        case ModelSpec():
            return spec
        case Run():
            return spec.model
        case _:
            whole = ", ".join(kinds_of(ModelSpec))  # type: ignore[type-abstract]
            raise SpecError(f"{path}: got {spec.kind!r}, a part; expected a whole model ({whole}) or a run.")


def _preset(make: Callable[..., ModelSpec], settings: Sequence[Setting]) -> ModelSpec:
    """A preset: settings that are its arguments size it, the others change the spec it returns."""
    hints = get_type_hints(make)
    sizes = {name: read(hints[name], value, f"--set {name}") for name, value in settings if name in hints}
    if inspect.signature(make).parameters["vocab"].default is inspect.Parameter.empty:
        sizes.setdefault("vocab", 32_000)
    spec = make(**sizes)
    others = [(path, value) for path, value in settings if path not in hints]
    known = {*hints, *fields_of(type(spec))} - {"return"}
    for path, _ in others:
        if path.split(".")[0] not in known | {"*"}:
            raise SpecError(f"--set {path}: no such argument or field; {nearest(path.split('.')[0], known)}")
    return changed(spec, others)


def own_spec(read: Callable[[], S]) -> S:
    """Read a spec; where a kind is unknown, say that it may be a brick of one's own."""
    try:
        return read()
    except SpecError as e:
        if ".kind: got" in str(e):
            raise SpecError(f"{e} A brick of your own? Name its file: --use FILE.py") from None
        raise
