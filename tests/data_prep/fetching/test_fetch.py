"""fetch.py against a server on this machine that drops connections, forgets ranges, changes files and says no."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from data_prep import fetch

FETCH = str(Path(__file__).resolve().parents[3] / "data_prep" / "fetch.py")
SIZE = 3_000_000
CONTENT, OTHER = random.Random(1).randbytes(SIZE), random.Random(2).randbytes(SIZE)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


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
    """JSON at a path"""
    statuses: list[int] = field(default_factory=list)
    """what the first requests are answered instead of the file"""
    drops: int = 0
    """how many more requests for files lose their connection"""
    cut: int = 1_000_000
    """after so many bytes"""
    reset: bool = False
    """a lost connection is reset, not closed"""
    stalls: bool = False
    """a lost connection stays open without a byte"""
    knows_ranges: bool = True
    heeds_if_range: bool = True
    tag: str = '"{}"'
    """form of the ETag; none if empty"""
    says_length: bool = True
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
            self.answer(request, 404, **{"X-Error-Code": "RevisionNotFound" if "/revision/" in self.path else ""})

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
        if request.range and site.knows_ranges and not stale:
            first, status = int(request.range.removeprefix("bytes=").rstrip("-")), 206
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if site.says_length:
            headers["Content-Length"] = str(len(content) - first)
        self.answer(request, status, **headers)
        content = content[first:]
        lost = site.drops > 0 and len(content) > site.cut
        if lost:
            site.drops -= 1
            content = content[: site.cut]
        self.wfile.write(content)
        request.sent = len(content)
        if lost and site.stalls:
            site.over.wait(30)
        if lost and site.reset:
            time.sleep(0.1)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.fixture
def site() -> Iterator[Site]:
    yield from serve()


@pytest.fixture
def mirror() -> Iterator[Site]:
    yield from serve()


def serve() -> Iterator[Site]:
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


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder to work in, no proxy, and nothing of the user's own settings for the hub."""
    for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def arguments(*more: object) -> list[str]:
    return [*map(str, more), "--wait", "0.01"]


def run(*more: object) -> subprocess.CompletedProcess[str]:
    """fetch.py as a user runs it."""
    return subprocess.run([sys.executable, FETCH, *arguments(*more)], capture_output=True, text=True, timeout=60)


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# Downloads


def test_a_file_arrives_and_is_not_fetched_twice(site: Site) -> None:
    url = site.put("/texts/bücher 1.txt", CONTENT)
    first = run("url", url)
    assert (first.returncode, first.stderr) == (0, "")
    assert Path("data/raw/bücher 1/bücher 1.txt").read_bytes() == CONTENT
    assert names(Path("data")) == ["raw/bücher 1/bücher 1.txt"]
    assert first.stdout.endswith("python data_prep/shard.py --docs 'data/raw/bücher 1'\n")
    second = run("url", url)
    assert second.returncode == 0
    assert "already there" in second.stdout
    assert len(site.requests) == 1


@pytest.mark.parametrize("reset", [False, True])
def test_dropped_connections_are_resumed(site: Site, reset: bool) -> None:
    site.drops, site.cut, site.reset = 3, 700_000, reset
    result = run("url", site.put("/a.txt", CONTENT), "--out", "out", "--retries", 0 if not reset else 5)
    assert result.returncode == 0, result.stderr
    assert Path("out/a.txt").read_bytes() == CONTENT
    assert len(site.requests) == 4
    assert site.ranges[0] is None
    if not reset:
        assert site.ranges[1:] == ["bytes=700000-", "bytes=1400000-", "bytes=2100000-"]
        assert site.sent == SIZE
    assert {request.headers.get("if-range") for request in site.requests[1:]} == {site.etag("/a.txt")}
    assert [request.status for request in site.requests] == [200, 206, 206, 206]
    assert site.sent < 2 * SIZE


def test_an_interrupted_command_is_continued_by_the_same_command(site: Site) -> None:
    site.drops, site.stalls = 1, True
    command = arguments("url", site.put("/a.txt", CONTENT), "--out", "out")
    with subprocess.Popen([sys.executable, FETCH, *command], stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: Path("out/a.txt.part").exists() and Path("out/a.txt.part").stat().st_size == site.cut)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert "the same command continues" in errors
    assert names(Path("out")) == ["a.txt.part", "a.txt.part.json"]
    assert run(*command).returncode == 0
    assert site.ranges == [None, f"bytes={site.cut}-"]
    assert site.sent == SIZE
    assert Path("out/a.txt").read_bytes() == CONTENT
    assert names(Path("out")) == ["a.txt"]


def wait_for(holds: object, seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def test_a_stalled_connection_is_given_up_and_resumed(site: Site) -> None:
    site.drops, site.stalls = 1, True
    assert run("url", site.put("/a.txt", CONTENT), "--out", "out", "--timeout", 0.3).returncode == 0
    assert site.ranges == [None, f"bytes={site.cut}-"]
    assert Path("out/a.txt").read_bytes() == CONTENT


def test_a_server_that_ignores_ranges_begins_anew(site: Site) -> None:
    site.drops, site.knows_ranges = 2, False
    result = run("url", site.put("/a.txt", CONTENT), "--out", "out")
    assert result.returncode == 0
    assert site.ranges[1:] == [f"bytes={site.cut}-"] * 2
    assert Path("out/a.txt").read_bytes() == CONTENT
    assert "1.0 MB are of no use" in result.stdout


def test_it_ends_even_if_every_attempt_gets_as_far_as_the_last(site: Site) -> None:
    site.drops, site.knows_ranges = 1000, False
    result = run("url", site.put("/a.txt", CONTENT), "--out", "out", "--retries", 2)
    assert result.returncode == 2
    assert "gave up after 3 attempts without progress" in result.stderr
    assert len(site.requests) == 4
    assert not Path("out/a.txt").exists()


@pytest.mark.parametrize("heeds", [True, False])
def test_a_file_that_changes_on_the_server_is_never_mixed(
    site: Site, monkeypatch: pytest.MonkeyPatch, heeds: bool
) -> None:
    site.drops, site.heeds_if_range = 1, heeds
    url = site.put("/a.txt", CONTENT)
    monkeypatch.setattr(time, "sleep", lambda _: site.put("/a.txt", OTHER))
    assert fetch.main(arguments("url", url, "--out", "out")) == 0
    assert Path("out/a.txt").read_bytes() == OTHER
    assert site.ranges[1] == f"bytes={site.cut}-"


@pytest.mark.parametrize("tag", ["", 'W/"{}"'])
def test_without_a_strong_validator_it_begins_anew(site: Site, tag: str) -> None:
    site.drops, site.tag = 1, tag
    assert run("url", site.put("/a.txt", CONTENT), "--out", "out").returncode == 0
    assert site.ranges == [None, None]
    assert Path("out/a.txt").read_bytes() == CONTENT


def test_a_part_of_unknown_origin_is_not_continued(site: Site) -> None:
    Path("out").mkdir()
    Path("out/a.txt.part").write_bytes(OTHER[:1000])
    assert run("url", site.put("/a.txt", CONTENT), "--out", "out").returncode == 0
    assert Path("out/a.txt").read_bytes() == CONTENT


def test_a_part_that_is_complete_needs_no_server(site: Site) -> None:
    url = site.put("/a.txt", CONTENT)
    Path("out").mkdir()
    Path("out/a.txt.part").write_bytes(CONTENT)
    known = {"url": url, "validator": site.etag("/a.txt"), "size": SIZE, "checksum": ""}
    Path("out/a.txt.part.json").write_text(json.dumps(known))
    assert fetch.main(arguments("url", url, "--out", "out")) == 0
    assert Path("out/a.txt").read_bytes() == CONTENT
    assert not site.requests


def test_a_part_longer_than_the_file_begins_anew(site: Site) -> None:
    url = site.put("/a.txt", CONTENT)
    Path("out").mkdir()
    Path("out/a.txt.part").write_bytes(CONTENT + b"more")
    known = {"url": url, "validator": site.etag("/a.txt"), "size": None, "checksum": ""}
    Path("out/a.txt.part.json").write_text(json.dumps(known))
    site.statuses = [416]
    assert fetch.main(arguments("url", url, "--out", "out")) == 0
    assert Path("out/a.txt").read_bytes() == CONTENT
    assert site.ranges == [f"bytes={SIZE + 4}-", None]


def test_a_file_of_unknown_length_and_an_empty_one(site: Site) -> None:
    site.says_length = False
    assert fetch.main(arguments("url", site.put("/a.txt", CONTENT), site.put("/b.txt", b""), "--out", "out")) == 0
    assert Path("out/a.txt").read_bytes() == CONTENT
    site.says_length = True
    assert fetch.main(arguments("url", site.put("/c.txt", b""), "--out", "out")) == 0
    assert [Path("out", name).read_bytes() for name in ("b.txt", "c.txt")] == [b"", b""]


def test_errors_of_the_server_are_waited_for(site: Site) -> None:
    url = site.put("/a.txt", CONTENT)
    site.statuses = [500, 503, 502]
    assert run("url", url, "--out", "out").returncode == 0
    assert len(site.requests) == 4
    assert Path("out/a.txt").read_bytes() == CONTENT


def test_pauses_double_and_end(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    site.statuses = [500] * 100
    assert fetch.main(["url", site.put("/a.txt", CONTENT), "--out", "out", "--wait", "10"]) == 2
    assert pauses == [10, 20, 40, 60, 60]  # seconds
    assert len(site.requests) == 6
    message = capsys.readouterr().err
    assert "the server says 500" in message
    assert "gave up after 6 attempts" in message
    assert "the same command continues" in message


def test_a_server_says_how_long_to_wait(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    site.statuses = [429, 500]
    assert fetch.main(["url", site.put("/a.txt", CONTENT), "--out", "out", "--wait", "1"]) == 0
    assert pauses == [7, 2]


@pytest.mark.parametrize("status", [404, 403, 410])
def test_a_refusal_is_final_and_names_the_address(site: Site, status: int) -> None:
    url = site.put("/a.txt", CONTENT)
    site.statuses = [status]
    result = run("url", url, "--out", "out")
    assert result.returncode == 2
    assert f"{url}: the server says {status}" in result.stderr
    assert "check the address" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(site.requests) == 1


@pytest.mark.parametrize(
    "command", [["url", "{}/a.txt"], ["wikipedia", "--mirror", "{}"], ["hub", "a/b", "--mirror", "{}"]]
)
def test_without_a_network_it_says_so(command: list[str]) -> None:
    url = closed_port()
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, FETCH, *(each.format(url) for each in command)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {url}/")
    assert "cannot be reached" in result.stderr
    assert "check the network" in result.stderr
    assert "mirror" in result.stderr
    assert "Traceback" not in result.stderr
    assert time.monotonic() - start < 10  # no pauses where no server was ever reached
    assert not Path("data").exists() or not names(Path("data"))


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert fetch.main(arguments("wikipedia")) == 2
    message = capsys.readouterr().err
    assert "https://dumps.wikimedia.org/enwiki/latest/enwiki-latest-sha1sums.txt: cannot be reached" in message
    assert "Name or service not known" in message


def test_a_network_lost_on_the_way_is_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.drops = 1
    url, whole, failures = site.put("/a.txt", CONTENT), socket.getaddrinfo, [0]

    def fail_twice(*given: object, **more: object) -> object:
        if site.requests and failures[0] < 2:
            failures[0] += 1
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return whole(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", fail_twice)
    assert fetch.main(arguments("url", url, "--out", "out")) == 0
    assert failures == [2]
    assert Path("out/a.txt").read_bytes() == CONTENT
    assert site.ranges == [None, f"bytes={site.cut}-"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    url = site.put("/a.txt", CONTENT)
    opened = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, *a, **k: (
            opened(Path("/dev/full"), *a, **k) if path.suffix[1:] == "part" else opened(path, *a, **k)
        ),
    )
    assert fetch.main(arguments("url", url, "--out", "out")) == 2
    message = capsys.readouterr().err
    assert "No space left on device" in message
    assert "choose another folder with --out; the same command continues" in message
    assert len(site.requests) == 1


def test_a_disk_too_small_is_noticed_before_the_first_byte(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, usage = site.put("/a.txt", CONTENT), shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    assert fetch.main(arguments("url", url, "--out", "out")) == 2
    assert "needs 3.0 MB, the disk has 1.0 MB left" in capsys.readouterr().err
    assert not Path("out/a.txt.part").exists()


def test_checksums_of_the_user(site: Site) -> None:
    right, wrong = (hashlib.sha256(each).hexdigest() for each in (CONTENT, OTHER))
    urls = [site.put("/a.txt", CONTENT), site.put("/b.txt", CONTENT)]
    result = run("url", *urls, "--sha256", right.upper(), wrong, "--out", "out")
    assert result.returncode == 2
    assert "a.txt: complete, its sha256 is right" in result.stdout
    assert right in result.stderr
    assert wrong in result.stderr
    assert names(Path("out")) == ["a.txt", "b.txt.bad"]
    again = run("url", *urls, "--sha256", right, wrong, "--out", "out")
    assert again.returncode == 2
    assert "a.txt: already there, its sha256 is right" in again.stdout
    assert names(Path("out")) == ["a.txt", "b.txt.bad", "b.txt.bad2"]
    assert len(site.requests) == 3


def test_faults_of_the_command_are_said_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    bad = ["url", "ftp://x/a.txt", "http://x/", "http://x/..%2F..%2F.bashrc", "http://x:y/b", "http://y/b"]
    assert fetch.main([*bad, "--sha256", "12", "--retries", "-1", "--out", "out"]) == 2
    message = capsys.readouterr().err
    for part in ("ftp://x/a.txt: an address", "http://x/: must end", ".bashrc: must end", "http://x:y/b: an address"):
        assert part in message
    assert "http://y/b: another address ends in b" in message
    assert "--sha256: one for each of the 5" in message
    assert "--sha256 12: 64 hexadecimal digits" in message
    assert "--retries -1" in message
    assert fetch.main(["wikipedia", "--language", "../en", "--date", "today", "--mirror", "x"]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in ("--language ../en:", "--date today:", "--mirror x:"))


# Wikipedia


def publish(site: Site, wiki: str, date: str, content: bytes, listed: bytes | None = None, latest: bool = True) -> str:
    """A dump with its list of checksums, as the official site has them; returns the name of the file."""
    name = f"{wiki}-{date}-pages-articles-multistream.xml.bz2"
    site.put(f"/{wiki}/{date}/{name}", content)
    lines = [
        f"{hashlib.sha1(b'index').hexdigest()}  {wiki}-{date}-pages-articles-multistream-index.txt.bz2",
        f"{hashlib.sha1(listed or content).hexdigest()}  {name}",
        f"{hashlib.sha1(b'whole').hexdigest()}  {wiki}-{date}-pages-articles.xml.bz2",
    ]
    for folder in [date, "latest"] if latest else [date]:
        site.put(f"/{wiki}/{folder}/{wiki}-{folder}-sha1sums.txt", ("\n".join(lines) + "\n").encode())
    return name


def test_the_latest_wikipedia(site: Site) -> None:
    publish(site, "zh_min_nanwiki", "20250501", OTHER)
    name = publish(site, "zh_min_nanwiki", "20250601", CONTENT)
    site.drops = 1
    result = run("wikipedia", "--language", "zh-min-nan", "--mirror", site.url + "/")
    assert result.returncode == 0, result.stderr
    folder = Path("data/raw/zh_min_nanwiki")
    assert names(folder) == [name]
    assert (folder / name).read_bytes() == CONTENT
    assert "its sha1 is right" in result.stdout
    assert result.stdout.endswith(
        "\n    python data_prep/shard.py --docs data/raw/zh_min_nanwiki --language zh-min-nan\n"
    )
    paths = [request.path for request in site.requests]
    assert paths[0] == "/zh_min_nanwiki/latest/zh_min_nanwiki-latest-sha1sums.txt"
    assert paths[1:] == [f"/zh_min_nanwiki/20250601/{name}"] * 2
    assert site.ranges[2] == f"bytes={site.cut}-"
    assert run("wikipedia", "--language", "zh-min-nan", "--mirror", site.url).returncode == 0
    assert len(site.requests) == 4  # the list once more, and nothing else


def test_the_latest_of_a_list_with_two_dates(site: Site) -> None:
    publish(site, "enwiki", "20250601", CONTENT)
    publish(site, "enwiki", "20250501", OTHER)
    lists = [site.files[f"/enwiki/{date}/enwiki-{date}-sha1sums.txt"] for date in ("20250601", "20250501")]
    site.put("/enwiki/latest/enwiki-latest-sha1sums.txt", b"".join(lists))
    assert fetch.main(arguments("wikipedia", "--mirror", site.url, "--out", "out")) == 0
    assert names(Path("out")) == ["enwiki-20250601-pages-articles-multistream.xml.bz2"]


def test_a_dated_wikipedia_beside_another(site: Site) -> None:
    old, new = publish(site, "enwiki", "20250501", OTHER), publish(site, "enwiki", "20250601", CONTENT)
    assert run("wikipedia", "--mirror", site.url).stdout.endswith("--docs data/raw/enwiki\n")
    result = run("wikipedia", "--date", "20250501", "--mirror", site.url)
    assert Path("data/raw/enwiki", old).read_bytes() == OTHER
    assert Path("data/raw/enwiki", new).read_bytes() == CONTENT
    # the folder would mean both dumps, each text twice
    assert result.stdout.endswith(f"--docs enwiki=data/raw/enwiki/{old}\n")


def test_a_wrong_checksum_puts_the_file_aside(site: Site) -> None:
    name = publish(site, "enwiki", "20250601", CONTENT, listed=OTHER)
    result = run("wikipedia", "--mirror", site.url, "--out", "out")
    assert result.returncode == 2
    assert names(Path("out")) == [name + ".bad"]
    assert Path("out", name + ".bad").read_bytes() == CONTENT
    assert hashlib.sha1(CONTENT).hexdigest() in result.stderr
    assert hashlib.sha1(OTHER).hexdigest() in result.stderr
    assert name + ".bad" in result.stderr
    assert "next:" not in result.stdout


def test_a_file_spoilt_on_the_disk_is_noticed(site: Site) -> None:
    name = publish(site, "enwiki", "20250601", CONTENT)
    command = arguments("wikipedia", "--mirror", site.url, "--out", "out")
    assert fetch.main(command) == 0
    Path("out", name).write_bytes(CONTENT[:-1] + b"?")
    assert fetch.main(command) == 2
    assert names(Path("out")) == [name + ".bad"]
    assert fetch.main(command) == 0
    assert Path("out", name).read_bytes() == CONTENT


def test_a_mirror_continues_what_the_official_site_began(site: Site, mirror: Site) -> None:
    name = publish(site, "enwiki", "20250601", CONTENT)
    publish(mirror, "enwiki", "20250601", CONTENT)
    site.drops, mirror.tag = 1, '"another-{}"'
    command = arguments("wikipedia", "--date", "20250601", "--out", "out")
    part = Path("out", name + ".part")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", interrupt)
        assert fetch.main([*command, "--mirror", site.url]) == 130
    assert part.stat().st_size == site.cut
    assert fetch.main([*command, "--mirror", mirror.url]) == 0
    assert Path("out", name).read_bytes() == CONTENT
    assert mirror.ranges == [None, f"bytes={site.cut}-"]
    assert mirror.sent < SIZE  # the list and the rest


def interrupt(_: float) -> None:
    raise KeyboardInterrupt


def test_an_unfinished_older_dump_is_mentioned(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    publish(site, "enwiki", "20250501", OTHER)
    site.drops = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", interrupt)
        assert fetch.main(arguments("wikipedia", "--mirror", site.url, "--out", "out")) == 130
    new = publish(site, "enwiki", "20250601", CONTENT)
    assert fetch.main(arguments("wikipedia", "--mirror", site.url, "--out", "out")) == 0
    assert Path("out", new).read_bytes() == CONTENT
    assert "enwiki-20250501-pages-articles-multistream.xml.bz2.part: unfinished" in capsys.readouterr().out


def test_what_wikipedia_does_not_have(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(arguments("wikipedia", "--language", "xx", "--mirror", site.url)) == 2
    message = capsys.readouterr().err
    assert "404" in message
    assert f"the dates that there are: {site.url}/xxwiki/" in message
    site.put("/enwiki/20250601/enwiki-20250601-sha1sums.txt", b"0" * 40 + b"  enwiki-20250601-site_stats.sql.gz\n")
    assert fetch.main(arguments("wikipedia", "--date", "20250601", "--mirror", site.url)) == 2
    assert "try an earlier --date" in capsys.readouterr().err


def test_the_list_is_fetched_patiently(site: Site) -> None:
    name = publish(site, "enwiki", "20250601", CONTENT)
    site.statuses, site.drops, site.cut = [503], 1, 100  # then the list is cut short
    assert fetch.main(arguments("wikipedia", "--mirror", site.url, "--out", "out")) == 0
    assert Path("out", name).read_bytes() == CONTENT


# The hub


def publish_dataset(site: Site, cdn: Site, files: dict[str, bytes], revision: str = "") -> None:
    """A data set as the hub shows it, with the files on another server."""
    api = "/api/datasets/owner/texts"
    site.replies[api + (f"/revision/{revision}" if revision else "")] = {"id": "owner/texts", "sha": COMMIT}
    site.replies[f"{api}/tree/{COMMIT}"] = [{"type": "directory", "path": "folder", "oid": "0"}] + [
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
        site.redirects[f"/datasets/owner/texts/resolve/{COMMIT}/{name}"] = cdn.put(f"/blobs/{name}", content)


def test_a_dataset_of_the_hub(site: Site, mirror: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    files = {"README.md": b"read", "20231101.en/train-0.parquet": CONTENT, "20231101.de/train-0.parquet": OTHER}
    publish_dataset(site, mirror, files)
    mirror.drops = 1
    result = run("hub", "owner/texts", "--config-name", "20231101.en", "--mirror", site.url)
    assert result.returncode == 0, result.stderr
    folder = Path("data/raw/owner-texts-20231101.en")
    assert names(folder) == ["20231101.en/train-0.parquet"]
    assert (folder / "20231101.en/train-0.parquet").read_bytes() == CONTENT
    assert "its sha256 is right" in result.stdout
    assert result.stdout.endswith("--docs data/raw/owner-texts-20231101.en\n")
    assert mirror.ranges == [None, f"bytes={mirror.cut}-"]
    assert {request.headers.get("authorization") for request in site.requests} == {"Bearer hf_secret"}
    assert {request.headers.get("authorization") for request in mirror.requests} == {None}  # it is not theirs to see


def test_the_part_of_a_dataset_is_chosen(site: Site, mirror: Site, capsys: pytest.CaptureFixture[str]) -> None:
    publish_dataset(site, mirror, {"en/0.parquet": CONTENT, "de/0.parquet": OTHER, "top.parquet": b"top"})
    command = arguments("hub", "owner/texts", "--endpoint", site.url, "--out", "out")
    assert fetch.main(command) == 2
    assert "choose a part with --config-name, or all with '*': ., de, en" in capsys.readouterr().err
    assert fetch.main([*command, "--config-name", "fr"]) == 2
    assert "no such part; it has ., de, en" in capsys.readouterr().err
    assert not mirror.requests
    assert fetch.main([*command, "--config-name", "*"]) == 0
    assert names(Path("out")) == ["de/0.parquet", "en/0.parquet", "top.parquet"]
    assert Path("out/de/0.parquet").read_bytes() == OTHER


def test_a_dataset_that_the_hub_converted(site: Site, mirror: Site, capsys: pytest.CaptureFixture[str]) -> None:
    command = arguments("hub", "owner/texts", "--endpoint", site.url, "--out", "out")
    publish_dataset(site, mirror, {"texts.jsonl": b"{}"})
    assert fetch.main(command) == 2
    assert "no Parquet files in main or refs/convert/parquet" in capsys.readouterr().err
    converted = "f" * 40
    site.replies["/api/datasets/owner/texts/revision/refs/convert/parquet"] = {"id": "owner/texts", "sha": converted}
    site.replies[f"/api/datasets/owner/texts/tree/{converted}"] = [
        {"type": "file", "path": "default/train/0000.parquet", "size": SIZE, "oid": "0"}
    ]
    site.put(f"/datasets/owner/texts/resolve/{converted}/default/train/0000.parquet", CONTENT)
    assert fetch.main(command) == 0
    assert Path("out/default/train/0000.parquet").read_bytes() == CONTENT


def test_a_server_cannot_write_outside_the_folder(site: Site, mirror: Site, capsys: pytest.CaptureFixture[str]) -> None:
    publish_dataset(site, mirror, {"en/../../evil.parquet": CONTENT})
    assert fetch.main(arguments("hub", "owner/texts", "--endpoint", site.url, "--out", "out")) == 2
    assert "a file outside the data set" in capsys.readouterr().err
    assert not mirror.requests


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "RepoNotFound", "no such data set"),
        (403, "GatedRepo", "accept its conditions there, then log in"),
        (404, "RevisionNotFound", "has no branch, tag or commit nowhere"),
        (500, "", "refused; try again later"),
    ],
)
def test_what_the_hub_refuses(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    code: str,
    message: str,
) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.answer(Request("", {}), status, **{"X-Error-Code": code}))
    command = arguments("hub", "owner/texts", "--revision", "nowhere", "--endpoint", site.url)
    assert fetch.main(command) == 2
    said = capsys.readouterr().err
    assert message in said
    assert f"{site.url}/datasets/owner/texts" in said


def test_other_errors_of_the_hub(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch.main(arguments("hub", "a/b/c", "--endpoint", site.url)) == 2
    assert "not the name of a data set" in capsys.readouterr().err
    site.put("/api/datasets/owner/texts", b"<html>")
    assert fetch.main(arguments("hub", "owner/texts", "--endpoint", site.url)) == 2
    assert "does not answer as the hub does" in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run("hub", "owner/texts", "--endpoint", site.url)
    assert result.returncode == 2
    assert "HF_HUB_OFFLINE forbids the network" in result.stderr
