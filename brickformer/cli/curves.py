"""`brick look RUN --training`: the curves of a run as a page; with --live served on loopback while it trains."""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def curves(run: str, out: str | None, *, live: bool) -> int:
    """Write the page; or serve it until Ctrl-C."""
    from brickformer.cli.train import shown_path
    from brickformer.errors import SpecError
    from brickformer.files import write_whole
    from brickformer.look.curves import curves_page
    from brickformer.train import RunFolder

    folder = RunFolder.open(Path(run).expanduser())
    if live:
        if out is not None:
            raise SpecError(f"--live: serves the page and writes none, so --out {out} means nothing. Leave it out.")
        with server(folder.path) as at:
            print(f"http://127.0.0.1:{at.server_address[1]}/ until Ctrl-C", flush=True)
            at.serve_forever()
    path = Path(out).expanduser() if out else folder.path / "training.html"
    if path.suffix != ".html":
        raise SpecError(f"--out {out}: expected a name that ends in .html")
    records, steps = numbers(folder.path)
    write_whole(path, curves_page(records, folder.path.name, steps=steps).encode())
    print(f"open {shown_path(path)}")
    return 0


def numbers(path: Path) -> tuple[list[dict[str, float]], int]:
    """The records of a run so far, and how many steps were asked for."""
    from brickformer.recipes.trained import run_of
    from brickformer.train import RunFolder
    from brickformer.train.log import Metrics

    folder = RunFolder(path)
    return Metrics(folder.metrics).read(), run_of(folder).train.steps


def since(path: Path) -> float | None:
    """Seconds since a run wrote its last number; None when it wrote none."""
    from brickformer.train import RunFolder

    metrics = RunFolder(path).metrics
    return time.time() - metrics.stat().st_mtime if metrics.exists() else None


def server(path: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of two addresses, for this machine only: the page, and its numbers as they are now."""
    from brickformer.errors import BrickError
    from brickformer.look.curves import curves_data, curves_page

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            if host not in ("127.0.0.1", "localhost"):  # a page from elsewhere whose name leads here
                self.send_error(403)
                return
            try:
                records, steps = numbers(path)
                quiet = since(path)
            except (BrickError, OSError) as e:  # the folder was deleted, say: it may come back
                self.send_error(503, explain=str(e))
                return
            if self.path == "/":
                self.answer("text/html", curves_page(records, path.name, steps=steps, live=True, quiet=quiet))
            elif self.path == "/data.json":
                data = curves_data(records, path.name, steps=steps, live=True, quiet=quiet)
                self.answer("application/json", json.dumps(data, allow_nan=False))
            else:
                self.send_error(404)

        def answer(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on the terminal."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A browser that hangs up is no error, and nothing of it belongs on the terminal."""
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(request, client_address)

    return Server(("127.0.0.1", port), Handler)
