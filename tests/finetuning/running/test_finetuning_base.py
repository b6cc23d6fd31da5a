"""What tells the data of a task from others, known before any of it is cut into pieces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.squad import article, cutter, item, write_squad

from finetuning.inputs import Cutter
from finetuning.running.search import identify_data
from finetuning.settings import FineTuning
from finetuning.tasks.glue import open_glue
from finetuning.tasks.ner import open_ner
from finetuning.tasks.squad import open_squad
from finetuning.tasks.task import Setup, Task

SETTINGS = FineTuning()
Opener = Callable[[Path, str, str], Task]


def glue(folder: Path, text: str, answer: str) -> Task:
    (folder / "SST-2").mkdir(parents=True)
    for split, said in (("train", text), ("dev", "fine")):
        (folder / "SST-2" / f"{split}.tsv").write_text(f"sentence\tlabel\n{said}\t{answer}\nbad\t0\n")
    return open_glue("sst2", folder, Setup(cutter(), SETTINGS))


def squad(folder: Path, text: str, answer: str) -> Task:
    folder.mkdir()
    asked = [item("a", "q", ["z" if answer == "1" else "y"])]
    train = write_squad(folder / "train.json", [article("t", [(f"{text} y z", asked)])])
    dev = write_squad(folder / "dev.json", [article("t", [("a z", [item("a", "q", ["z"])])])])
    return open_squad("1.1", train, dev, Setup(cutter(), SETTINGS))


def ner(folder: Path, text: str, answer: str) -> Task:
    folder.mkdir()
    for split, said in (("train", text), ("valid", "fine")):
        tag = "B-LOC" if answer == "1" else "O"
        (folder / f"{split}.txt").write_text(f"{said} {tag}\nbad B-LOC\n\n")
    return open_ner(folder, Setup(cutter(), SETTINGS))


@pytest.mark.parametrize("open_task", [glue, squad, ner])
def test_other_data_are_known_without_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_task: Opener) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("cut before the first step")

    monkeypatch.setattr(Cutter, "cut_texts", refuse)
    monkeypatch.setattr(Cutter, "cut_with_offsets", refuse)
    first = identify_data(open_task(tmp_path / "a", "good", "1"))
    assert identify_data(open_task(tmp_path / "b", "good", "1")) == first
    other_text = identify_data(open_task(tmp_path / "c", "goods", "1"))
    assert other_text["train"] != first["train"]
    assert other_text["dev"] == first["dev"]
    assert identify_data(open_task(tmp_path / "d", "good", "0"))["train"] != first["train"]
