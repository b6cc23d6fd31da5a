"""Data that is fetched from local servers, into the folders where the tasks look for it, whole or not at all; and a
task that is made of the demo corpus: balanced, the same every time, and nothing of dev in train."""

import hashlib
import json
import socket
from collections import Counter
from pathlib import Path

import pytest
from support.commands import run_main
from support.tasks import CUTTER
from support.website import CONTENT, OTHER, Site, names, publish_dataset, replace_servers

from data_prep.readers.formats import demo
from finetuning import fetch
from finetuning.fetch import find_package, main
from finetuning.files.splits import find_glue
from finetuning.settings import FineTuning
from finetuning.tasks.own import open_own
from finetuning.tasks.task import Setup

pytest_plugins = ["support.website"]
pytestmark = pytest.mark.usefixtures("surroundings", "official")


def list_checksums(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def fetched(words: str, code: int = 0) -> str:
    """Calls the command with these words; returns what it prints, or why it refuses."""
    return run_main(fetch.main, *words.split(), code=code)


def test_squad_by_version(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"train-v1.1.json": CONTENT, "dev-v1.1.json": OTHER}
    for name, file in content.items():
        site.put(f"/{name}", file)
    monkeypatch.setitem(fetch.SQUAD, "1.1", list_checksums(content))
    assert fetched("squad --version 1.1").endswith("next:\n    python finetuning/run_squad.py --version 1.1\n")
    assert names(Path()) == ["data/squad/dev-v1.1.json", "data/squad/train-v1.1.json"]


def test_swag_is_compared_with_its_checksums(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command fetches nothing twice."""
    for name in fetch.SWAG:
        site.put(f"/{name}", CONTENT)
    monkeypatch.setattr(fetch, "SWAG", list_checksums(dict.fromkeys(fetch.SWAG, CONTENT)))
    said = fetched("swag")
    assert "its sha256 is right" in said
    assert said.endswith("next:\n    python finetuning/run_swag.py\n")
    requests = len(site.requests)
    fetched("swag")
    assert len(site.requests) == requests
    Path("data/swag/val.csv").unlink()
    site.put("/val.csv", OTHER)
    assert f"it should be {fetch.SWAG['val.csv']}" in fetched("swag", code=2)


def test_glue_from_the_hub(site: Site, mirror: Site) -> None:
    """The Parquet files lie in the folders of GLUE's own names."""
    parts = "sst2/train mnli/train mnli/validation_matched mnli_matched/validation ax/test".split()
    files = {f"{part}-00000-of-00001.parquet": part.encode() for part in parts}
    publish_dataset(site, mirror, fetch.HUB_GLUE, files)
    said = fetched("glue --task mnli SST-2 ax --out mine")
    assert "its sha256 is right" in said
    assert said.endswith("next:\n    python finetuning/run_glue.py --task mnli sst2 --data mine\n")
    found = [name.removesuffix("-00000-of-00001.parquet") for name in names(Path("mine"))]
    assert found == ["AX/test", "MNLI/train", "MNLI/validation_matched", "SST-2/train"]
    assert find_glue(Path("mine")) == ("sst2", "mnli")
    assert "nyu-mll/glue: has no rte on this hub" in fetched("glue --task rte", code=2)


def test_without_a_network_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    replace_servers(monkeypatch, closed)
    for words in ("glue --task cola", "squad", "swag"):
        told = fetched(words, code=2)
        for part in ("cannot be reached", "check the network"):
            assert part in told, words
        assert "Traceback" not in told
    assert names(Path()) == []


def test_all_faults_of_a_command_at_once() -> None:
    no_task = f"no task of GLUE; there is {', '.join(fetch.GLUE)}\n"
    assert fetched("glue --task sst RTE x", code=2) == f"error: --task sst: {no_task}--task x: {no_task}"
    assert fetched("squad --version 3.0", code=2) == "error: --version 3.0: there is 1.1, 2.0\n"


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
    monkeypatch.setattr(fetch, "PACKAGES", 2)
    monkeypatch.setattr(fetch, "COUNTS", {"train": 40, "dev": 20})
    return folder


def make(out: Path) -> dict[str, list[dict[str, str]]]:
    """The items of both splits of a task of two packages."""
    assert main(["demo", "--out", str(out)]) == 0
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


def test_too_little_text_is_said(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "COUNTS", {"train": 10**4, "dev": 20})
    said = run_main(main, "demo", "--out", tmp_path / "task", code=2)
    assert "0 of the installed packages have enough documentation strings" in said
    assert not (tmp_path / "task").exists()


def test_packages_are_told_by_where_modules_lie() -> None:
    assert find_package(Path("/usr/lib/python3/site-packages/numpy/linalg/linalg.py")) == "numpy"
    assert find_package(Path("/usr/lib/python3/dist-packages/six.py")) == "six"
    assert find_package(Path("/usr/lib/python3/json/decoder.py")) == "python"


def test_files_of_somebody_else_stay(packages: Path, tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task/train.jsonl").write_text("mine")
    command = ["demo", "--out", tmp_path / "task"]
    assert f"{tmp_path / 'task/train.jsonl'}: exists" in run_main(main, *command, code=2)
    assert [path.read_text() for path in (tmp_path / "task").iterdir()] == ["mine"]
    run_main(main, *command, "--replace")
    run_main(main, *command)  # of the same packages once more
