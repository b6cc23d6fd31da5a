"""Web sites on this machine that drop connections, forget ranges, change files and say no, also as the hub speaks.

PYTEST_DONT_REWRITE: a test module that names this one in `pytest_plugins` for its fixtures has imported it before.
"""

import hashlib
import importlib
import json
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT
from huggingface_hub import constants
from support.commands import run_main, wait_for

from data_prep import fetch
from data_prep.fetching import client, servers
from finetuning import fetch as tasks

FETCH = str(ROOT / "data_prep" / "fetch.py")
COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
SIZE = 3_000_000
CONTENT, OTHER = random.Random(1).randbytes(SIZE), random.Random(2).randbytes(SIZE)


@dataclass
class Request:
    """What a client asked and what it got."""

    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


@dataclass
class Site:
    """A web site and what is wrong with it."""

    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    replies: dict[str, object] = field(default_factory=dict)
    """What is answered in JSON at a path."""
    statuses: list[int] = field(default_factory=list)
    """What the first requests are answered instead of the file."""
    drops: int = 0
    """How many more requests for files lose their connection."""
    cut: int = 1_000_000
    """After how many bytes a connection is lost."""
    reset: str = ""
    """A file of the client: once it has all that was sent, a lost connection is reset, not closed."""
    stalls: bool = False
    """Whether a lost connection stays open without a byte."""
    knows_ranges: bool = True
    heeds_if_range: bool = True
    tag: str = '"{}"'
    """The form of the ETag; empty for none."""
    says_length: bool = True
    commit: str = ""
    """The commit of all files, as the hub says it; empty for none."""
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def put(self, path: str, content: bytes) -> str:
        self.files[path] = content
        return self.url + path

    @property
    def sent(self) -> int:
        return sum(request.sent for request in self.requests)

    @property
    def ranges(self) -> list[str | None]:
        return [request.range for request in self.requests]

    def etag(self, path: str) -> str:
        return self.tag.format(hashlib.md5(self.files[path]).hexdigest()) if self.tag else ""


class Handler(BaseHTTPRequestHandler):
    """Answers requests with what the site has, as badly as the site is to answer."""

    @property
    def site(self) -> Site:
        return self.server.site  # type: ignore[attr-defined,no-any-return]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        request = Request(self.path, {name.lower(): value for name, value in self.headers.items()})
        self.site.requests.append(request)
        if self.site.statuses:
            status = self.site.statuses.pop(0)
            self.answer(request, status, **({"Retry-After": "7"} if status == 429 else {}))
        elif path in self.site.redirects:
            self.answer(request, 302, Location=self.site.redirects[path])
        elif path in self.site.replies:
            body = json.dumps(self.site.replies[path]).encode()
            self.answer(request, 200, **{"Content-Length": str(len(body)), "Content-Type": "application/json"})
            self.wfile.write(body)
        elif path in self.site.files:
            self.send_file(request, path)
        else:
            lacking = "Repo" if path.startswith("/api/models/") else "Revision" if "/revision/" in path else ""
            self.answer(request, 404, **{"X-Error-Code": f"{lacking}NotFound" if lacking else ""})

    def answer(self, request: Request, status: int, **headers: str) -> None:
        request.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send_file(self, request: Request, path: str) -> None:
        site, content, headers = self.site, self.site.files[path], {}
        if etag := site.etag(path):
            headers["ETag"] = etag
        first, status = 0, 200
        stale = site.heeds_if_range and request.headers.get("if-range", etag) != etag
        if site.commit:
            headers["X-Repo-Commit"] = site.commit
        if request.range and site.knows_ranges and not stale:
            first, status = int(request.range.removeprefix("bytes=").rstrip("-")), 206
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if site.says_length:
            headers["Content-Length"] = str(len(content) - first)
        self.answer(request, status, **headers)
        content = content[first:] if self.command == "GET" else b""
        lost = site.drops > 0 and len(content) > site.cut
        if lost:
            site.drops -= 1
            content = content[: site.cut]
        request.sent = len(content)  # before the client may have read it
        self.wfile.write(content)
        if lost and site.stalls:
            site.over.wait(30)
        if lost and site.reset:
            part = Path(site.reset)
            wait_for(lambda: part.exists() and part.stat().st_size == first + len(content))
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.fixture
def site() -> Iterator[Site]:
    """A web site until the test is over."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    site = Site(url=f"http://127.0.0.1:{server.server_address[1]}")
    server.site = site  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield site
    site.over.set()
    server.shutdown()
    server.server_close()


mirror = site
"""another one"""


@pytest.fixture
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder to work in, hardly a pause between attempts, no proxy, none of the user's settings of the hub."""
    for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.01)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def official(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The site in place of those of Wikipedia, the hub, SQuAD and SWAG."""
    replace_servers(monkeypatch, site.url)
    return site


def replace_servers(patch: pytest.MonkeyPatch, url: str) -> None:
    """Lets commands that fetch ask this address."""
    places = [(servers, "WIKIMEDIA"), (constants, "ENDPOINT"), (tasks, "SQUAD_SERVER"), (tasks, "SWAG_SERVER")]
    for module, name in places:
        patch.setattr(module, name, url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")


def run(*more: object, code: int = 0) -> str:
    """Runs fetch.py in this process; returns what it says."""
    return run_main(fetch.main, *map(str, more), code=code)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def interrupt(_: float) -> None:
    raise KeyboardInterrupt


def publish_model(site: Site, name: str, folder: Path) -> None:
    """Shows the files of a folder as the hub shows those of a model."""
    site.commit = COMMIT
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    for at in ("", "/revision/main", f"/revision/{COMMIT}"):
        siblings = [{"rfilename": file} for file in names]
        site.replies[f"/api/models/{name}{at}"] = {"id": name, "sha": COMMIT, "siblings": siblings}
    site.replies[f"/api/models/{name}/tree/{COMMIT}"] = [
        {"type": "file", "path": file, "size": (folder / file).stat().st_size, "oid": f"{number:040}"}
        for number, file in enumerate(names)
    ]
    for file in names:
        for revision in ("main", COMMIT):
            site.put(f"/{name}/resolve/{revision}/{file}", (folder / file).read_bytes())


def read_settings_anew(folder: Path) -> None:
    """A fault: a rank works in a folder, and reads the settings of the hub, which the library reads once, anew."""
    os.chdir(folder)
    importlib.reload(importlib.import_module("huggingface_hub.constants"))


def downloads(site: Site, file: str) -> int:
    """How often a file was sent."""
    return sum(request.path.endswith(f"/{file}") and request.sent > 0 for request in site.requests)


def publish_dataset(site: Site, cdn: Site, dataset: str, files: dict[str, bytes]) -> None:
    """Publishes a data set as the hub shows it, with the files on another server."""
    api, commit = f"/api/datasets/{dataset}", hashlib.sha1(dataset.encode()).hexdigest()
    site.replies[api] = {"id": dataset, "sha": commit}
    site.replies[f"{api}/tree/{commit}"] = [{"type": "directory", "path": "folder", "oid": "0"}] + [
        {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": "0",
            "lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 100},
        }
        for name, content in files.items()
    ]
    for name, content in files.items():
        site.redirects[f"/datasets/{dataset}/resolve/{commit}/{name}"] = cdn.put(f"/blobs/{dataset}/{name}", content)
