"""The dumps of Wikipedia: the latest, a dated one, mirrors and checksums."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest
from support.website import CONTENT, OTHER, SIZE, Site, arguments, interrupt, names, run

from data_prep import fetch

pytest_plugins = ["support.website_fixtures"]
pytestmark = pytest.mark.usefixtures("surroundings")


def publish(site: Site, wiki: str, date: str, content: bytes, listed: bytes | None = None, latest: bool = True) -> str:
    """Publishes a dump with its list of checksums, as the official site has them; returns the name of the file."""
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
    assert result.stdout.endswith("\n    python data_prep/shard.py --docs data/raw/zh_min_nanwiki\n")
    paths = [request.path for request in site.requests]
    assert paths[0] == "/zh_min_nanwiki/latest/zh_min_nanwiki-latest-sha1sums.txt"
    assert paths[1:] == [f"/zh_min_nanwiki/20250601/{name}"] * 2
    assert site.ranges[2] == f"bytes={site.cut}-"
    assert fetch.main(arguments("wikipedia", "--language", "zh-min-nan", "--mirror", site.url)) == 0
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
    assert run("wikipedia", "--mirror", site.url).stdout.endswith("--docs data/raw/enwiki --language en\n")
    result = run("wikipedia", "--date", "20250501", "--mirror", site.url)
    assert Path("data/raw/enwiki", old).read_bytes() == OTHER
    assert Path("data/raw/enwiki", new).read_bytes() == CONTENT
    # the folder would mean both dumps, each text twice
    assert result.stdout.endswith(f"--docs enwiki=data/raw/enwiki/{old} --language en\n")


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
