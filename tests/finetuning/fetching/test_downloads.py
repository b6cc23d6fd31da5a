"""Data that is fetched: from local servers, into the folders where the tasks look for it, whole or not at all."""

from __future__ import annotations

import hashlib
import io
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT
from support.hub import publish_dataset
from support.website import CONTENT, OTHER, Site, arguments, names

from finetuning import fetch
from finetuning.fetching import downloads
from finetuning.tasks.glue import find_glue

pytest_plugins = ["support.website_fixtures"]
pytestmark = pytest.mark.usefixtures("surroundings")


def archive(folder: str, files: dict[str, bytes]) -> bytes:
    """An archive as GLUE has them, with more in it than the splits."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as written:
        written.writestr(f"{folder}/original/train.tsv", b"not this one")
        written.writestr(f"__MACOSX/{folder}/._train.tsv", b"nor this one")
        for name, content in files.items():
            written.writestr(f"{folder}/{name}", content)
    return buffer.getvalue()


def publish(site: Site, task: str, *contents: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the files of a task of GLUE on a site, with their checksums in our table."""
    sources = []
    for source, content in zip(downloads.GLUE[task], contents, strict=True):
        site.put(f"/{source.path}", content)
        sources.append(replace(source, sha256=hashlib.sha256(content).hexdigest()))
    monkeypatch.setitem(downloads.GLUE, task, tuple(sources))


def run(*words: object) -> int:
    return fetch.main(arguments(*words))


def run_script(*words: object) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user does."""
    entry = [sys.executable, str(ROOT / "finetuning" / "fetch.py")]
    return subprocess.run([*entry, *arguments(*words)], capture_output=True, text=True, timeout=60, check=False)


SPLITS = {"train.tsv": CONTENT, "dev.tsv": b"dev", "test.tsv": b"test"}


def test_a_task_lies_where_it_is_looked_for(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With connections lost on the way; what it was made from is gone, and the same command fetches nothing twice."""
    publish(site, "sst2", archive("SST-2", SPLITS), monkeypatch=monkeypatch)
    site.drops = 1
    command = ("glue", "--task", "SST-2", "--mirror", site.url)
    assert run(*command) == 0
    assert names(Path()) == [f"data/glue/SST-2/{name}" for name in sorted(SPLITS)]
    assert Path("data/glue/SST-2/train.tsv").read_bytes() == CONTENT
    assert site.ranges == [None, f"bytes={site.cut}-"]
    said = capsys.readouterr().out
    assert "its sha256 is right" in said
    assert said.endswith("next:\n    python finetuning/run_glue.py --task sst2\n")
    requests = len(site.requests)
    assert run(*command) == 0
    assert len(site.requests) == requests
    assert "data/glue/SST-2: already there" in capsys.readouterr().out


def test_all_tasks_by_default(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, sources in list(downloads.GLUE.items()):
        if sources[0].path.endswith(".zip"):
            content = archive(downloads.name_folder(name), dict.fromkeys(downloads.list_tables(name), name.encode()))
            publish(site, name, content, monkeypatch=monkeypatch)
    publish(site, "mrpc", TRAIN, TEST, DEV_IDS, monkeypatch=monkeypatch)
    publish(site, "ax", b"ax", monkeypatch=monkeypatch)
    assert run("glue", "--out", "mine", "--mirror", site.url) == 0
    assert names(Path("mine")) == sorted(
        f"{downloads.name_folder(task)}/{name}" for task in downloads.GLUE for name in downloads.list_tables(task)
    )
    assert Path("mine/MNLI/dev_mismatched.tsv").read_text() == "mnli"
    assert Path("mine/AX/AX.tsv").read_text() == "ax"
    assert find_glue(Path("mine")) == tuple(name for name in downloads.GLUE if name != "ax")
    assert capsys.readouterr().out.endswith("next:\n    python finetuning/run_glue.py --data mine\n")


HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
TRAIN = f'\ufeff{HEADER}\r\n1\t11\t12\tA "quote.\tB\u2028b.\r\n0\t21\t22\tC.\tD.\r\n1\t31\t32\tE.\tF.\r\n'.encode()
TEST = f"\ufeff{HEADER}\r\n1\t41\t42\tG.\tH.\r\n0\t51\t52\tI.\tJ.\r\n".encode()
DEV_IDS = b"21\t22\n12\t11\n"


def test_mrpc_is_divided_as_in_glue(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs of the list are dev, in the order of the file; test has numbers for labels."""
    publish(site, "mrpc", TRAIN, TEST, DEV_IDS, monkeypatch=monkeypatch)
    assert run("glue", "--task", "mrpc", "--mirror", site.url) == 0
    files = {name: Path("data/glue/MRPC", name).read_bytes().decode() for name in downloads.list_tables("mrpc")}
    assert files["train.tsv"] == f'{HEADER}\n1\t11\t12\tA "quote.\tB\u2028b.\n1\t31\t32\tE.\tF.\n'
    assert files["dev.tsv"] == f"{HEADER}\n0\t21\t22\tC.\tD.\n"
    assert files["test.tsv"] == "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t41\t42\tG.\tH.\n1\t51\t52\tI.\tJ.\n"


def test_a_file_with_another_checksum_is_not_unpacked(site: Site) -> None:
    """Through the real table: no server has these bytes."""
    site.put("/glue/data/CoLA.zip", archive("CoLA", SPLITS))
    done = run_script("glue", "--task", "cola", "--mirror", site.url)
    assert done.returncode == 2
    assert f"it should be {downloads.GLUE['cola'][0].sha256}\n" in done.stderr
    assert names(Path()) == ["data/glue/.downloads/CoLA.zip.bad"]


def test_an_archive_that_lacks_a_split_leaves_no_task(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(site, "rte", archive("RTE", {"train.tsv": b"train"}), monkeypatch=monkeypatch)
    assert run("glue", "--task", "rte", "--mirror", site.url) == 2
    assert "has no RTE/dev.tsv" in capsys.readouterr().err
    assert not Path("data/glue/RTE").exists()


def test_files_of_the_user_stay(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that lacks a split gets that alone, whatever an interruption left of it before."""
    publish(site, "rte", archive("RTE", SPLITS), monkeypatch=monkeypatch)
    for name in ("RTE/train.tsv", ".RTE.tmp/dev.tsv"):
        Path("data/glue", name).parent.mkdir(parents=True, exist_ok=True)
        Path("data/glue", name).write_text("mine")
    assert run("glue", "--task", "rte", "--mirror", site.url) == 0
    assert Path("data/glue/RTE/train.tsv").read_text() == "mine"
    assert Path("data/glue/RTE/dev.tsv").read_text() == "dev"
    assert names(Path("data/glue")) == sorted(f"RTE/{name}" for name in SPLITS)


def test_a_disk_that_is_full_leaves_no_half(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(site, "rte", archive("RTE", SPLITS), monkeypatch=monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert run("glue", "--task", "rte", "--mirror", site.url) == 2
    assert "No space left" in capsys.readouterr().err
    assert not Path("data/glue/RTE").exists()
    assert run("glue", "--task", "rte", "--mirror", site.url) == 0
    assert Path("data/glue/RTE/train.tsv").read_bytes() == CONTENT


def full(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_squad_by_version(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"train-v1.1.json": CONTENT, "dev-v1.1.json": OTHER}
    for name, file in content.items():
        site.put(f"/{name}", file)
    found = tuple(downloads.ServedFile(name, hashlib.sha256(file).hexdigest()) for name, file in content.items())
    monkeypatch.setitem(downloads.SQUAD, "1.1", found)
    assert run("squad", "--version", "1.1", "--mirror", site.url) == 0
    assert names(Path()) == ["data/squad/dev-v1.1.json", "data/squad/train-v1.1.json"]
    assert capsys.readouterr().out.endswith("next:\n    python finetuning/run_squad.py --version 1.1\n")


def test_a_file_without_a_checksum_is_compared_with_its_first_download(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "val", "test"):
        site.put(f"/{name}.csv", CONTENT)
    command = ("swag", "--mirror", site.url)
    assert run(*command) == 0
    folder = Path("data/swag")
    assert (folder / "val.csv.sha256").read_text() == f"{hashlib.sha256(CONTENT).hexdigest()}  val.csv\n"
    assert capsys.readouterr().out.endswith("next:\n    python finetuning/run_swag.py\n")
    site.put("/val.csv", OTHER)
    (folder / "val.csv").unlink()
    assert run(*command) == 2
    error = capsys.readouterr().err
    assert (
        f"it should be {hashlib.sha256(CONTENT).hexdigest()} (by {folder}/val.csv.sha256, of the first download"
        in error
    )
    (folder / "val.csv.sha256").unlink()
    assert run(*command) == 0
    assert (folder / "val.csv").read_bytes() == OTHER
    (folder / "val.csv.sha256").write_text("?\n")
    assert run(*command) == 2
    assert "no checksum; delete it" in capsys.readouterr().err


def test_from_the_hub(site: Site, mirror: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The Parquet files lie in the folders that the files of the official servers lie in."""
    files = {f"{part}/{split}-00000-of-00001.parquet": part.encode() for part, split in HUB}
    publish_dataset(site, mirror, downloads.HUB_GLUE, files)
    assert run("glue", "--from-hub", "--task", "mnli", "sst2", "--mirror", site.url) == 0
    assert names(Path("data/glue")) == [
        "MNLI/train-00000-of-00001.parquet",
        "MNLI/validation_matched-00000-of-00001.parquet",
        "SST-2/train-00000-of-00001.parquet",
    ]
    assert find_glue(Path("data/glue")) == ("sst2", "mnli")
    assert run("glue", "--from-hub", "--task", "rte", "--mirror", site.url) == 2
    assert "nyu-mll/glue: has no rte on this hub" in capsys.readouterr().err
    for version, name in downloads.HUB_SQUAD.items():
        parts = {f"plain_text/{split}-00000-of-00001.parquet": CONTENT for split in ("train", "validation")}
        publish_dataset(site, mirror, name, parts)
        assert run("squad", "--from-hub", "--version", version, "--mirror", site.url) == 0
    assert names(Path("data/squad")) == [
        f"{split}-v{version}.parquet" for split in ("dev", "train") for version in ("1.1", "2.0")
    ]
    assert "its sha256 is right" in capsys.readouterr().out


HUB = [("sst2", "train"), ("mnli", "train"), ("mnli", "validation_matched"), ("mnli_matched", "validation")]


@pytest.mark.parametrize("words", ["glue --task cola", "squad", "swag", "squad --from-hub"])
def test_without_a_network_it_says_so(words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    done = run_script(*words.split(), "--mirror", closed)
    assert done.returncode == 2
    assert "cannot be reached" in done.stderr
    assert "check the network" in done.stderr
    assert "name a mirror with --mirror" in done.stderr
    assert "Traceback" not in done.stderr
    assert names(Path()) == []


def test_all_faults_of_a_command_at_once() -> None:
    done = run_script("glue", "--task", "sst", "RTE", "--mirror", "here", "--retries", "-1")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: --retries -1: at least 0",
        f"--mirror here: an address, as {downloads.GLUE_SERVER}",
        f"--task sst: no task of GLUE; there is {', '.join(downloads.GLUE)}",
    ]
    done = run_script("squad", "--version", "3.0")
    assert done.stderr == "error: --version 3.0: there is 1.1, 2.0\n"


def test_every_archive_has_its_checksum() -> None:
    """An archive is deleted once it is unpacked, so that there is no first download to compare another with."""
    sources = [source for sources in downloads.GLUE.values() for source in sources]
    assert all(len(source.sha256) == 64 for source in sources)
    assert len({source.sha256 for source in sources}) == len(sources)
