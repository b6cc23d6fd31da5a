"""Dumps of Wikipedia and data sets of the Hugging Face hub: which of their files are fetched, what is refused."""

import hashlib
import re
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.website import (
    CONTENT,
    OTHER,
    SIZE,
    Handler,
    Request,
    Site,
    interrupt,
    names,
    publish_dataset,
    replace_servers,
    run,
)

pytest_plugins = ["support.website"]
pytestmark = pytest.mark.usefixtures("surroundings", "official")


def publish(site: Site, wiki: str, date: str, content: bytes) -> str:
    """Publishes a dump with its list of checksums, as the official site has them; returns the name of the file."""
    name = f"{wiki}-{date}-pages-articles-multistream.xml.bz2"
    site.put(f"/{wiki}/{date}/{name}", content)
    others = {f"{name[:-8]}-index.txt.bz2": b"index", name.replace("-multistream", ""): b"whole"}
    sums = {file: hashlib.sha1(text).hexdigest() for file, text in {**others, name: content}.items()}
    for folder in (date, "latest"):
        lines = "".join(f"{sums[file]}  {file}\n" for file in sorted(sums))
        site.put(f"/{wiki}/{folder}/{wiki}-{folder}-sha1sums.txt", lines.encode())
    return name


def test_the_latest_wikipedia(site: Site) -> None:
    publish(site, "zh_min_nanwiki", "20250501", OTHER)
    name = publish(site, "zh_min_nanwiki", "20250601", CONTENT)
    site.drops = 1
    said = run("wikipedia", "--language", "zh-min-nan")
    folder = Path("data/raw/zh_min_nanwiki")
    assert names(folder) == [name]
    assert (folder / name).read_bytes() == CONTENT
    assert "its sha1 is right" in said
    assert said.endswith("\n    python data_prep/shard.py --docs data/raw/zh_min_nanwiki\n")
    paths = [request.path for request in site.requests]
    listed, file = "/zh_min_nanwiki/latest/zh_min_nanwiki-latest-sha1sums.txt", f"/zh_min_nanwiki/20250601/{name}"
    assert paths == [listed, file, file]
    assert site.ranges[2] == f"bytes={site.cut}-"
    run("wikipedia", "--language", "zh-min-nan")
    assert len(site.requests) == 4  # the list once more, and nothing else


def test_the_latest_of_a_list_with_two_dates(site: Site) -> None:
    publish(site, "enwiki", "20250601", CONTENT)
    publish(site, "enwiki", "20250501", OTHER)
    lists = [site.files[f"/enwiki/{date}/enwiki-{date}-sha1sums.txt"] for date in ("20250601", "20250501")]
    site.put("/enwiki/latest/enwiki-latest-sha1sums.txt", b"".join(lists))
    run("wikipedia", "--out", "out")
    assert names(Path("out")) == ["enwiki-20250601-pages-articles-multistream.xml.bz2"]


def test_a_dated_wikipedia_beside_another(site: Site) -> None:
    old, new = publish(site, "enwiki", "20250501", OTHER), publish(site, "enwiki", "20250601", CONTENT)
    assert run("wikipedia").endswith("--docs data/raw/enwiki --language en\n")
    said = run("wikipedia", "--date", "20250501")
    assert Path("data/raw/enwiki", old).read_bytes() == OTHER
    assert Path("data/raw/enwiki", new).read_bytes() == CONTENT
    # the folder would mean both dumps, each text twice
    assert said.endswith(f"--docs enwiki=data/raw/enwiki/{old} --language en\n")


def test_a_file_spoilt_on_the_disk_is_noticed(site: Site) -> None:
    name, command = publish(site, "enwiki", "20250601", CONTENT), ["wikipedia", "--out", "out"]
    run(*command)
    Path("out", name).write_bytes(CONTENT[:-1] + b"?")
    said = run(*command, code=2)
    assert names(Path("out")) == [name + ".bad"]
    assert all(hashlib.sha1(text).hexdigest() in said for text in (CONTENT, CONTENT[:-1] + b"?"))
    run(*command)
    assert Path("out", name).read_bytes() == CONTENT


def test_another_server_continues_what_one_began(site: Site, mirror: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    name = publish(site, "enwiki", "20250601", CONTENT)
    publish(mirror, "enwiki", "20250601", CONTENT)
    site.drops, mirror.tag = 1, '"another-{}"'
    command = ["wikipedia", "--date", "20250601", "--out", "out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", interrupt)
        run(*command, code=130)
    assert Path("out", name + ".part").stat().st_size == site.cut
    replace_servers(monkeypatch, mirror.url)
    run(*command)
    assert Path("out", name).read_bytes() == CONTENT
    assert mirror.ranges == [None, f"bytes={site.cut}-"]
    assert mirror.sent < SIZE  # the list and the rest


def test_what_wikipedia_does_not_have(site: Site) -> None:
    message = run("wikipedia", "--language", "xx", code=2)
    assert re.search(rf"404[\s\S]*the dates that there are: {site.url}/xxwiki/", message)
    site.put("/enwiki/20250601/enwiki-20250601-sha1sums.txt", b"0" * 40 + b"  enwiki-20250601-site_stats.sql.gz\n")
    assert "try an earlier --date" in run("wikipedia", "--date", "20250601", code=2)


def test_the_list_is_fetched_patiently(site: Site) -> None:
    name = publish(site, "enwiki", "20250601", CONTENT)
    site.statuses, site.drops, site.cut = [503], 1, 100  # then the list is cut short
    run("wikipedia", "--out", "out")
    assert Path("out", name).read_bytes() == CONTENT


def test_a_dataset_of_the_hub(site: Site, mirror: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    files = {"README.md": b"read", "20231101.en/train-0.parquet": CONTENT, "20231101.de/train-0.parquet": OTHER}
    publish_dataset(site, mirror, "owner/texts", files)
    mirror.drops = 1
    said = run("hub", "owner/texts", "--config-name", "20231101.en")
    folder = Path("data/raw/owner-texts-20231101.en")
    assert names(folder) == ["20231101.en/train-0.parquet"]
    assert (folder / "20231101.en/train-0.parquet").read_bytes() == CONTENT
    assert "its sha256 is right" in said
    assert said.endswith("--docs data/raw/owner-texts-20231101.en\n")
    assert mirror.ranges == [None, f"bytes={mirror.cut}-"]
    asked = [request for request in site.requests if "owner/texts" in request.path]
    assert {request.headers.get("authorization") for request in asked} == {"Bearer hf_secret"}
    assert {request.headers.get("authorization") for request in mirror.requests} == {None}  # it is not theirs to see


def test_the_part_of_a_dataset_is_chosen(site: Site, mirror: Site) -> None:
    files = {"en/0.parquet": CONTENT, "de/0.parquet": OTHER, "top.parquet": b"top"}
    publish_dataset(site, mirror, "owner/texts", files)
    command = ["hub", "owner/texts", "--out", "out"]
    assert "choose a part with --config-name, or all with '*': ., de, en" in run(*command, code=2)
    assert "no such part; it has ., de, en" in run(*command, "--config-name", "fr", code=2)
    assert not mirror.requests
    run(*command, "--config-name", "*")
    assert names(Path("out")) == ["de/0.parquet", "en/0.parquet", "top.parquet"]
    assert Path("out/de/0.parquet").read_bytes() == OTHER


def test_a_dataset_that_the_hub_converted(site: Site, mirror: Site) -> None:
    command = ["hub", "owner/texts", "--out", "out"]
    publish_dataset(site, mirror, "owner/texts", {"texts.jsonl": b"{}"})
    assert "no Parquet files in main or refs/convert/parquet" in run(*command, code=2)
    converted = "f" * 40
    site.replies["/api/datasets/owner/texts/revision/refs/convert/parquet"] = {"id": "owner/texts", "sha": converted}
    site.replies[f"/api/datasets/owner/texts/tree/{converted}"] = [
        {"type": "file", "path": "default/train/0000.parquet", "size": SIZE, "oid": "0"}
    ]
    site.put(f"/datasets/owner/texts/resolve/{converted}/default/train/0000.parquet", CONTENT)
    run(*command)
    assert Path("out/default/train/0000.parquet").read_bytes() == CONTENT


def test_a_server_cannot_write_outside_the_folder(site: Site, mirror: Site) -> None:
    publish_dataset(site, mirror, "owner/texts", {"en/../../evil.parquet": CONTENT})
    said = run("hub", "owner/texts", "--out", "out", code=2)
    assert "a file outside the data set" in said
    assert not mirror.requests


REFUSALS = [
    (401, "RepoNotFound", "no such data set"),
    (403, "GatedRepo", "accept its conditions there, then log in"),
    (404, "RevisionNotFound", "has no branch, tag or commit nowhere"),
    (500, "", "does not answer as the hub does"),
]


@pytest.mark.parametrize(("status", "code", "message"), REFUSALS)
def test_refusals_of_the_hub(status: int, code: str, message: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.answer(Request("", {}), status, **{"X-Error-Code": code}))
    said = run("hub", "owner/texts", "--revision", "nowhere", code=2)
    assert message in said
    assert f"{site.url}/datasets/owner/texts" in said


def test_other_errors_of_the_hub(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not the name of a data set" in run("hub", "a/b/c", code=2)
    site.put("/api/datasets/owner/texts", b"<html>")
    command = ["hub", "owner/texts"]
    assert "does not answer as the hub does" in run(*command, code=2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids the network" in run(*command, code=2)
