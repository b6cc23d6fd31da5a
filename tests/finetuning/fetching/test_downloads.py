"""Data that is fetched from local servers, into the folders where the tasks look for it, whole or not at all; and a
task that is made of the demo corpus: balanced, the same every time, and nothing of dev in train."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import run_main
from support.hub import publish_dataset
from support.tasks import CUTTER
from support.website import CONTENT, OTHER, Site, arguments, names

from data_prep.readers.formats import demo
from finetuning import fetch
from finetuning.fetch import main
from finetuning.fetching import downloads
from finetuning.fetching.demo_task import find_package
from finetuning.files.splits import find_glue
from finetuning.settings import FineTuning
from finetuning.tasks.own import open_own
from finetuning.tasks.task import Setup

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


Publish = Callable[..., None]
"""Puts the files of a task of GLUE on the site, with their checksums in our table."""
Fetch = Callable[..., str]
"""Calls the command with these words, on the site; returns what it prints, or why it refuses."""


def list_checksums(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


@pytest.fixture
def publish(site: Site, monkeypatch: pytest.MonkeyPatch) -> Publish:
    def put(task: str, *contents: bytes) -> None:
        files = dict(zip(downloads.GLUE[task], contents, strict=True))
        for path, content in files.items():
            site.put(f"/{path}", content)
        monkeypatch.setitem(downloads.GLUE, task, list_checksums(files))

    return put


@pytest.fixture
def fetched(site: Site) -> Fetch:
    def run(words: str, code: int = 0, mirror: str = site.url) -> str:
        return run_main(fetch.main, *arguments(*words.split(), "--mirror", mirror), code=code)

    return run


SPLITS = {"train.tsv": CONTENT, "dev.tsv": b"dev", "test.tsv": b"test"}


def test_a_task_lies_where_it_is_looked_for(site: Site, publish: Publish, fetched: Fetch) -> None:
    """With connections lost on the way; what it was made from is gone, and the same command fetches nothing twice."""
    publish("sst2", archive("SST-2", SPLITS))
    site.drops = 1
    said = fetched("glue --task SST-2")
    assert names(Path()) == [f"data/glue/SST-2/{name}" for name in sorted(SPLITS)]
    assert Path("data/glue/SST-2/train.tsv").read_bytes() == CONTENT
    assert site.ranges == [None, f"bytes={site.cut}-"]
    assert "its sha256 is right" in said
    assert said.endswith("next:\n    python finetuning/run_glue.py --task sst2\n")
    requests = len(site.requests)
    assert "data/glue/SST-2: already there" in fetched("glue --task SST-2")
    assert len(site.requests) == requests


HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
TRAIN = f'\ufeff{HEADER}\r\n1\t11\t12\tA "quote.\tB\u2028b.\r\n0\t21\t22\tC.\tD.\r\n1\t31\t32\tE.\tF.\r\n'.encode()
TEST = f"\ufeff{HEADER}\r\n1\t41\t42\tG.\tH.\r\n0\t51\t52\tI.\tJ.\r\n".encode()
DEV_IDS = b"21\t22\n12\t11\n"


def test_all_tasks_by_default(publish: Publish, fetched: Fetch) -> None:
    """Of MRPC the pairs of the list are dev, in the order of the file; test has numbers for labels."""
    for name, sources in list(downloads.GLUE.items()):
        if next(iter(sources)).endswith(".zip"):
            splits = dict.fromkeys(downloads.list_tables(name), name.encode())
            publish(name, archive(downloads.name_folder(name), splits))
    publish("mrpc", TRAIN, TEST, DEV_IDS)
    publish("ax", b"ax")
    said = fetched("glue --out mine")
    assert names(Path("mine")) == sorted(
        f"{downloads.name_folder(task)}/{name}" for task in downloads.GLUE for name in downloads.list_tables(task)
    )
    assert Path("mine/MNLI/dev_mismatched.tsv").read_text() == "mnli"
    assert Path("mine/AX/AX.tsv").read_text() == "ax"
    assert find_glue(Path("mine")) == tuple(name for name in downloads.GLUE if name != "ax")
    assert said.endswith("next:\n    python finetuning/run_glue.py --data mine\n")
    train, dev, test = (Path("mine/MRPC", f"{split}.tsv").read_bytes().decode() for split in ("train", "dev", "test"))
    assert train == f'{HEADER}\n1\t11\t12\tA "quote.\tB\u2028b.\n1\t31\t32\tE.\tF.\n'
    assert dev == f"{HEADER}\n0\t21\t22\tC.\tD.\n"
    assert test == "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t41\t42\tG.\tH.\n1\t51\t52\tI.\tJ.\n"


def test_what_is_not_whole_leaves_no_task(site: Site, publish: Publish, fetched: Fetch) -> None:
    """A file with another checksum, through the real table: no server has these bytes. An archive without a split."""
    site.put("/glue/data/CoLA.zip", archive("CoLA", SPLITS))
    told = f"it should be {downloads.GLUE['cola']['glue/data/CoLA.zip']}\n"
    assert told in fetched("glue --task cola", code=2)
    assert names(Path()) == ["data/glue/.downloads/CoLA.zip.bad"]
    publish("rte", archive("RTE", {"train.tsv": b"train"}))
    assert "has no RTE/dev.tsv" in fetched("glue --task rte", code=2)
    assert not Path("data/glue/RTE").exists()


def test_a_disk_that_is_full_leaves_no_half_and_files_of_the_user_stay(
    publish: Publish, fetched: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that lacks a split gets that alone, whatever an interruption left of it before."""
    publish("rte", archive("RTE", SPLITS))

    def be_full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("dev.tsv.tmp"):
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", be_full)
        assert "No space left" in fetched("glue --task rte", code=2)
    assert names(Path("data/glue")) == [".downloads/RTE.zip"]
    assert not Path("data/glue/.RTE.tmp").exists()
    for name in ("RTE/train.tsv", ".RTE.tmp/dev.tsv"):
        Path("data/glue", name).parent.mkdir(parents=True, exist_ok=True)
        Path("data/glue", name).write_text("mine")
    fetched("glue --task rte")
    assert Path("data/glue/RTE/train.tsv").read_text() == "mine"
    assert Path("data/glue/RTE/dev.tsv").read_text() == "dev"
    assert names(Path("data/glue")) == sorted(f"RTE/{name}" for name in SPLITS)


def test_squad_by_version(site: Site, fetched: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"train-v1.1.json": CONTENT, "dev-v1.1.json": OTHER}
    for name, file in content.items():
        site.put(f"/{name}", file)
    monkeypatch.setitem(downloads.SQUAD, "1.1", list_checksums(content))
    assert fetched("squad --version 1.1").endswith("next:\n    python finetuning/run_squad.py --version 1.1\n")
    assert names(Path()) == ["data/squad/dev-v1.1.json", "data/squad/train-v1.1.json"]


def test_a_file_without_a_checksum_is_compared_with_its_first_download(site: Site, fetched: Fetch) -> None:
    for name in ("train", "val", "test"):
        site.put(f"/{name}.csv", CONTENT)
    assert fetched("swag").endswith("next:\n    python finetuning/run_swag.py\n")
    kept, first = Path("data/swag/val.csv"), hashlib.sha256(CONTENT).hexdigest()
    noted = kept.with_name("val.csv.sha256")
    assert noted.read_text() == f"{first}  val.csv\n"
    site.put("/val.csv", OTHER)
    kept.unlink()
    assert f"it should be {first} (by {noted}, of the first download" in fetched("swag", code=2)
    noted.unlink()
    fetched("swag")
    assert kept.read_bytes() == OTHER
    noted.write_text("?\n")
    assert "no checksum; delete it" in fetched("swag", code=2)


def test_from_the_hub(site: Site, mirror: Site, fetched: Fetch) -> None:
    """The Parquet files lie in the folders that the files of the official servers lie in."""
    files = {f"{part}/{split}-00000-of-00001.parquet": part.encode() for part, split in HUB}
    publish_dataset(site, mirror, downloads.HUB_GLUE, files)
    fetched("glue --from-hub --task mnli sst2")
    assert names(Path("data/glue")) == [
        "MNLI/train-00000-of-00001.parquet",
        "MNLI/validation_matched-00000-of-00001.parquet",
        "SST-2/train-00000-of-00001.parquet",
    ]
    assert find_glue(Path("data/glue")) == ("sst2", "mnli")
    assert "nyu-mll/glue: has no rte on this hub" in fetched("glue --from-hub --task rte", code=2)
    for version, name in downloads.HUB_SQUAD.items():
        parts = {f"plain_text/{split}-00000-of-00001.parquet": CONTENT for split in ("train", "validation")}
        publish_dataset(site, mirror, name, parts)
        assert "its sha256 is right" in fetched(f"squad --from-hub --version {version}")
    assert names(Path("data/squad")) == [
        f"{split}-v{version}.parquet" for split in ("dev", "train") for version in ("1.1", "2.0")
    ]


HUB = [("sst2", "train"), ("mnli", "train"), ("mnli", "validation_matched"), ("mnli_matched", "validation")]


def test_without_a_network_it_says_so(fetched: Fetch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    for words in ("glue --task cola", "squad", "swag", "squad --from-hub"):
        told = fetched(words, code=2, mirror=closed)
        for part in ("cannot be reached", "check the network", "name a mirror with --mirror"):
            assert part in told, words
        assert "Traceback" not in told
    assert names(Path()) == []


def test_all_faults_of_a_command_at_once(fetched: Fetch) -> None:
    assert fetched("glue --task sst RTE --retries -1", code=2, mirror="here").splitlines() == [
        "error: --retries -1: at least 0",
        f"--mirror here: an address, as {downloads.GLUE_SERVER}",
        f"--task sst: no task of GLUE; there is {', '.join(downloads.GLUE)}",
    ]
    assert fetched("squad --version 3.0", code=2) == "error: --version 3.0: there is 1.1, 2.0\n"


def test_every_archive_has_its_checksum() -> None:
    """An archive is deleted once it is unpacked, so that there is no first download to compare another with."""
    checksums = [checksum for files in downloads.GLUE.values() for checksum in files.values()]
    assert all(len(checksum) == 64 for checksum in checksums)
    assert len({*checksums}) == len(checksums)


# The task of the demo corpus


WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()


def write_modules(packages: Path, package: str, shared: str = "") -> None:
    """Twenty modules of a package, with ten texts each that have its name in them."""
    for module in range(20):
        texts = [f"This text of {package} tells of {word} and then of number {module} at length." for word in WORDS]
        path = packages / package / f"module{module:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        bodies = (f'    """{text} {"It goes on. " * 3}"""\n' for text in [*texts, shared])
        path.write_text("\n".join(f"def f{number}():\n{body}" for number, body in enumerate(bodies)))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python with two packages, and a third that has too little."""
    folder = tmp_path / "site-packages"
    for package in ("pyred", "blueness"):
        write_modules(folder, package, "This text stands in all of the packages that are here, and so says nothing.")
    write_modules(folder / "few", "small")
    for path in sorted((folder / "few" / "small").iterdir())[2:]:
        path.unlink()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(folder))
    return folder


def make(out: Path) -> dict[str, list[dict[str, str]]]:
    """The items of both splits of a task of two packages."""
    assert main(["demo", "--out", str(out), "--packages", "2", "--train", "40", "--dev", "20"]) == 0
    splits = ("train", "dev")
    return {split: [json.loads(line) for line in (out / f"{split}.jsonl").read_text().splitlines()] for split in splits}


def test_splits_are_balanced_of_different_modules_and_say_no_answer(packages: Path, tmp_path: Path) -> None:
    """The same every time."""
    splits = make(tmp_path / "task")
    assert make(tmp_path / "again") == splits
    texts = [item["text"] for items in splits.values() for item in items]
    assert not [text for text in texts if "red" in text or "blue" in text or "stands in all" in text]
    assert all(text.startswith("This text of package tells") for text in texts)
    assert Counter(item["package"] for item in splits["train"]) == {"pyred": 40, "blueness": 40}
    assert Counter(item["package"] for item in splits["dev"]) == {"pyred": 20, "blueness": 20}
    modules = {split: {item["text"].split("number ")[1][:2] for item in items} for split, items in splits.items()}
    read, unread = demo.halves()
    assert {*read} | {*unread} == {*packages.rglob("*.py")}
    for split, half in (("train", read), ("dev", unread)):
        assert {f"{int(number):02}" for number in modules[split]} <= {path.stem[-2:] for path in half}
    assert not {item["text"] for item in splits["train"]} & {item["text"] for item in splits["dev"]}
    task = open_own(tmp_path / "task" / "package.toml", Setup(CUTTER, FineTuning()))
    assert task.head.labels == ("blueness", "pyred")
    assert (len(task.train), len(task.dev["dev"])) == (80, 40)


def test_too_little_text_is_said(packages: Path, tmp_path: Path) -> None:
    said = run_main(main, "demo", "--out", tmp_path / "task", "--train", 40, "--dev", 20, code=2)
    assert "2 of the installed packages have 40 and 20 texts" in said
    assert not (tmp_path / "task").exists()
    said = run_main(main, "demo", "--packages", 1, "--train", 0, code=2)
    assert all(fault in said for fault in ("--packages 1", "--train 0"))


def test_packages_are_told_by_where_modules_lie() -> None:
    assert find_package(Path("/usr/lib/python3/site-packages/numpy/linalg/linalg.py")) == "numpy"
    assert find_package(Path("/usr/lib/python3/dist-packages/six.py")) == "six"
    assert find_package(Path("/usr/lib/python3/json/decoder.py")) == "python"


def test_files_of_somebody_else_stay(packages: Path, tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task/train.jsonl").write_text("mine")
    command = ["demo", "--out", tmp_path / "task", "--packages", 2, "--train", 40, "--dev", 20]
    assert f"{tmp_path / 'task/train.jsonl'}: exists" in run_main(main, *command, code=2)
    assert [path.read_text() for path in (tmp_path / "task").iterdir()] == ["mine"]
    run_main(main, *command, "--replace")
    run_main(main, *command)  # of the same packages once more
