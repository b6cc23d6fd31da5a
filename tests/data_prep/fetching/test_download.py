"""Downloads go on where they stopped, and only a file that is right takes its name."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from pathlib import Path

import pytest
from support.commands import start, wait_for
from support.website import CONTENT, FETCH, OTHER, SIZE, Site, arguments, names, run

from data_prep import fetch

pytest_plugins = ["support.website_fixtures"]
pytestmark = pytest.mark.usefixtures("surroundings")


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
    with start([sys.executable, FETCH, *command]) as process:
        wait_for(lambda: Path("out/a.txt.part").exists() and Path("out/a.txt.part").stat().st_size == site.cut)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert "the same command continues" in errors
    assert names(Path("out")) == ["a.txt.part", "a.txt.part.json"]
    assert fetch.main(arguments(*command)) == 0
    assert site.ranges == [None, f"bytes={site.cut}-"]
    assert site.sent == SIZE
    assert Path("out/a.txt").read_bytes() == CONTENT
    assert names(Path("out")) == ["a.txt"]


def test_a_stalled_connection_is_given_up_and_resumed(site: Site) -> None:
    site.drops, site.stalls = 1, True
    assert fetch.main(arguments("url", site.put("/a.txt", CONTENT), "--out", "out", "--timeout", 0.3)) == 0
    assert site.ranges == [None, f"bytes={site.cut}-"]
    assert Path("out/a.txt").read_bytes() == CONTENT


def test_a_server_that_ignores_ranges_begins_anew(site: Site) -> None:
    site.drops, site.knows_ranges = 2, False
    result = run("url", site.put("/a.txt", CONTENT), "--out", "out")
    assert result.returncode == 0
    assert site.ranges[1:] == [f"bytes={site.cut}-"] * 2
    assert Path("out/a.txt").read_bytes() == CONTENT
    assert "1.0 MB are of no use" in result.stdout


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
    assert fetch.main(arguments("url", site.put("/a.txt", CONTENT), "--out", "out")) == 0
    assert site.ranges == [None, None]
    assert Path("out/a.txt").read_bytes() == CONTENT


def test_a_part_of_unknown_origin_is_not_continued(site: Site) -> None:
    Path("out").mkdir()
    Path("out/a.txt.part").write_bytes(OTHER[:1000])
    assert fetch.main(arguments("url", site.put("/a.txt", CONTENT), "--out", "out")) == 0
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


def test_checksums_of_the_user(site: Site) -> None:
    right, wrong = (hashlib.sha256(content).hexdigest() for content in (CONTENT, OTHER))
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
