"""Answers rows of text over HTTP, for predict.py --serve.

    python finetuning/predict.py runs/mini/glue/sst2/model --serve 8000
    curl -d '["a fine film", "a waste of time"]' 127.0.0.1:8000

The body of a POST to / is a JSON list of rows, as `finetuning.prediction` takes them, and the reply a JSON list of
their answers. What is wrong is told as {"error": "…"}.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from data_prep.common.errors import UserError
from finetuning.prediction import Answer, Predictor
from finetuning.vectors import CHARACTERS, ROWS

DRAINED = 1 << 25
"""Bytes of a refused body that are still read, since many clients read no reply before they have sent all."""
PIECE = 1 << 16
"""Bytes of a refused body in memory."""


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: Server
    protocol_version = "HTTP/1.1"  # clients keep their connections
    disable_nagle_algorithm = True  # headers and body go out at once
    timeout = 60

    def do_POST(self) -> None:
        size = self.headers["Content-Length"] or ""
        if not re.fullmatch("[0-9]{1,15}", size) or "Transfer-Encoding" in self.headers:
            self._send(411, "no Content-Length")
        elif int(size) > CHARACTERS:
            for left in range(min(int(size), DRAINED), 0, -PIECE):
                self.rfile.read(min(left, PIECE))
            self._send(413, f"{size} bytes; a request has at most {CHARACTERS}")
        elif len(body := self.rfile.read(int(size))) < int(size):
            self.close_connection = True
        elif self.path.partition("?")[0] == "/":
            self._send(*self.server.answer(body))
        else:
            self._send(404, f"{self.path}: nothing here; POST rows to /")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Refuses what `http.server` cannot handle, such as a method without a function here, whose body is unread."""
        self.close_connection = True
        self._send(*((405, "POST rows to /") if code == 501 else (code, message or "refused")))

    def _send(self, status: int, said: list[Answer] | str) -> None:
        body = f"{json.dumps({'error': said} if isinstance(said, str) else said)}\n".encode()
        self.close_connection |= status in (411, 413)  # whose bodies may be unread
        self.send_response(status)
        about = {"Content-Type": "application/json", "Content-Length": len(body), "Allow": "POST"}
        for name, value in {**about, "Connection": "close" if self.close_connection else "keep-alive"}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


class Server(ThreadingHTTPServer):
    """Answers by a model in a single thread: PyTorch starts a pool of threads for each thread that calls it."""

    model: Predictor
    turn = ThreadPoolExecutor(1)
    request_queue_size = 1024  # clients that may come at the same time

    def answer(self, body: bytes) -> tuple[int, list[Answer] | str]:
        """Answers a JSON list of rows: the status, and answers or what is wrong."""
        try:
            rows = json.loads(body)
        except (ValueError, RecursionError) as error:
            return 400, f"not JSON: {error}"
        if not isinstance(rows, list):
            return 400, 'no list of texts, such as ["a fine film"]'
        texts = sum((len(row) or 1) if isinstance(row, list | dict) else 1 for row in rows)
        if texts > ROWS:
            return 413, f"{texts} texts; a request has at most {ROWS}"
        try:
            return 200, self.turn.submit(self.model, rows).result()
        except UserError as error:
            return 400, str(error)
        except Exception:
            traceback.print_exc()
            return 500, "the server failed; its own output says why"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error, except that a client has gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def open_server(text: str) -> Server:
    """Opens a server at PORT of this machine, or at HOST:PORT; it answers nobody until it runs."""
    found = re.fullmatch(r"(?:([^:]*):)?([0-9]{1,5})", text)
    if not found or int(found[2]) > 65535:
        raise UserError(f"--serve {text}: give a port up to 65535, or HOST:PORT with a name or an IPv4 address")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # of clients that have gone
    try:
        return Server((found[1] or "127.0.0.1", int(found[2])), Handler)
    except OSError as error:
        raise UserError(f"--serve {text}: {error.strerror}; give another host or port") from error
