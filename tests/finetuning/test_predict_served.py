"""Answers for a program that waits for each of them: through a pipe, and over HTTP as docs/predicting.md shows."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import ROOT
from support.commands import wait_for
from support.processes import free_port

from finetuning.prediction import load
from pretraining.huggingface.weights import Kind

pytest_plugins = ["support.fine_tuned_models"]
TEXTS = ["a fine film", "", "word1 word2 xyz?"]


@pytest.fixture
def model(folders: dict[Kind, Path]) -> Path:
    return folders["classes"]


def test_each_row_of_a_pipe_is_answered_before_the_next_is_written(model: Path) -> None:
    command = [sys.executable, str(ROOT / "finetuning" / "predict.py"), str(model), "--flush", "--dtype", "fp32"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asked:
        assert asked.stdin is not None
        assert asked.stdout is not None
        answers = []
        for text in TEXTS:
            asked.stdin.write(f"{text}\n")
            asked.stdin.flush()
            answers.append(json.loads(asked.stdout.readline()))
        asked.stdin.close()
        assert asked.wait(30) == 0
    assert [each["label"] for each in answers] == [each["label"] for each in load(model, "fp32")(TEXTS)]


def ask_at_once(port: int, clients: int, body: bytes) -> set[bytes]:
    """What the server answers clients that are all connected before the first of them asks."""
    request = b"POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in range(clients)]
        for each in opened:
            each.sendall(request)
        return {each.makefile("rb").read().partition(b"\r\n\r\n")[2] for each in opened}


@pytest.mark.slow
def test_the_server_of_the_page_answers(model: Path, tmp_path: Path) -> None:
    page, port = (ROOT / "docs" / "predicting.md").read_text(), free_port()
    (code,) = (block for block in page.split("```python\n") if "HTTPServer" in block)
    code = code.partition("```")[0].replace("runs/seeds/sst2/model", str(model)).replace("8000", str(port))
    assert len([line for line in code.splitlines() if line]) <= 25
    (tmp_path / "server.py").write_text(code)
    place = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen([sys.executable, tmp_path / "server.py"], env=place, stderr=subprocess.DEVNULL)

    def ask(rows: object = TEXTS) -> list[dict[str, object]]:
        request = urllib.request.Request(f"http://127.0.0.1:{port}", json.dumps(rows).encode())
        with urllib.request.urlopen(request, timeout=30) as found:
            answers: list[dict[str, object]] = json.load(found)
            return answers

    def answers() -> bool:
        assert server.poll() is None
        try:
            return len(ask()) == len(TEXTS)
        except OSError:
            return False

    try:
        wait_for(answers)
        assert [each["label"] for each in ask()] == [each["label"] for each in load(model)(TEXTS)]
        for wrong in ({"text": "a"}, "ab", 5, [5], [None], [{"other": "a"}], [["a", "b", "c"]], ["a", ["b", "c"]]):
            with pytest.raises(urllib.error.HTTPError, match="400") as refused:
                ask(wrong)
            assert json.load(refused.value)["error"]
        assert ask_at_once(port, 300, json.dumps(TEXTS[:1]).encode()) == {json.dumps(ask(TEXTS[:1])).encode()}
    finally:
        server.kill()
        server.wait()
