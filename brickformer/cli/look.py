"""`brick look`: what a trained run attends to, what its layers would say, where its training goes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brickformer.look import View

ABOUT = """What a trained run looks at while it answers TEXT: every layer and head.

Writes look.html (one file, no network: open it in a browser) and look.png into
the run folder and prints a line a head: entropy of its weights (nats), mean
distance (tokens), shares on the first, the previous, an equal token, on the same
and on the mirrored place, and how far the answers move when the head is removed
(nats a token). Mixers without attention are shown by their hidden attention.

RUN may be FILE.py:make, a function that returns anyone's torch model, the inputs
of one call (a tuple, or a dict by name) and, third, the tokens as texts. Page and
picture are look-FILE-make.html and .png in the current folder then."""
EXAMPLES = """examples:
  brick look runs/reverse-001 "7 1 4"
  brick look runs/text-001 "Once upon" --set max_tokens=20 --layers
  brick look runs/reverse-001 --training --live
  brick look my_model.py:make"""


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Say what the verb takes."""
    p = verbs.add_parser(
        "look",
        parents=[shared],
        help="what a trained run attends to, head by head; its training",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", metavar="RUN", help="a folder that `brick train` made, or FILE.py:make")
    p.add_argument("text", metavar="TEXT", nargs="?", help="what it answers or goes on with")
    p.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], dest="settings", help="how to choose")
    p.add_argument("--out", metavar="FILE.html", help="where the page goes; the picture goes beside it")
    p.add_argument("--tokens", metavar="A:B", help="tokens shown, counted from 0; default: the last there is room for")
    p.add_argument(
        "--only",
        metavar="PATH",
        action="append",
        default=[],
        help="a part, as in decoder.stack.layers.1, or heads of it: decoder.stack.layers.1.cross:1,3",
    )
    p.add_argument("--layers", action="store_true", help="print what each layer would answer (logit lens)")
    p.add_argument("--training", action="store_true", help="the curves of the training instead")
    p.add_argument("--live", action="store_true", help="with --training: serve a page that refreshes, until Ctrl-C")
    p.set_defaults(verb=look)


def look(args: argparse.Namespace) -> int:
    """Write page and picture, print the tables."""
    from brickformer.errors import SpecError

    if args.live and not args.training:
        raise SpecError("--live: belongs to --training.")
    if args.training:
        for name in ("text", "tokens"):
            if getattr(args, name) is not None:
                raise SpecError(
                    f"--training: shows curves, so {name} {getattr(args, name)!r} means nothing. Leave it out."
                )
        for name, given in (("--set", args.settings), ("--only", args.only), ("--layers", args.layers)):
            if given:
                raise SpecError(f"--training and {name} exclude each other. Leave one of them out.")
        from brickformer.cli.curves import curves

        return curves(args.run, args.out, live=args.live)
    return show(args)


def show(args: argparse.Namespace) -> int:
    """Attention."""
    from brickformer.cli.text import screen
    from brickformer.cli.train import shown_path
    from brickformer.errors import SpecError
    from brickformer.files import write_whole
    from brickformer.look.grid import picture
    from brickformer.look.page import page, readable
    from brickformer.look.table import findings, heads, layers

    rows = None if args.tokens is None else part(args.tokens)
    if ".py:" in args.run:
        for name, given in (("TEXT", args.text), ("--set", args.settings), ("--layers", args.layers)):
            if given:
                raise SpecError(f"look {args.run}: {name} belongs to a run. Leave it out: make() gives the inputs.")
        view, place = anyones(args.run, rows, args.only), Path(f"look-{named(args.run)}.html")
    elif args.run.endswith(".py"):
        raise SpecError(f"look {args.run}: name a function in it: brick look {args.run}:make")
    elif args.text is None:
        raise SpecError(f'brick look {args.run}: no text. Give one to answer: brick look {args.run} "TEXT"')
    else:
        view, place = answered(args, rows), Path(args.run).expanduser() / "look.html"
    out = Path(args.out).expanduser() if args.out else place
    if out.suffix != ".html":
        raise SpecError(f"--out {args.out}: expected a name that ends in .html")
    print(readable(view.title, 400))
    print()
    print("\n".join(heads(view)))
    if args.layers:
        print()
        print("\n".join(layers(view, screen())))
    said = findings(view)
    if said:
        print()
        print("\n".join(said))
    write_whole(out, page(view).encode())
    write_whole(out.with_suffix(".png"), picture(view))
    print(f"\nopen {shown_path(out)}; as a picture: {shown_path(out.with_suffix('.png'))}")
    return 0


def named(what: str) -> str:
    """FILE.py:make as a part of a file's name: FILE-make."""
    name, _, function = what.rpartition(":")
    return f"{Path(name).stem}-{function}"


def part(text: str) -> tuple[int, int]:
    """A:B. Errors: SpecError: something else."""
    from brickformer.errors import SpecError

    first, colon, last = text.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal() or int(first) >= int(last):
        raise SpecError(f"--tokens {text}: expected A:B, two numbers, A below B; 0:100 is the first hundred.")
    return int(first), int(last)


def answered(args: argparse.Namespace, rows: tuple[int, int] | None) -> View:
    """What a run looks at while it answers. Errors: BrickError."""
    from brickformer.cli.settings import changed
    from brickformer.cli.ways import sorted_out
    from brickformer.errors import SpecError
    from brickformer.generate import Stop
    from brickformer.recipes import Trained
    from brickformer.recipes.sight import sight

    drawing, ending, searching, looking, ahead = sorted_out(args.settings)
    if searching or looking or ahead is not None:
        raise SpecError("look: one answer is written, token by token. Leave beams and drafts out.")
    trained = Trained.open(args.run)
    stop = changed(Stop(max_tokens=48) if trained.writes_text else Stop(), ending)
    return sight(trained, args.text, changed(trained.sampling, drawing), stop, rows=rows, only=args.only)


def anyones(what: str, rows: tuple[int, int] | None, only: list[str]) -> View:
    """What anyone's model looks at. Errors: SpecError: make() gives something else, or raises."""
    from torch import Tensor, nn

    from brickformer.cli.find import loaded
    from brickformer.errors import BrickError, SpecError, nearest
    from brickformer.look import foreign

    name, _, function = what.rpartition(":")
    module = loaded(name, "look")
    make = vars(module).get(function)
    if not callable(make):
        names = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise SpecError(f"look {what}: no {function!r} in it; {nearest(function, names)}")
    try:
        made = make()
    except Exception as e:
        raise SpecError(f"look {what}: {function}() raised {type(e).__name__}: {e}") from e
    if not isinstance(made, tuple) or not 2 <= len(made) <= 3 or not isinstance(made[0], nn.Module):
        raise SpecError(f"look {what}: {function}() returned {type(made).__name__}; expected (model, inputs, tokens).")
    model, inputs, *labels = made
    named = inputs if isinstance(inputs, Mapping) else {}
    given = () if named else inputs if isinstance(inputs, tuple | list) else (inputs,)
    tensors = [x for x in [*given, *named.values()] if isinstance(x, Tensor)]
    if not tensors:
        raise SpecError(f"look {what}: {function}() gave no tensor to call the model with.")
    said = labels[0] if labels else None
    if said is not None and not isinstance(said, Sequence):
        raise SpecError(f"look {what}: the tokens are {type(said).__name__}; expected a list of texts, or None.")
    texts = named_by(tensors[0]) if said is None else [str(t) for t in said]
    try:
        return foreign(model, *given, named=named, labels=texts, rows=rows, only=only)
    except BrickError:
        raise
    except Exception as e:
        raise SpecError(f"look {what}: the model raised {type(e).__name__}: {e}") from e


def named_by(ids: object) -> list[str]:
    """The ids themselves, where they are ids; else numbers of places."""
    from torch import Tensor

    assert isinstance(ids, Tensor)
    if ids.ndim == 0:
        return [str(ids.item())]
    if not ids.is_floating_point() and ids.ndim == 2:
        return [str(i) for i in ids[0].tolist()]
    return [str(i) for i in range(ids.shape[1] if ids.ndim > 1 else ids.shape[0])]
