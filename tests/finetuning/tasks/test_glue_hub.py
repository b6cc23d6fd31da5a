"""GLUE as the Hugging Face hub has it: Parquet, in one file a split or several."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.tasks import CUTTER, labels, laid_out

from data_prep.common.errors import UserError
from finetuning.settings import FineTuning
from finetuning.tasks.glue import TASKS, GlueTask, find_glue, open_glue
from finetuning.tasks.task import Setup


def open_task(name: str, folder: Path) -> GlueTask:
    return open_glue(name, folder, Setup(CUTTER, FineTuning()))


HUB_VALUES = {
    "sentence": ["A.", "B.", "C."],
    "sentence1": ["A.", "B.", "C."],
    "sentence2": ["D.", "E.", "F."],
    "question": ["A?", "B?", "C?"],
    "question1": ["A?", "B?", "C?"],
    "question2": ["D?", "E?", "F?"],
    "premise": ["A.", "B.", "C."],
    "hypothesis": ["D.", "E.", "F."],
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_read_from_the_parquet_of_the_hub(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    ending = ("_matched", "_mismatched") if name == "mnli" else ("",)
    known = [0.0, 2.5, 5.0] if name == "stsb" else [0, 1, len(task.labels) - 1]
    kind = pa.float32() if name == "stsb" else pa.int64()
    splits = {"train": known, **{f"validation{end}": known for end in ending}}
    splits |= {f"test{end}": [-1, -1, -1] for end in ending}
    if name == "mnli":
        write_parquet(tmp_path / "ax", "test", name, pa.array([-1, -1, -1]))
    for split, values in splits.items():
        write_parquet(tmp_path / name, split, name, pa.array(values, kind))
    assert find_glue(tmp_path) == (name,)
    opened = open_task(name, tmp_path)
    first = [HUB_VALUES[field][0].lower().replace(".", " .").replace("?", " ?") for field in task.fields]
    assert laid_out(opened.train, 0) == [f"[CLS] {' [SEP] '.join(first)} [SEP]"]
    assert labels(opened.train) == known
    assert list(opened.dev) == [f"dev{end}" for end in ending]
    assert list(opened.test) == [f"test{end}" for end in ending] + ["ax"] * (name == "mnli")


def test_all_parts_of_a_split_on_the_hub_are_read(tmp_path: Path) -> None:
    """In their order; one that is missing is no smaller data set."""
    for split, values in {"train": [0, 1, 0], "validation": [1, 1, 0]}.items():
        write_parquet(tmp_path / "sst2", split, "sst2", pa.array(values))
    folder = tmp_path / "sst2"
    (folder / "train-00000-of-00001.parquet").rename(folder / "train-00000-of-00003.parquet")
    for number in (1, 2):
        rows = {"sentence": [f"{number}", "b"], "label": [number - 1] * 2}
        pq.write_table(pa.table(rows), folder / f"train-0000{number}-of-00003.parquet")
    task = open_task("sst2", tmp_path)
    assert labels(task.train) == [0, 1, 0, 0, 0, 1, 1]
    assert laid_out(task.train, 5) == ["[CLS] 2 [SEP]"]
    first, last = "train-00000-of-00003.parquet", "train-00002-of-00003.parquet"
    assert task.notes == (f"reads {first} to {last}, validation-00000-of-00001.parquet of {folder}",)
    (folder / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(UserError, match=r"train-00000-of-00003\.parquet: this is one of 3 files, but 2 are there"):
        open_task("sst2", tmp_path)


def write_parquet(folder: Path, split: str, name: str, values: pa.Array) -> None:
    folder.mkdir(exist_ok=True)
    columns = {field: HUB_VALUES[field] for field in TASKS[name].fields}
    pq.write_table(pa.table({**columns, "label": values, "idx": [0, 1, 2]}), folder / f"{split}-00000-of-00001.parquet")
