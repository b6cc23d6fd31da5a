"""The task that is made of the demo corpus: balanced, the same every time, and nothing of dev in train."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from support.tasks import CUTTER

from data_prep.readers import demo
from finetuning.fetch import main
from finetuning.fetching.demo_task import find_package
from finetuning.settings import FineTuning
from finetuning.tasks.own import open_own
from finetuning.tasks.task import Setup

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau".split()


def write_modules(site: Path, package: str, shared: str = "") -> None:
    """Twenty modules of a package, with ten texts each that have its name in them."""
    for module in range(20):
        texts = [
            f"This text of {package} tells of {WORDS[n]} and then of number {module} at length." for n in range(10)
        ]
        body = "\n".join(
            f'def f{n}():\n    """{text} {"It goes on. " * 3}"""\n' for n, text in enumerate([*texts, shared])
        )
        path = site / package / f"module{module:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def test_splits_are_balanced_and_out_of_different_modules(site: Path, tmp_path: Path) -> None:
    splits = make(tmp_path / "task")
    assert Counter(item["package"] for item in splits["train"]) == {"pyred": 40, "blueness": 40}
    assert Counter(item["package"] for item in splits["dev"]) == {"pyred": 20, "blueness": 20}
    modules = {split: {item["text"].split("number ")[1][:2] for item in items} for split, items in splits.items()}
    read, unread = demo.halves()
    assert {*read} | {*unread} == {*site.rglob("*.py")}
    for split, half in (("train", read), ("dev", unread)):
        assert {f"{int(number):02}" for number in modules[split]} <= {path.stem[-2:] for path in half}
    assert not {item["text"] for item in splits["train"]} & {item["text"] for item in splits["dev"]}


def test_texts_do_not_say_the_answer(site: Path, tmp_path: Path) -> None:
    texts = [item["text"] for items in make(tmp_path / "task").values() for item in items]
    assert not [text for text in texts if "red" in text or "blue" in text or "stands in all" in text]
    assert all(text.startswith("This text of package tells") for text in texts)


def test_the_task_is_the_same_every_time_and_can_be_opened(site: Path, tmp_path: Path) -> None:
    make(tmp_path / "one")
    make(tmp_path / "two")
    for name in ("train.jsonl", "dev.jsonl", "package.toml"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    task = open_own(tmp_path / "one" / "package.toml", Setup(CUTTER, FineTuning()))
    assert task.head.labels == ("blueness", "pyred")
    assert (len(task.train), len(task.dev["dev"])) == (80, 40)


def test_too_little_text_is_said(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path / "task"), "--train", "40", "--dev", "20"]) == 2
    assert "2 of the installed packages have 40 and 20 texts" in capsys.readouterr().err
    assert not (tmp_path / "task").exists()
    assert main(["demo", "--packages", "1", "--train", "0"]) == 2
    said = capsys.readouterr().err
    assert "--packages 1" in said
    assert "--train 0" in said


def test_packages_are_told_by_where_modules_lie() -> None:
    assert find_package(Path("/usr/lib/python3/site-packages/numpy/linalg/linalg.py")) == "numpy"
    assert find_package(Path("/usr/lib/python3/dist-packages/six.py")) == "six"
    assert find_package(Path("/usr/lib/python3/json/decoder.py")) == "python"


def test_files_of_somebody_else_stay(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task/train.jsonl").write_text("mine")
    command = ["demo", "--out", str(tmp_path / "task"), "--packages", "2", "--train", "40", "--dev", "20"]
    assert main(command) == 2
    assert f"{tmp_path / 'task/train.jsonl'}: exists" in capsys.readouterr().err
    assert [path.read_text() for path in (tmp_path / "task").iterdir()] == ["mine"]
    assert main([*command, "--replace"]) == 0
    make(tmp_path / "task")  # of the same packages once more
