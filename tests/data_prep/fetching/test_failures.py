"""What fetch.py says of servers, networks and disks that fail, and how long it tries."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.website import CONTENT, FETCH, Site, arguments, names, run

from data_prep import fetch

pytest_plugins = ["support.website_fixtures"]
pytestmark = pytest.mark.usefixtures("surroundings")


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_it_ends_even_if_every_attempt_gets_as_far_as_the_last(site: Site) -> None:
    site.drops, site.knows_ranges = 1000, False
    result = run("url", site.put("/a.txt", CONTENT), "--out", "out", "--retries", 2)
    assert result.returncode == 2
    assert "gave up after 3 attempts without progress" in result.stderr
    assert len(site.requests) == 4
    assert not Path("out/a.txt").exists()


def test_errors_of_the_server_are_waited_for(site: Site) -> None:
    url = site.put("/a.txt", CONTENT)
    site.statuses = [500, 503, 502]
    assert fetch.main(arguments("url", url, "--out", "out")) == 0
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
        [sys.executable, FETCH, *(word.format(url) for word in command)], capture_output=True, text=True, timeout=60
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
