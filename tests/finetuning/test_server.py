"""predict.py --serve: a process that answers over HTTP what predict.py answers for a file, and names what is wrong."""

import json
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import ROOT
from support.commands import assert_refusal, start
from support.fine_tuned_models import Ask
from support.processes import free_port

from finetuning.prediction import Predictor, load
from finetuning.server import DRAINED, open_server
from finetuning.vectors import CHARACTERS, ROWS
from pretraining.architectures.weights import Kind

pytest_plugins = ["support.fine_tuned_models"]

TEXTS = ["a fine film", "", "word1 word2 xyz?"]
REQUESTS: dict[Kind, list[Any]] = {
    "classes": [TEXTS, [{"text": "a b", "more": 1}], [["a"]], []],
    "labels": [TEXTS],
    "score": [TEXTS, [["a", "b"], ["c", "d"]]],
    "choice": [[["a", "b", "c"], ["d", "word1", "word2"]]],
    "spans": [[{"question": "a", "context": "b c d"}], [["a", "b c d"]]],
    "tags": [TEXTS, [["a", "word1"], []], [{"tokens": ["b"]}]],
}


@contextmanager
def serving(model: Predictor) -> Iterator[int]:
    """Serves a model from this process; gives the port."""
    server = open_server("0")
    server.model = model
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(connection: HTTPConnection, body: bytes, method: str = "POST", path: str = "/") -> tuple[int, Any]:
    """The status of a request and its answer."""
    connection.request(method, path, body)
    reply = connection.getresponse()
    assert reply.headers["Content-Type"] == "application/json"
    return reply.status, json.loads(reply.read())


def connect(port: int) -> HTTPConnection:
    return HTTPConnection("127.0.0.1", port, timeout=30)


@pytest.mark.parametrize("kind", REQUESTS)
def test_models_of_every_kind_are_served_on_one_connection(kind: Kind, folders: dict[Kind, Path]) -> None:
    model = load(folders[kind])
    with serving(model) as port:
        connection = connect(port)
        connection.connect()
        opened = connection.sock
        for rows in REQUESTS[kind]:
            assert send(connection, json.dumps(rows).encode()) == (200, model(rows))
            assert connection.sock is opened
        connection.close()


FAULTS: list[tuple[bytes, int, str]] = [
    (b"[1, 2]", 400, "texts[0] is a number, not text"),
    (b'["a", null]', 400, "texts[1] is null, not text"),
    (b'["a", true]', 400, "texts[1] is a boolean, not text"),
    (b'["a", ["b", "c"]]', 400, "texts[1]: 2 texts; there should be 1 (text)"),
    (b'[{"text": "a"}, {"text": 5}]', 400, "texts[1]: 'text' should be a text"),
    (b'[{"other": "a"}]', 400, "texts[0]: no field 'text'; there is: other"),
    (b'{"text": "a"}', 400, "no list of texts"),
    (b'"ab"', 400, "no list of texts"),
    (b"[", 400, "not JSON"),
    (b"", 400, "not JSON"),
    (b"\xff", 400, "not JSON"),
    (b"[" * 100_000, 400, "not JSON"),
    (b"1" * 5_000, 400, "not JSON"),
    (b"[" + b'"",' * ROWS + b'""]', 413, f"{ROWS + 1} texts"),
    (json.dumps([["a"] + [""] * ROWS]).encode(), 413, f"{ROWS + 1} texts"),
    (json.dumps([{"a": "", "b": ""}] * ROWS).encode(), 413, f"{2 * ROWS} texts"),
    (json.dumps([[]] * (ROWS + 1)).encode(), 413, f"{ROWS + 1} texts"),
    (b"x" * (CHARACTERS + 1), 413, f"{CHARACTERS + 1} bytes"),
    (b"x" * (5 * CHARACTERS), 413, f"at most {CHARACTERS}"),
]


def test_requests_that_cannot_be_answered_are_refused_by_name(folders: dict[Kind, Path]) -> None:
    """And the server, often the connection too, goes on."""
    with serving(load(folders["classes"])) as port:
        connection = connect(port)
        for body, status, fault in FAULTS:
            found, said = send(connection, body)
            assert (found, fault in said["error"]) == (status, True), (body[:50], said)
        assert send(connection, b'["a"]', path="/v1")[0] == 404
        for method in ("GET", "PUT", "DELETE"):
            connection.request(method, "/")
            reply = connection.getresponse()
            assert (reply.status, reply.headers["Allow"]) == (405, "POST")
            assert json.loads(reply.read())["error"]
        connection.putrequest("POST", "/")
        connection.endheaders()
        assert connection.getresponse().status == 411
        assert send(connect(port), b'["a"]')[0] == 200


def test_a_text_without_choices_is_refused(folders: dict[Kind, Path]) -> None:
    with serving(load(folders["choice"])) as port:
        for body in (b'[["a"]]', b"[{}]", b'[{"a": "b"}]', b"[[]]"):
            status, said = send(connect(port), body)
            assert (status, "texts[0]: " in said["error"]) == (400, True), said


def exchange(port: int, request: bytes, end: bool = False) -> bytes:
    """Sends bytes, and perhaps that no more follow; returns all that comes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        client.sendall(request)
        if end:
            client.shutdown(socket.SHUT_WR)
        return client.makefile("rb").read()


POST = b"POST / HTTP/1.1\r\n"
SECOND = POST + b"Content-Length: 5\r\n\r\n" + b'["a"]'
UNREADABLE = {
    b"HTTP/1.1 431": POST + b"X: 1\r\n" * 101 + SECOND,
    b'{"error": "Invalid HTTP version': b"POST / HTTP/2.0\r\n" + SECOND,
    b"HTTP/1.1 411": POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND,
    b"HTTP/1.1 405": b"PUT / HTTP/1.1\r\nContent-Length: 99\r\n\r\n" + SECOND,
}


@pytest.mark.parametrize("reply", UNREADABLE)
def test_nothing_after_a_request_that_cannot_be_read_is_answered(reply: bytes, folders: dict[Kind, Path]) -> None:
    with serving(load(folders["classes"])) as port:
        said = exchange(port, UNREADABLE[reply])
        assert (said[: len(reply)], said.count(b"{")) == (reply, 1)
        assert exchange(port, SECOND, end=True).startswith(b"HTTP/1.1 200")


def test_half_a_body_is_not_answered(folders: dict[Kind, Path]) -> None:
    """Though it is JSON by itself."""
    with serving(load(folders["classes"])) as port:
        assert exchange(port, POST + b'Content-Length: 9\r\n\r\n["a"]', end=True) == b""


def test_of_a_body_that_is_refused_some_is_read_and_nothing_kept(folders: dict[Kind, Path]) -> None:
    with serving(load(folders["classes"])) as port:
        request = POST + b"Content-Length: 999999999999\r\n\r\n" + bytes(DRAINED)
        tracemalloc.start()
        try:
            assert exchange(port, request).startswith(b"HTTP/1.1 413")
            assert tracemalloc.get_traced_memory()[1] < DRAINED // 8
        finally:
            tracemalloc.stop()


def test_one_thread_asks_the_model() -> None:
    threads = set()

    def answer(rows: list[str]) -> list[Any]:
        threads.add(threading.get_ident())
        return [{"text": row} for row in rows]

    with serving(Mock(spec=Predictor, side_effect=answer)) as port:
        assert ask_at_once(port, [b'["a"]'] * 20) == [[{"text": "a"}]] * 20
    assert len(threads) == 1


def test_a_fault_of_the_model_is_told_and_ends_nothing(
    folders: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = load(folders["classes"])
    with serving(model) as port:
        monkeypatch.setattr(model, "answer", lambda rows: 1 / 0)
        status, said = send(connect(port), b'["a"]')
        assert (status, said) == (500, {"error": "the server failed; its own output says why"})
        monkeypatch.undo()
        assert send(connect(port), b'["a"]') == (200, model(["a"]))
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_only_this_machine_is_answered_unless_a_host_is_given() -> None:
    for address, host in {"0": "127.0.0.1", "0.0.0.0:0": "0.0.0.0"}.items():
        with open_server(address) as server:
            assert server.server_address[0] == host
    for wrong in ("", "x", "-1", "127.0.0.1", "host:", "70000", "[::1]:8000", "::1:8000"):
        assert_refusal("give a port up to 65535, or HOST:PORT", open_server, wrong)


def test_a_port_in_use_and_flags_of_files_are_refused(ask: Ask, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = ask("classes", "--serve", port, code=2)
        assert said == f"error: --serve {port}: Address already in use; give another host or port\n"
    assert "leave out files and all flags but --dtype" in ask(
        "classes", "a", "--tsv", "--out", "b", "--serve", "1", code=2
    )
    assert "HOST:PORT" in ask("classes", "--serve", "http", code=2)


@contextmanager
def started(*words: object) -> Iterator[tuple[Any, int]]:
    """Starts predict.py with --serve; gives the process and its port, once it answers."""
    port = free_port()
    command = [sys.executable, str(ROOT / "finetuning/predict.py"), *map(str, words), "--serve", str(port)]
    server: Any = start(command)
    try:
        assert f"http://127.0.0.1:{port}" in server.stderr.readline()
        yield server, port
    finally:
        server.kill()
        server.communicate()


def ask_at_once(port: int, bodies: Sequence[bytes]) -> list[Any]:
    """The answers to clients that are all connected before the first of them asks."""
    with ExitStack() as stack, ThreadPoolExecutor(16) as pool:
        connections = [connect(port) for _ in bodies]
        for each in connections:
            stack.callback(each.close)
            each.connect()
        return [said for _, said in pool.map(send, connections, bodies)]


@pytest.mark.slow
def test_clients_at_once_get_what_predict_py_writes_and_ctrl_c_ends_the_server(
    folders: dict[Kind, Path], tmp_path: Path
) -> None:
    """Clients that go away in the middle change nothing."""
    predict, files = [sys.executable, str(ROOT / "finetuning/predict.py"), str(folders["classes"])], []
    requests = [[*TEXTS, f"word{number} a"] for number in range(3)]
    for rows in requests:
        made = subprocess.run(predict, input="\n".join(rows), capture_output=True, text=True, check=True)
        files.append([json.loads(line) for line in made.stdout.splitlines()])
    with started(folders["classes"]) as (server, port):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as gone:
                gone.sendall(b'POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n["a')
        assert ask_at_once(port, [json.dumps(rows).encode() for rows in requests] * 100) == files * 100
        server.send_signal(signal.SIGINT)
        output, errors = server.communicate(timeout=30)
        assert (output, errors, server.returncode) == ("", "", -signal.SIGINT)
