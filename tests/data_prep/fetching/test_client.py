"""Downloads go on where they stopped, only a file that is right takes its name, and what fails is told."""

import json
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from support.commands import start, wait_for
from support.website import CONTENT, FETCH, OTHER, SIZE, Site, names, replace_servers, run

from data_prep.fetching import client

pytest_plugins = ["support.website"]
pytestmark = pytest.mark.usefixtures("surroundings")


def fetch_content(site: Site) -> None:
    """Fetches a file, which must arrive whole."""
    run("url", site.put("/a.txt", CONTENT), "--out", "out")
    assert Path("out/a.txt").read_bytes() == CONTENT


def test_a_file_arrives_and_is_not_fetched_twice(site: Site) -> None:
    url = site.put("/texts/bücher 1.txt", CONTENT)
    assert run("url", url).endswith("python data_prep/shard.py --docs 'data/raw/bücher 1'\n")
    assert Path("data/raw/bücher 1/bücher 1.txt").read_bytes() == CONTENT
    assert names(Path("data")) == ["raw/bücher 1/bücher 1.txt"]
    assert "already there" in run("url", url)
    assert len(site.requests) == 1


CUT = 700_000
RESUMED = [None, *(f"bytes={number * CUT}-" for number in (1, 2, 3))]
LOST: list[tuple[dict[str, object], list[str | None]]] = [
    ({"drops": 3}, RESUMED),
    ({"drops": 3, "reset": "out/a.txt.part"}, RESUMED),
    ({"drops": 2, "knows_ranges": False}, [RESUMED[0], RESUMED[1], RESUMED[1]]),
    ({"drops": 1, "tag": ""}, [None, None]),  # without a strong validator it begins anew
    ({"drops": 1, "tag": 'W/"{}"'}, [None, None]),
]


@pytest.mark.parametrize(("faults", "ranges"), LOST, ids=str)
def test_what_a_dropped_connection_leaves_is_continued(
    site: Site, faults: dict[str, object], ranges: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RETRIES", 1)
    for name, value in {"cut": CUT, **faults}.items():
        setattr(site, name, value)
    fetch_content(site)
    assert site.ranges == ranges
    for request in site.requests[1:]:
        assert request.headers.get("if-range") == (site.etag("/a.txt") if request.range else None)
    assert (site.sent == SIZE) == (ranges == RESUMED)


def test_an_interrupted_command_is_continued_by_the_same_command(site: Site) -> None:
    site.drops, site.stalls = 1, True
    command = ["url", site.put("/a.txt", CONTENT), "--out", "out"]
    with start([sys.executable, FETCH, *command]) as process:
        wait_for(lambda: Path("out/a.txt.part").exists() and Path("out/a.txt.part").stat().st_size == site.cut)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert "the same command continues" in errors
    assert names(Path("out")) == ["a.txt.part", "a.txt.part.json"]
    run(*command)
    assert (site.ranges, site.sent) == ([None, f"bytes={site.cut}-"], SIZE)
    assert Path("out/a.txt").read_bytes() == CONTENT
    assert names(Path("out")) == ["a.txt"]


def test_a_stalled_connection_is_given_up_and_resumed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TIMEOUT", 1)
    site.drops, site.stalls = 1, True
    fetch_content(site)
    assert {*site.ranges} == {None, f"bytes={site.cut}-"}


@pytest.mark.parametrize("heeds", [True, False])
def test_a_file_that_changes_there_is_not_mixed(site: Site, monkeypatch: pytest.MonkeyPatch, heeds: bool) -> None:
    site.drops, site.heeds_if_range = 1, heeds
    url = site.put("/a.txt", CONTENT)
    monkeypatch.setattr(time, "sleep", lambda _: site.put("/a.txt", OTHER))
    run("url", url, "--out", "out")
    assert Path("out/a.txt").read_bytes() == OTHER
    assert site.ranges[1] == f"bytes={site.cut}-"


PARTS: dict[str, tuple[bytes, dict[str, int | None], list[str | None]]] = {
    "of unknown origin": (OTHER[:1000], {}, [None]),
    "complete: no server is asked": (CONTENT, {"size": SIZE}, []),
    "longer than the file": (CONTENT + b"more", {"size": None}, [f"bytes={SIZE + 4}-", None]),
}


@pytest.mark.parametrize(("part", "known", "ranges"), PARTS.values(), ids=PARTS)
def test_parts_are_continued(site: Site, part: bytes, known: dict[str, int | None], ranges: list[str | None]) -> None:
    record = {"url": site.put("/a.txt", CONTENT), "validator": site.etag("/a.txt"), "checksum": "", **known}
    Path("out").mkdir()
    Path("out/a.txt.part").write_bytes(part)
    if known:
        Path("out/a.txt.part.json").write_text(json.dumps(record))
    site.statuses = [416] * (len(ranges) - 1)
    fetch_content(site)
    assert site.ranges == ranges


def test_a_rest_of_unknown_length_has_to_be_whole(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.drops = 2
    monkeypatch.setattr(time, "sleep", lambda _: setattr(site, "says_length", False))
    fetch_content(site)
    assert site.ranges == [None, f"bytes={site.cut}-", f"bytes={2 * site.cut}-"]


def test_a_file_of_unknown_length_and_an_empty_one(site: Site) -> None:
    site.says_length = False
    run("url", site.put("/a.txt", CONTENT), site.put("/b.txt", b""), "--out", "out")
    site.says_length = True
    run("url", site.put("/c.txt", b""), "--out", "out")
    assert [Path("out", name).read_bytes() for name in ("a.txt", "b.txt", "c.txt")] == [CONTENT, b"", b""]


def test_it_ends_even_if_every_attempt_gets_as_far_as_the_last(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRIES", 2)
    site.drops, site.knows_ranges = 1000, False
    said = run("url", site.put("/a.txt", CONTENT), "--out", "out", code=2)
    assert "gave up after 3 attempts without progress" in said
    assert len(site.requests) == 4
    assert not Path("out/a.txt").exists()


def test_pauses_double_and_end_unless_a_server_asks_for_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(client, "FIRST_PAUSE", 4)
    monkeypatch.setattr(time, "sleep", pauses.append)
    site.statuses = [500] * 100
    url = site.put("/a.txt", CONTENT)
    said = run("url", url, "--out", "out", code=2)
    assert pauses == [4, 8, 16, 32, 60]  # seconds
    assert len(site.requests) == 6
    assert all(part in said for part in ("the server says 500", "gave up after 6 attempts", "the same command"))
    site.statuses, pauses[:] = [429, 500], []
    run("url", url, "--out", "out")
    assert pauses == [7, 8]


def test_a_refusal_is_final_and_names_the_address(site: Site) -> None:
    url = site.put("/a.txt", CONTENT)
    site.statuses = [404, 403, 410]
    for status in (404, 403, 410):
        assert f"{url}: the server says {status}" in (said := run("url", url, "--out", "out", code=2))
        assert "check the address" in said
    assert len(site.requests) == 3


@pytest.mark.parametrize("command", ["url {}/a.txt", "wikipedia", "hub a/b"])
def test_without_a_network_it_says_so(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("there is no pause where no server was ever reached"))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and never listens, nor does anybody else there
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        replace_servers(monkeypatch, url)
        said = run(*command.format(url).split(), code=2)
    assert re.match(rf"error: {url}/.*cannot be reached[\s\S]*check the network", said)
    assert not Path("data").exists() or not names(Path("data"))


def test_a_network_lost_on_the_way_is_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.drops, error = 1, socket.gaierror(-3, "Temporary failure in name resolution")
    resolving = Mock(wraps=socket.getaddrinfo, side_effect=[DEFAULT, error, error, DEFAULT])
    monkeypatch.setattr(socket, "getaddrinfo", resolving)
    fetch_content(site)
    assert resolving.call_count == 4
    assert site.ranges == [None, f"bytes={site.cut}-"]


def test_a_full_disk(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def open_full(path: Path, *words: Any, **more: Any) -> Any:
        return opened(Path("/dev/full") if path.suffix == ".part" else path, *words, **more)

    monkeypatch.setattr(Path, "open", open_full)
    said = run("url", site.put("/a.txt", CONTENT), "--out", "out", code=2)
    cure = "choose another folder with --out; the same command continues"
    assert re.search(rf"No space left on device[\s\S]*{cure}", said)
    assert len(site.requests) == 1


def test_a_disk_too_small_is_noticed_before_the_first_byte(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    url, usage = site.put("/a.txt", CONTENT), shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    assert "needs 3.0 MB, the disk has 1.0 MB left" in run("url", url, "--out", "out", code=2)
    assert not Path("out/a.txt.part").exists()


def test_faults_of_the_command_are_said_all_at_once() -> None:
    bad = ["ftp://x/a.txt", "http://x/", "http://x/..%2F..%2F.bashrc", "http://x:y/b", "http://y/b"]
    said = run("url", *bad, "--out", "out", code=2)
    parts = ["ftp://x/a.txt: an address", "http://x/: must end", ".bashrc: must end", "http://x:y/b: an address"]
    parts += ["http://y/b: another address ends in b"]
    assert [part for part in parts if part not in said] == []
    said = run("wikipedia", "--language", "../en", "--date", "today", code=2)
    assert all(part in said for part in ("--language ../en:", "--date today:"))
