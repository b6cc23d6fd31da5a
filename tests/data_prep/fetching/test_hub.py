"""Data sets of the Hugging Face hub: their parts, their conversions and what the hub refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hub import publish_dataset
from support.website import CONTENT, OTHER, SIZE, Handler, Request, Site, arguments, names, run

from data_prep import fetch

pytest_plugins = ["support.website_fixtures"]
pytestmark = pytest.mark.usefixtures("surroundings")


def test_a_dataset_of_the_hub(site: Site, mirror: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    files = {"README.md": b"read", "20231101.en/train-0.parquet": CONTENT, "20231101.de/train-0.parquet": OTHER}
    publish_dataset(site, mirror, "owner/texts", files)
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
    publish_dataset(
        site, mirror, "owner/texts", {"en/0.parquet": CONTENT, "de/0.parquet": OTHER, "top.parquet": b"top"}
    )
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
    publish_dataset(site, mirror, "owner/texts", {"texts.jsonl": b"{}"})
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
    publish_dataset(site, mirror, "owner/texts", {"en/../../evil.parquet": CONTENT})
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
