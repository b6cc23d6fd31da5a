"""Answers rows of text over HTTP, for predict.py --serve.

    python finetuning/predict.py runs/mini/glue/sst2/model --serve 8000
    curl -d '["a fine film", "a waste of time"]' 127.0.0.1:8000

The body of a POST to / is a JSON list of rows, as `finetuning.prediction` takes them, and the answer a JSON list of
their answers. What is wrong is answered by {"error": "…"}.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from data_prep.common.errors import UserError
from finetuning.prediction import Answer, Predictor
from finetuning.vectors import CHARACTERS, ROWS

LOOPBACK = "127.0.0.1"
DRAINED = 1 << 28
"""Bytes of a refused body that are still read, since many clients read no answer before they have sent all."""


class RefusedError(Exception):
    """A request that gets a status of HTTP and the reason in place of answers."""


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: Server
    protocol_version = "HTTP/1.1"  # clients keep their connections
    disable_nagle_algorithm = True  # headers and body go out at once
    timeout = 60

    def do_POST(self) -> None:
        try:
            self._send(200, self.server.answer(self._read_body()))
        except RefusedError as refusal:
            self._send(*refusal.args)
        except UserError as error:
            self._send(400, str(error))
        except OSError:  # the client has gone
            self.close_connection = True
        except Exception:
            traceback.print_exc()
            self._send(500, "the server failed; its own output says why")

    def _read_body(self) -> bytes:
        size = self.headers["Content-Length"] or ""
        if not re.fullmatch("[0-9]{1,15}", size):
            self.close_connection = True
            raise RefusedError(411, "no Content-Length")
        if (left := int(size)) > CHARACTERS:
            left, self.close_connection = min(left, DRAINED), True
            while left and (part := self.rfile.read1(min(left, 1 << 16))):
                left -= len(part)
            raise RefusedError(413, f"{size} bytes; a request has at most {CHARACTERS}")
        body = self.rfile.read(int(size))
        if self.path.partition("?")[0] != "/":
            raise RefusedError(404, f"{self.path}: nothing here; POST a list of texts to /")
        return body

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Refuses what `http.server` cannot handle, such as a method other than POST."""
        self.close_connection = True
        self._send(*((405, "POST a list of texts") if code == 501 else (code, message or "refused")))

    def _send(self, status: int, said: list[Answer] | str) -> None:
        body = json.dumps({"error": said} if isinstance(said, str) else said).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        headers |= {"Allow": "POST"} if status == 405 else {}
        headers |= {"Connection": "close"} if self.close_connection else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


class Server(ThreadingHTTPServer):
    """Answers by a model, in a single thread: others would each start the threads of its kernels anew."""

    request_queue_size = 1024  # clients that may come at the same time
    allow_reuse_port: ClassVar[bool] = False

    def __init__(self, model: Predictor, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._model, self._turn = model, ThreadPoolExecutor(1)
        super().__init__((host, port), Handler)

    def answer(self, body: bytes) -> list[Answer]:
        """Answers a JSON list of rows."""
        try:
            rows = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise UserError(f"not JSON: {error}") from error
        if not isinstance(rows, list):
            raise UserError('no list of texts, such as ["a fine film"]')
        if len(rows) > ROWS:
            raise RefusedError(413, f"{len(rows)} texts; a request has at most {ROWS}")
        return self._turn.submit(self._model, rows).result()

    def server_close(self) -> None:
        super().server_close()
        self._turn.shutdown(cancel_futures=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error, except that a client has gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def parse_address(text: str) -> tuple[str, int]:
    """Parses PORT or HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise UserError(f"--serve {text}: give a port, such as 8000, or HOST:PORT")
    return host.strip("[]") or LOOPBACK, int(port)


def serve(model: Predictor, text: str) -> None:
    """Answers requests until Ctrl-C."""
    host, port = parse_address(text)
    try:
        server = Server(model, host, port)
    except OSError as error:
        raise UserError(f"--serve {text}: {error.strerror}; give another host or port") from error
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # of clients that have gone
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    named = f"[{host}]" if ":" in host else host
    print(f"answering at http://{named}:{server.server_port}; Ctrl-C ends", file=sys.stderr, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
